#!/usr/bin/env python3
"""Writes src/io/tokenizer/unicode_newer.h: the characters whose general category differs between Unicode 14.0, the oldest
version a supported utf8proc knows, and what the regular expressions of the Hugging Face library `tokenizers` say.

The categories are measured: every code point goes through the library's own Split pre-tokenizer.
Needs Python 3.11 (whose unicodedata is Unicode 14.0) and tokenizers 0.23.
"""
import pathlib
import unicodedata

from tokenizers import Regex, pre_tokenizers

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
TARGET = pathlib.Path(__file__).resolve().parent.parent / "src/io/tokenizer/unicode_newer.h"

HEADER = """\
// Written by tools/make_unicode_newer.py: do not edit.
// Characters whose general category in the reference library (Unicode 16.0) differs from that of Unicode 14.0.
#pragma once

#include <array>

#include "io/tokenizer/unicode.h"

namespace nanovllm {

struct NewerRange {
  char32_t first, last;
  Category category;
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


def main():
    assert unicodedata.unidata_version == "14.0.0", unicodedata.unidata_version
    measured = measured_categories()
    ranges = []
    for c in CODE_POINTS:
        category = measured.get(c, "Cn")
        if category == unicodedata.category(chr(c)):
            continue
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == category:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, category])
    lines = [f"    {{0x{first:X}, 0x{last:X}, Category::{category}}}," for first, last, category in ranges]
    TARGET.write_text(
        HEADER
        + f"inline constexpr std::array<NewerRange, {len(ranges)}> kNewerThanUnicode14 = {{{{\n"
        + "\n".join(lines)
        + "\n}};\n\n}  // namespace nanovllm\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
