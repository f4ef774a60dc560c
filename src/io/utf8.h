// UTF-8: what is valid, and one character at a time.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace nanovllm {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

struct DecodedChar {
  char32_t value;
  size_t length;  // bytes
};

/// Decodes the character at `at`; the text must be valid UTF-8.
inline DecodedChar decode_utf8(const char* at) {
  const auto byte = [at](int i) {
    return static_cast<char32_t>(static_cast<unsigned char>(at[i]));
  };
  const char32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xE0) return {(lead & 0x1F) << 6 | (byte(1) & 0x3F), 2};
  if (lead < 0xF0) return {(lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F), 3};
  return {(lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F),
          4};
}

/// The characters of a valid text.
std::u32string to_utf32(std::string_view text);

inline bool is_utf8_continuation(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}

/// Length in bytes of the longest prefix that is ASCII.
size_t ascii_prefix(std::string_view text);

/// Appends one character, at most U+10FFFF; a surrogate is written as three bytes like any other.
void append_utf8(std::string& out, char32_t character);

/// `text` on one line, for messages: line ends and other ASCII control characters become spaces.
std::string one_line(std::string text);

/// Offset of the first byte that is not part of a valid UTF-8 character; npos where all is valid.
size_t find_invalid_utf8(std::string_view text);

/// Appends `bytes` as UTF-8, with one U+FFFD for each maximal ill-formed part (the practice the
/// Unicode standard recommends in section 3.9, and what Rust's from_utf8_lossy does). Unless
/// `at_end`, an incomplete character at the end is left alone. Returns the number of bytes used.
size_t append_utf8_lossy(std::string& out, std::string_view bytes, bool at_end);

}  // namespace nanovllm
