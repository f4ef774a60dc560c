// Token masks: which tokens may come next in an answer whose structure was asked for. The engine
// knows these interfaces alone; what compiles a grammar is a module (libnanovllm-grammar.so).
#pragma once

#include <cstdint>
#include <memory>
#include <span>

namespace nanovllm {

/// Where one answer stands in its grammar. Belongs to the answer's Sequence; one thread at a time
/// uses it, the engine's or one that makes masks for it, while others use other matchers of the
/// same Grammar. What these functions throw fails their answer alone.
class TokenMatcher {
 public:
  virtual ~TokenMatcher() = default;
  /// Sets bit t % 32 of mask[t / 32] for each token t that may come next, and clears the others.
  /// `mask` has (vocab_size + 31) / 32 words. At least one bit is set; stop tokens have theirs
  /// where the text may end here.
  virtual void fill_mask(std::span<uint32_t> mask) = 0;
  /// Takes the token that was generated; false, and nothing has changed, where the mask did not
  /// have it.
  virtual bool accept(int32_t token) = 0;
};

/// A grammar compiled for one tokenizer. Immutable: any number of threads may use it.
class Grammar {
 public:
  virtual ~Grammar() = default;
  /// A matcher at the beginning of a text.
  virtual std::unique_ptr<TokenMatcher> new_matcher() const = 0;
};

}  // namespace nanovllm
