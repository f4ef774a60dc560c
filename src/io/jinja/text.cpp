#include "io/jinja/text.h"

#include <charconv>
#include <cmath>
#include <iterator>

#include <fmt/format.h>
#include <utf8proc.h>

#include "io/utf8.h"

namespace nanovllm::jinja {

CodePoint decode_at(std::string_view text, size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  if (first < 0x80) return {first, 1};
  utf8proc_int32_t code = -1;
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at;
  const auto size = utf8proc_iterate(bytes, static_cast<utf8proc_ssize_t>(text.size() - at), &code);
  if (size <= 0 || code < 0) return {char32_t{0xDC00} + first, 1};
  return {static_cast<char32_t>(code), static_cast<size_t>(size)};
}

size_t last_code_point(std::string_view text) {
  size_t start = text.size() - 1;  // back over continuation bytes to the byte that begins it
  while (start > 0 && text.size() - start < 4 && is_utf8_continuation(text[start])) --start;
  return start + decode_at(text, start).size == text.size() ? start : text.size() - 1;
}

size_t length_of(std::string_view text) {
  size_t count = 0;
  for (size_t at = 0; at < text.size(); at += decode_at(text, at).size) ++count;
  return count;
}

size_t byte_offset(std::string_view text, size_t index) {
  size_t at = 0;
  while (index > 0 && at < text.size()) {
    at += decode_at(text, at).size;
    --index;
  }
  return at;
}

void append_code_point(std::string& out, char32_t c) {
  if (c >= 0xDC80 && c <= 0xDCFF) {
    out.push_back(static_cast<char>(c - 0xDC00));
  } else {
    append_utf8(out, c);
  }
}

namespace {

utf8proc_category_t category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

bool contains(std::string_view set, char32_t wanted) {
  for (size_t at = 0; at < set.size();) {
    const CodePoint c = decode_at(set, at);
    if (c.value == wanted) return true;
    at += c.size;
  }
  return false;
}

template <class Drop>
std::string_view trim_left(std::string_view text, Drop drop) {
  size_t at = 0;
  while (at < text.size()) {
    const CodePoint c = decode_at(text, at);
    if (!drop(c.value)) break;
    at += c.size;
  }
  return text.substr(at);
}

template <class Drop>
std::string_view trim_right(std::string_view text, Drop drop) {
  while (!text.empty()) {
    const size_t start = last_code_point(text);
    if (!drop(decode_at(text, start).value)) break;
    text = text.substr(0, start);
  }
  return text;
}

}  // namespace

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

bool is_line_break(char32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

bool is_printable(char32_t c) {
  if (c == ' ') return true;
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

bool is_letter(char32_t c) {
  const auto kind = category(c);
  return kind >= UTF8PROC_CATEGORY_LU && kind <= UTF8PROC_CATEGORY_LO;
}
bool is_number(char32_t c) {
  const auto kind = category(c);
  return kind >= UTF8PROC_CATEGORY_ND && kind <= UTF8PROC_CATEGORY_NO;
}
bool is_digit(char32_t c) { return category(c) == UTF8PROC_CATEGORY_ND; }
bool is_upper(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LU; }
bool is_lower(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LL; }

std::string ascii_digits(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_at(text, at);
    if (c.value >= 0x80 && is_digit(c.value)) {
      // Digits stand together, from zero to nine.
      char32_t zero = c.value;
      while (is_digit(zero - 1)) --zero;
      out += static_cast<char>('0' + (c.value - zero) % 10);
    } else {
      out += text.substr(at, c.size);
    }
    at += c.size;
  }
  return out;
}

std::string_view strip_left(std::string_view text) { return trim_left(text, is_space); }
std::string_view strip_right(std::string_view text) { return trim_right(text, is_space); }
std::string_view strip(std::string_view text) { return strip_right(strip_left(text)); }
std::string_view strip_left(std::string_view text, std::string_view set) {
  return trim_left(text, [set](char32_t c) { return contains(set, c); });
}
std::string_view strip_right(std::string_view text, std::string_view set) {
  return trim_right(text, [set](char32_t c) { return contains(set, c); });
}

std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[32];
  const auto end =
      std::to_chars(buffer, std::end(buffer), value, std::chars_format::scientific).ptr;
  const std::string_view scientific(buffer, static_cast<size_t>(end - buffer));
  const size_t e = scientific.find('e');
  const int exponent = std::stoi(std::string(scientific.substr(e + 1)));
  if (exponent < -4 || exponent >= 16)
    return std::string(scientific);  // C++ and Python agree on this form
  const auto fixed_end =
      std::to_chars(buffer, std::end(buffer), value, std::chars_format::fixed).ptr;
  std::string fixed(buffer, fixed_end);
  if (fixed.find('.') == std::string::npos) fixed += ".0";
  return fixed;
}

std::string string_repr(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_at(text, at);
    at += c.size;
    if (c.value == static_cast<unsigned char>(quote) || c.value == '\\') {
      out += '\\';
      out += static_cast<char>(c.value);
    } else if (c.value == '\n') {
      out += "\\n";
    } else if (c.value == '\r') {
      out += "\\r";
    } else if (c.value == '\t') {
      out += "\\t";
    } else if (is_printable(c.value)) {
      append_code_point(out, c.value);
    } else if (c.value <= 0xFF) {
      out += fmt::format("\\x{:02x}", static_cast<uint32_t>(c.value));
    } else if (c.value <= 0xFFFF) {
      out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c.value));
    } else {
      out += fmt::format("\\U{:08x}", static_cast<uint32_t>(c.value));
    }
  }
  return out += quote;
}

std::string json_quote(std::string_view text, bool ensure_ascii) {
  std::string out = "\"";
  const auto escape = [&out](uint32_t unit) { out += fmt::format("\\u{:04x}", unit); };
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_at(text, at);
    at += c.size;
    switch (c.value) {
      case '"':
        out += "\\\"";
        continue;
      case '\\':
        out += "\\\\";
        continue;
      case '\n':
        out += "\\n";
        continue;
      case '\r':
        out += "\\r";
        continue;
      case '\t':
        out += "\\t";
        continue;
      case '\b':
        out += "\\b";
        continue;
      case '\f':
        out += "\\f";
        continue;
      default:
        break;
    }
    const auto value = static_cast<uint32_t>(c.value);
    if (value < 0x20 || (ensure_ascii && value > 0x7E && value <= 0xFFFF)) {
      escape(value);
    } else if (ensure_ascii && value > 0xFFFF) {
      escape(0xD800 + ((value - 0x10000) >> 10));
      escape(0xDC00 + ((value - 0x10000) & 0x3FF));
    } else {
      append_code_point(out, c.value);
    }
  }
  return out += '"';
}

}  // namespace nanovllm::jinja
