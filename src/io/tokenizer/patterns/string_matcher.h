// Finds many fixed strings in one pass: the automaton of Aho and Corasick ("Efficient string
// matching", 1975), with the leftmost match taken and, among those, the longest.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "io/tokenizer/patterns/pattern.h"

namespace nanovllm {

class StringMatcher {
 public:
  struct Match {
    Span span;
    size_t string;  // index into the list of strings
  };

  StringMatcher() : StringMatcher(std::vector<std::string_view>{}) {}
  /// Of equal strings the first counts; empty ones never match.
  explicit StringMatcher(const std::vector<std::string_view>& strings);

  /// The first match that begins at `from` or later.
  std::optional<Match> find(std::string_view text, size_t from) const;
  /// Where strings begin, overlapping ones too: `whole` ones, in any order, and those that the end
  /// of the text may have `cut`, in ascending order.
  struct Beginnings {
    std::vector<size_t> whole, cut;
  };
  Beginnings find_beginnings(std::string_view text) const;

 private:
  static constexpr uint32_t kRoot = 0;
  static constexpr uint32_t kNone = 0xFFFFFFFF;

  struct Node {
    uint32_t failure = kRoot;  // the longest proper suffix that is a node
    uint32_t string = kNone;   // that ends here, or that the nearest suffix node ends
    uint32_t length = 0;       // of that string
    uint32_t depth = 0;
    std::vector<std::pair<uint8_t, uint32_t>> children;  // sorted by byte once built
  };

  uint32_t child(uint32_t node, uint8_t byte) const;
  /// The longest suffix of `node` and `byte` that is a node.
  uint32_t next(uint32_t node, uint8_t byte) const;
  /// The first byte from `at` on that a string begins with; the text's size where there is none.
  size_t next_start(std::string_view text, size_t at) const;
  uint32_t add_child(uint32_t node, uint8_t byte);
  void link_failures();

  std::vector<Node> nodes_;
  std::vector<uint32_t> ends_;         // by string: its node
  std::array<uint32_t, 256> first_{};  // children of the root; kNone where there is none
};

}  // namespace nanovllm
