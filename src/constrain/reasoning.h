// A grammar that begins where the model's reasoning ends, and the end of a reasoning that has used
// up its budget.
#pragma once

#include <memory>
#include <vector>

#include "constrain/grammar.h"

namespace nanovllm {

struct Reasoning {
  /// The tokens of "<think>", without which an answer has no reasoning; empty: it is open already.
  std::vector<int32_t> begin{};
  std::vector<int32_t> end{};  ///< the tokens of "</think>"
  /// Tokens before `end` is forced; -1: none.
  int64_t token_budget = -1;
  std::vector<int32_t> eos{};
  int64_t vocab_size = 0;  ///< of the tokenizer
};

/// Leaves everything free until the tokens of `end` were generated, but for the end of the text
/// where a grammar comes after them. `grammar` may be null: then everything is free there too.
/// `at_once` is that of an answer without reasoning; null: `grammar`.
class ReasoningGrammar final : public Grammar {
 public:
  ReasoningGrammar(std::shared_ptr<const Grammar> grammar, Reasoning reasoning,
                   std::shared_ptr<const Grammar> at_once = nullptr)
      : grammar_(std::move(grammar)),
        at_once_(at_once ? std::move(at_once) : grammar_),
        reasoning_(std::move(reasoning)) {}
  std::unique_ptr<TokenMatcher> new_matcher() const override;

 private:
  std::shared_ptr<const Grammar> grammar_, at_once_;
  const Reasoning reasoning_;
};

}  // namespace nanovllm
