// From a request's structure to a grammar: checked, compiled by the module, kept for the next
// request that asks for the same.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "nanovllm/params.h"
#include "nanovllm/tokenizer.h"

#include "constrain/grammar.h"
#include "constrain/grammar_module.h"

namespace nanovllm {

/// The checked source of what is asked for. Throws Error(invalid_argument) naming the field, the
/// path in it, and what is wrong.
GrammarSource grammar_source(const StructuredOutputs& asked);

/// Compiles for one model. Its methods may be called from any thread; the module is loaded by the
/// first compile().
class GrammarCompiler {
 public:
  /// `tokenizer` may be null (nothing can be compiled then). `vocab_size` is the model's; `eos` may
  /// come where a text ends.
  GrammarCompiler(std::shared_ptr<const Tokenizer> tokenizer, int64_t vocab_size,
                  std::vector<int32_t> eos);
  ~GrammarCompiler();

  /// Null where nothing is asked for. Throws Error(invalid_argument).
  std::shared_ptr<const Grammar> compile(const StructuredOutputs& asked);

 private:
  struct Entry {
    std::string key;
    CompiledGrammar compiled;
  };

  GrammarModule& module();
  std::shared_ptr<const Grammar> cached(const std::string& key);
  void keep(const std::string& key, const CompiledGrammar& compiled);
  /// `asked` without its reasoning, from the cache if it is there.
  std::shared_ptr<const Grammar> structure(const StructuredOutputs& asked, bool after_reasoning);
  std::shared_ptr<const Grammar> after_reasoning(std::shared_ptr<const Grammar> grammar,
                                                 std::shared_ptr<const Grammar> at_once,
                                                 const StructuredOutputs& asked) const;

  const std::shared_ptr<const Tokenizer> tokenizer_;
  const int64_t vocab_size_;
  const std::vector<int32_t> eos_;
  std::mutex mutex_;  // of all below
  std::unique_ptr<GrammarModule> module_;
  std::list<Entry> entries_;  // the newest use first
  std::unordered_map<std::string_view, std::list<Entry>::iterator> by_key_;
  size_t bytes_ = 0;
};

/// The bytes that each token adds to a text.
TokenTable token_table_of(const Tokenizer& tokenizer, int64_t vocab_size,
                          const std::vector<int32_t>& eos);

/// "XGrammar 0.2.8", of the module; empty, with the reason, where there is none.
std::string grammar_library(std::string& why);

}  // namespace nanovllm
