#include "io/tokenizer/patterns/char_class.h"

#include <algorithm>

namespace nanovllm {

void CharClass::add_white_space() {
  add('\t', '\r');
  add_categories(categories_named("Z") | category_bit(Category::NextLine));
}

bool CharClass::in_ranges(char32_t c) const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [c](const Range& range) { return c >= range.first && c <= range.last; });
}

void CharClass::finish(const CategoryTable& categories) {
  for (char32_t c = 0; c < 128; ++c) {
    const bool listed = (category_bit(categories.category(c)) & categories_) || in_ranges(c);
    ascii_[c] = listed != negated_;
  }
}

}  // namespace nanovllm
