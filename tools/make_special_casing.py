#!/usr/bin/env python3
"""Writes src/io/jinja/special_casing.h: where Python's str.upper(), title() and lower() are more than one character to one.

The tables come from this Python's own str methods. Run with Python 3.11 or newer:  python tools/make_special_casing.py
"""

import pathlib
import unicodedata

TARGET = pathlib.Path(__file__).resolve().parent.parent / "src/io/jinja/special_casing.h"
ALL = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
SIGMA = "\u03a3"


def ranges(characters):
    result = []
    for c in map(ord, characters):
        if result and result[-1][1] == c - 1:
            result[-1][1] = c
        else:
            result.append([c, c])
    return result


def is_cased(c):  # a letter after it is lower in a title
    return (c + "a").title().endswith("a")


def is_ignorable(c):  # the sigma behind it is final because of the letter before it, or in spite of itself
    return ("A" + c + SIGMA).lower().endswith("\u03c2") and not ("1" + c + SIGMA).lower().endswith("\u03c2")


def literal(text):
    return "".join(f"\\x{byte:02X}" for byte in text.encode())


def table(name, kind, rows):
    body = "\n".join(f"    {row}," for row in rows)
    return f"inline constexpr std::array<{kind}, {len(rows)}> {name} = {{{{\n{body}\n}}}};\n"


special = [c for c in ALL if len(c.upper()) > 1 or len(c.title()) > 1]
cased = ranges(c for c in ALL if is_cased(c) and unicodedata.category(c) not in ("Lu", "Ll", "Lt"))
ignorable = ranges(
    c for c in ALL if is_ignorable(c) and unicodedata.category(c) not in ("Mn", "Me", "Cf", "Lm", "Sk"))
assert [c for c in ALL if len(c.lower()) > 1] == ["\u0130"]

TARGET.write_text(f"""// Written by tools/make_special_casing.py: do not edit.
#pragma once

#include <array>
#include <string_view>

namespace nanovllm::jinja {{

/// A character whose upper or title case is several characters.
struct SpecialCase {{
  char32_t character;
  std::string_view upper, title;
}};
struct CharacterRange {{
  char32_t first, last;
}};

// clang-format off
{table("kSpecialCases", "SpecialCase", [f'{{0x{ord(c):04X}, "{literal(c.upper())}", "{literal(c.title())}"}}' for c in special])}
/// The characters that have case beside the categories Lu, Ll and Lt.
{table("kOtherCased", "CharacterRange", [f"{{0x{a:04X}, 0x{b:04X}}}" for a, b in cased])}
/// The characters that a final sigma looks across beside the categories Mn, Me, Cf, Lm and Sk.
{table("kOtherCaseIgnorable", "CharacterRange", [f"{{0x{a:04X}, 0x{b:04X}}}" for a, b in ignorable])}// clang-format on

}}  // namespace nanovllm::jinja
""")
