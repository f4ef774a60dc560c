// Unicode text as Python sees it: UTF-8 bytes addressed by code point, and Python's notion of
// space, case and repr.
#pragma once

#include <string>
#include <string_view>

namespace nanovllm::jinja {

struct CodePoint {
  char32_t value;
  size_t size;  ///< bytes it takes in the text
};

/// The code point at byte `at` (which must be inside `text`). A byte that is not UTF-8 decodes as
/// itself plus 0xDC00, alone.
CodePoint decode_at(std::string_view text, size_t at);
/// The inverse of decode_at(): a byte that was no UTF-8 goes back as it came.
void append_code_point(std::string& out, char32_t c);
/// Byte offset of the last code point of `text`, which must not be empty.
size_t last_code_point(std::string_view text);

/// Code points in `text`.
size_t length_of(std::string_view text);
/// Byte offset of code point `index`; `text.size()` where there are fewer.
size_t byte_offset(std::string_view text, size_t index);

bool is_space(char32_t c);
bool is_line_break(char32_t c);
bool is_printable(char32_t c);  ///< as repr() decides whether to escape
bool is_letter(char32_t c);
bool is_number(char32_t c);
bool is_digit(char32_t c);
bool is_upper(char32_t c);
bool is_lower(char32_t c);

// Unicode case with its full mappings (casing.cpp).
std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string case_fold(std::string_view text);
std::string swap_case(std::string_view text);
/// First code point title-cased, the rest lower.
std::string capitalize(std::string_view text);
/// Every run of letters capitalized (str.title()).
std::string title_case(std::string_view text);

/// `text` with the decimal digits of all scripts as those of ASCII.
std::string ascii_digits(std::string_view text);

std::string_view strip_left(std::string_view text);
std::string_view strip_right(std::string_view text);
std::string_view strip(std::string_view text);
/// The same with the code points of `set` in place of white space.
std::string_view strip_left(std::string_view text, std::string_view set);
std::string_view strip_right(std::string_view text, std::string_view set);

/// repr(float): the shortest text that reads back as the same number.
std::string float_repr(double value);
/// repr(str), quotes included.
std::string string_repr(std::string_view text);
/// A JSON string literal, as json.dumps writes it.
std::string json_quote(std::string_view text, bool ensure_ascii);

}  // namespace nanovllm::jinja
