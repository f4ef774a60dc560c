// A set of characters, as a bracket expression or a property of a regular expression defines it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "io/tokenizer/patterns/unicode.h"

namespace nanovllm {

class CharClass {
 public:
  void add(char32_t first, char32_t last) { ranges_.push_back({first, last}); }
  void add_categories(uint32_t categories) { categories_ |= categories; }
  void add_white_space();
  void negate() { negated_ = !negated_; }
  /// Fills the table for ASCII; call it once, after the last change.
  void finish(const CategoryTable& categories);

  bool contains_ascii(unsigned char c) const { return ascii_[c]; }
  bool contains(char32_t c, const CategoryTable& categories) const {
    if (c < 0x80) return ascii_[c];
    if (category_bit(categories.category(c)) & categories_) return !negated_;
    return (!ranges_.empty() && in_ranges(c)) != negated_;
  }

 private:
  struct Range {
    char32_t first, last;
  };
  bool in_ranges(char32_t c) const;

  std::array<bool, 128> ascii_{};
  uint32_t categories_ = 0;  // bits by Category
  bool negated_ = false;
  std::vector<Range> ranges_;
};

}  // namespace nanovllm
