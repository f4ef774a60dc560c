#include "nanovllm/error.h"

#include <string_view>

#include <fmt/format.h>

namespace nanovllm {
namespace {

// A text from a file may be megabytes: the beginning names the place, the end says what is wrong.
constexpr size_t kLongest = 2000, kLongestTable = 8000, kKeptAtTheEnd = 600;

struct Character {
  uint32_t value;
  size_t length;
  bool valid = true;
};

/// The character at the start of `text` (not empty); a byte that is not UTF-8 stands for itself.
Character first_of(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (length == 0 || length > text.size()) return {lead, 1, false};
  uint32_t value = lead & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {lead, 1, false};
    value = value << 6 | (byte(i) & 0x3F);
  }
  return {value, length};
}

/// Whether a terminal obeys the character: controls, line separators, changes of direction.
bool is_command(uint32_t c) {
  return c < 0x20 || (c >= 0x7F && c < 0xA0) || (c >= 0x2028 && c <= 0x202E) || c == 0x200E ||
         c == 0x200F || (c >= 0x2066 && c <= 0x2069);
}

std::string printable(std::string_view text, bool may_have_lines) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const Character c = first_of(text.substr(at));
    if (c.valid && (!is_command(c.value) || (c.value == '\n' && may_have_lines)))
      out += text.substr(at, c.length);
    else
      out +=
          c.value < 0x100 ? fmt::format("\\x{:02x}", c.value) : fmt::format("\\u{:04x}", c.value);
    at += c.length;
  }
  return out;
}

std::string message_of(ErrorKind kind, std::string_view text) {
  const bool is_table = kind == ErrorKind::device;
  const size_t longest = is_table ? kLongestTable : kLongest;
  if (text.size() <= longest) return printable(text, is_table);
  const auto is_continuation = [text](size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  size_t head = longest - kKeptAtTheEnd, tail = text.size() - kKeptAtTheEnd;
  for (int i = 0; i < 3 && is_continuation(head); ++i) --head;
  for (int i = 0; i < 3 && is_continuation(tail); ++i) ++tail;
  return fmt::format("{} ... ({} bytes) ... {}", printable(text.substr(0, head), is_table),
                     tail - head, printable(text.substr(tail), is_table));
}

}  // namespace

Error::Error(ErrorKind kind, const std::string& message)
    : std::runtime_error(message_of(kind, message)), kind_(kind) {}

}  // namespace nanovllm
