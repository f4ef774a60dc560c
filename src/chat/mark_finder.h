// Finds marks ("<tool_call>") in a text that comes in pieces.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace nanovllm {

/// Text that may still become a mark is held back, and the white space before it, which goes with
/// the mark. No mark begins with white space, and the marks must outlive the finder.
class MarkFinder {
 public:
  explicit MarkFinder(std::span<const std::string_view> marks = {}) : marks_(marks) {}

  /// Takes `c`, and adds to `text` what belongs to no mark. Returns the mark that ends with `c`.
  std::optional<std::string_view> take(char c, std::string& text);
  /// No more comes: adds what was held back.
  void flush(std::string& text);
  /// The white space that is held back belongs to something else.
  std::string take_space();
  bool holds_only_space() const { return held_.empty(); }

 private:
  std::span<const std::string_view> marks_;
  std::string space_, held_;
};

}  // namespace nanovllm
