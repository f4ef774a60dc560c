// How few tokens a text can give: a bound that needs no encoding, for texts far beyond any context.
#pragma once

#include <cstddef>

#include "io/tokenizer/entry.h"

namespace nanovllm {

struct TokenBytes {
  /// Most bytes of a text that one token can stand for; 0 where there is no such number.
  size_t most = 0;
  /// White space may give no token at all: its bytes do not count.
  bool drops_space = false;
};

/// The bytes that a token of `longest` bytes has behind the text steps of tokenizer.json. A kind of
/// step that may drop text has no bound.
TokenBytes bytes_of_longest_token(const Entry& root, size_t longest);

}  // namespace nanovllm
