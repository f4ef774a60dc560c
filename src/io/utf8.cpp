#include "io/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace nanovllm {
namespace {

enum class Utf8State { valid, invalid, incomplete };

struct Utf8Step {
  Utf8State state;
  size_t length;  // bytes of the character, or of the maximal ill-formed part
};

/// Classifies the bytes at the start of `bytes` (not empty).
Utf8Step classify_utf8(std::string_view bytes) {
  const auto byte = [bytes](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {Utf8State::valid, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8State::invalid, 1};
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte excludes overlong forms, surrogates and what lies beyond U+10FFFF.
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {Utf8State::incomplete, i};
    const bool fits = i == 1 ? byte(1) >= low && byte(1) <= high : is_utf8_continuation(bytes[i]);
    if (!fits) return {Utf8State::invalid, i};
  }
  return {Utf8State::valid, length};
}

}  // namespace

std::u32string to_utf32(std::string_view text) {
  std::u32string characters;
  for (size_t at = 0; at < text.size();) {
    const DecodedChar c = decode_utf8(text.data() + at);
    characters += c.value;
    at += c.length;
  }
  return characters;
}

size_t ascii_prefix(std::string_view text) {
  size_t i = 0;
  for (uint64_t word; i + sizeof word <= text.size(); i += sizeof word) {
    std::memcpy(&word, text.data() + i, sizeof word);
    if (word & 0x8080808080808080u) break;
  }
  while (i < text.size() && static_cast<unsigned char>(text[i]) < 0x80) ++i;
  return i;
}

void append_utf8(std::string& out, char32_t c) {
  const auto push = [&out](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) return push(c);
  if (c < 0x800) {
    push(0xC0 | c >> 6);
  } else {
    if (c < 0x10000) {
      push(0xE0 | c >> 12);
    } else {
      push(0xF0 | c >> 18);
      push(0x80 | (c >> 12 & 0x3F));
    }
    push(0x80 | (c >> 6 & 0x3F));
  }
  push(0x80 | (c & 0x3F));
}

std::string one_line(std::string text) {
  const auto is_control = [](unsigned char c) { return c < ' ' || c == 0x7f; };
  std::replace_if(text.begin(), text.end(), is_control, ' ');
  return text;
}

size_t find_invalid_utf8(std::string_view text) {
  size_t at = 0;
  while (true) {
    at += ascii_prefix(text.substr(at));
    if (at == text.size()) return std::string_view::npos;
    const Utf8Step step = classify_utf8(text.substr(at));
    if (step.state != Utf8State::valid) return at;
    at += step.length;
  }
}

size_t append_utf8_lossy(std::string& out, std::string_view bytes, bool at_end) {
  size_t at = 0;
  while (at < bytes.size()) {
    const Utf8Step step = classify_utf8(bytes.substr(at));
    if (step.state == Utf8State::incomplete && !at_end) break;
    out += step.state == Utf8State::valid ? bytes.substr(at, step.length) : kReplacementCharacter;
    at += step.length;
  }
  return at;
}

}  // namespace nanovllm
