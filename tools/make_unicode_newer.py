#!/usr/bin/env python3
"""Writes src/io/tokenizer/patterns/unicode_newer.h: what the Hugging Face library `tokenizers` knows about Unicode beyond, or short of,
version 14.0, the oldest that a supported utf8proc has.

Its regular expressions and its lower case know a newer version: the characters whose general category or lower case differs.
Its other normalizers know an older one: the characters of 14.0 that have a decomposition or a combining class there and are inert for the library.
Both are measured: every code point goes through the library.
Needs Python 3.11 (whose unicodedata is Unicode 14.0) and tokenizers 0.23.
"""
import pathlib
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
TARGET = pathlib.Path(__file__).resolve().parent.parent / "src/io/tokenizer/patterns/unicode_newer.h"

HEADER = """\
// Written by tools/make_unicode_newer.py: do not edit.
// Characters whose general category in the reference library (Unicode 16.0) differs from that of Unicode 14.0.
#pragma once

#include <array>

#include "io/tokenizer/patterns/unicode.h"

namespace nanovllm {

struct NewerRange {
  char32_t first, last;
  Category category;
};

struct InertRange {
  char32_t first, last;
};

/// Characters first to last have the lower case lower, lower + 1 ...
struct NewerLowerRange {
  char32_t first, last, lower;
};

"""


def measured_categories():
    result = {}
    for category in CATEGORIES:
        keep = pre_tokenizers.Split(Regex(r"\p{%s}" % category), "removed", invert=True)
        for start in range(0, len(CODE_POINTS), 4096):
            text = "".join(map(chr, CODE_POINTS[start : start + 4096]))
            for piece, _ in keep.pre_tokenize_str(text):
                result.update((ord(c), category) for c in piece)
    return result


def inert_characters():
    """Characters that Unicode 14.0 reorders or decomposes and the library's normalizers leave alone."""
    nfd, nfkd = normalizers.NFD(), normalizers.NFKD()
    for c in map(chr, CODE_POINTS):
        combining = unicodedata.combining(c)
        if combining:
            pair = c + "\u0316" if combining > 220 else "\u0301" + c
            if unicodedata.normalize("NFD", pair) != nfd.normalize_str(pair):
                yield ord(c)
        elif unicodedata.normalize("NFKD", c) != nfkd.normalize_str(c):
            assert nfkd.normalize_str(c) == c
            yield ord(c)


def newer_lower_case():
    """(code point, distance to its lower case) where the library knows one that Unicode 14.0 does not."""
    lowercase = normalizers.Lowercase()
    for c in CODE_POINTS:
        lower = lowercase.normalize_str(chr(c))
        if lower != chr(c).lower():
            yield c, ord(lower) - c


def ranges_of(keyed):
    """[first, last, key] of (code point, key) pairs in order."""
    ranges = []
    for c, key in keyed:
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == key:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, key])
    return ranges


def main():
    assert unicodedata.unidata_version == "14.0.0", unicodedata.unidata_version
    measured = measured_categories()
    newer = ranges_of(
        (c, measured.get(c, "Cn")) for c in CODE_POINTS if measured.get(c, "Cn") != unicodedata.category(chr(c))
    )
    # Inert marks never compose; U+11930 would, as the second part of U+11938.
    inert = ranges_of((c, None) for c in sorted({*inert_characters(), 0x11930}))
    newer_lines = [f"    {{0x{first:X}, 0x{last:X}, Category::{category}}}," for first, last, category in newer]
    inert_lines = [f"    {{0x{first:X}, 0x{last:X}}}," for first, last, _ in inert]
    lower_lines = [f"    {{0x{first:X}, 0x{last:X}, 0x{first + d:X}}}," for first, last, d in ranges_of(newer_lower_case())]
    TARGET.write_text(
        HEADER
        + f"inline constexpr std::array<NewerRange, {len(newer)}> kNewerThanUnicode14 = {{{{\n"
        + "\n".join(newer_lines)
        + "\n}};\n\n// Characters that the reference library's normalizers, of an older Unicode version, leave alone.\n"
        + f"inline constexpr std::array<InertRange, {len(inert)}> kInertInNormalization = {{{{\n"
        + "\n".join(inert_lines)
        + f"\n}}}};\n\ninline constexpr std::array<NewerLowerRange, {len(lower_lines)}> kNewerLowerCase = {{{{\n"
        + "\n".join(lower_lines)
        + "\n}};\n\n}  // namespace nanovllm\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
