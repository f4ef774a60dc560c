// Control tokens: those that the tokenizer marks special. Their text in what users, tools and
// documents say is to stay text.
#pragma once

#include <string_view>
#include <vector>

#include "nanovllm/tokenizer.h"

#include "io/tokenizer/patterns/string_matcher.h"

namespace nanovllm {

class ControlTokens {
 public:
  /// The tokenizer must outlive the object; it may be moved.
  explicit ControlTokens(const Tokenizer& tokenizer);

  /// Characters of `text`, by their byte offsets in ascending order, without which no control token
  /// can be found in it, nor begin in it and end in what follows. Usually none. `text` is valid
  /// UTF-8.
  std::vector<size_t> find(std::string_view text) const;

 private:
  const Tokenizer::State* state_;
  StringMatcher raw_;         // as they are spelled
  StringMatcher normalized_;  // those that are looked for in normalized text, as they are there
  bool any_normalized_ = false;
};

}  // namespace nanovllm
