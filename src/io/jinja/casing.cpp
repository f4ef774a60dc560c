// Upper, lower and title case as Python's str has them: Unicode's full mappings, and the final
// sigma.
#include <algorithm>
#include <array>
#include <optional>

#include <utf8proc.h>

#include "io/jinja/special_casing.h"
#include "io/jinja/text.h"
#include "io/utf8.h"

namespace nanovllm::jinja {

namespace {

constexpr char32_t kSigma = 0x3A3, kFinalSigma = 0x3C2, kDottedI = 0x130;

utf8proc_category_t category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

template <class Ranges>
bool in_ranges(const Ranges& ranges, char32_t c) {
  const auto at = std::upper_bound(ranges.begin(), ranges.end(), c,
                                   [](char32_t value, const auto& r) { return value < r.first; });
  return at != ranges.begin() && c <= std::prev(at)->last;
}

char32_t lower(char32_t c) {
  if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 0x20 : c;
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}

bool is_cased(char32_t c) {
  return is_upper(c) || is_lower(c) || category(c) == UTF8PROC_CATEGORY_LT ||
         in_ranges(kOtherCased, c);
}

bool is_case_ignorable(char32_t c) {
  const auto kind = category(c);
  return kind == UTF8PROC_CATEGORY_MN || kind == UTF8PROC_CATEGORY_ME ||
         kind == UTF8PROC_CATEGORY_CF || kind == UTF8PROC_CATEGORY_LM ||
         kind == UTF8PROC_CATEGORY_SK || in_ranges(kOtherCaseIgnorable, c);
}

/// Whether the sigma at byte `at` ends a word: a letter before it and none after.
bool is_final_sigma(std::string_view text, size_t at) {
  std::string_view before = text.substr(0, at);
  std::optional<char32_t> neighbour;
  while (!before.empty()) {
    const size_t start = last_code_point(before);
    neighbour = decode_at(before, start).value;
    if (!is_case_ignorable(*neighbour)) break;
    neighbour.reset();
    before = before.substr(0, start);
  }
  if (!neighbour || !is_cased(*neighbour)) return false;
  for (size_t next = at + decode_at(text, at).size; next < text.size();) {
    const CodePoint c = decode_at(text, next);
    if (!is_case_ignorable(c.value)) return !is_cased(c.value);
    next += c.size;
  }
  return true;
}

void append_lower(std::string& out, std::string_view text, size_t at) {
  const char32_t c = decode_at(text, at).value;
  if (c == kDottedI) {
    out += "i\xCC\x87";
  } else if (c == kSigma) {
    append_utf8(out, is_final_sigma(text, at) ? kFinalSigma : lower(c));
  } else {
    append_code_point(out, lower(c));
  }
}

/// The upper case of `c`, or its title case.
void append_upper(std::string& out, char32_t c, bool title) {
  if (c < 0x80) return append_utf8(out, c >= 'a' && c <= 'z' ? c - 0x20 : c);
  const auto special =
      std::lower_bound(kSpecialCases.begin(), kSpecialCases.end(), c,
                       [](const SpecialCase& s, char32_t value) { return s.character < value; });
  if (special != kSpecialCases.end() && special->character == c) {
    out += title ? special->title : special->upper;
    return;
  }
  const auto code = static_cast<utf8proc_int32_t>(c);
  append_code_point(out,
                    static_cast<char32_t>(title ? utf8proc_totitle(code) : utf8proc_toupper(code)));
}

/// Calls `append` with the byte offset and the code point of each character.
template <class Append>
std::string map_code_points(std::string_view text, Append append) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_at(text, at);
    append(out, at, c.value);
    at += c.size;
  }
  return out;
}

}  // namespace

std::string to_upper(std::string_view text) {
  return map_code_points(text,
                         [](std::string& out, size_t, char32_t c) { append_upper(out, c, false); });
}

std::string to_lower(std::string_view text) {
  return map_code_points(
      text, [text](std::string& out, size_t at, char32_t) { append_lower(out, text, at); });
}

std::string case_fold(std::string_view text) {
  return map_code_points(text, [](std::string& out, size_t, char32_t c) {
    std::array<utf8proc_int32_t, 8> folded{};
    int last_boundary = 0;
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), folded.data(),
                                               static_cast<utf8proc_ssize_t>(folded.size()),
                                               UTF8PROC_CASEFOLD, &last_boundary);
    if (count < 1) return append_code_point(out, c);  // a byte that is no UTF-8
    for (utf8proc_ssize_t i = 0; i < count; ++i)
      append_code_point(out, static_cast<char32_t>(folded[static_cast<size_t>(i)]));
  });
}

std::string swap_case(std::string_view text) {
  return map_code_points(text, [text](std::string& out, size_t at, char32_t c) {
    const bool cased = is_cased(c);
    if (cased && lower(c) != c && category(c) != UTF8PROC_CATEGORY_LT)
      append_lower(out, text, at);
    else if (cased && lower(c) == c)
      append_upper(out, c, false);
    else
      append_code_point(out, c);
  });
}

std::string capitalize(std::string_view text) {
  return map_code_points(text, [text](std::string& out, size_t at, char32_t c) {
    at == 0 ? append_upper(out, c, true) : append_lower(out, text, at);
  });
}

std::string title_case(std::string_view text) {
  bool inside_word = false;
  return map_code_points(text, [&](std::string& out, size_t at, char32_t c) {
    inside_word ? append_lower(out, text, at) : append_upper(out, c, true);
    inside_word = is_cased(c);
  });
}

}  // namespace nanovllm::jinja
