// A text that is being normalized, and which of its bytes are literal: no special token is found in
// what became of those.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace nanovllm {

/// One for each byte of a text; empty where none is marked.
using ByteMarks = std::vector<bool>;

inline bool has_mark(const ByteMarks& marks, size_t begin, size_t end) {
  if (marks.empty()) return false;
  const auto at = [&marks](size_t i) { return marks.begin() + static_cast<std::ptrdiff_t>(i); };
  return std::find(at(begin), at(end), true) != at(end);
}

/// The marks of `size` bytes from `begin` on.
inline ByteMarks part_of(const ByteMarks& marks, size_t begin, size_t size) {
  if (!has_mark(marks, begin, begin + size)) return {};
  const auto first = marks.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(size)};
}

/// More than any published tokenizer makes of a text before it looks for tokens: of one character,
/// Unicode and a "Replace" of spaces make 13 times its bytes.
inline size_t max_bytes_of(size_t text_bytes) { return (size_t{64} << 10) + 16 * text_bytes; }

struct MarkedText {
  std::string bytes;
  ByteMarks literal{};

  bool has_mark(size_t begin, size_t end) const { return nanovllm::has_mark(literal, begin, end); }
  void append(std::string_view text, bool is_literal) {
    bytes += text;
    if (!is_literal && literal.empty()) return;
    literal.resize(bytes.size() - text.size());
    literal.resize(bytes.size(), is_literal);
  }
  /// The bytes [begin, end) of another text.
  void append(const MarkedText& text, size_t begin, size_t end) {
    const std::string_view part = std::string_view(text.bytes).substr(begin, end - begin);
    if (!text.has_mark(begin, end)) return append(part, false);
    literal.resize(bytes.size());
    bytes += part;
    const auto first = text.literal.begin();
    literal.insert(literal.end(), first + static_cast<std::ptrdiff_t>(begin),
                   first + static_cast<std::ptrdiff_t>(end));
  }
};

}  // namespace nanovllm
