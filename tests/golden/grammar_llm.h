// GrammarLLM: an engine with the methods of LLM whose requests may have a grammar that needs no
// module: structured_outputs.grammar is the seed of a HashMatcher, which a reasoning of
// thinking_token_budget tokens comes before. A structural_tag is what it always is.
#pragma once

#include <map>

#include <gtest/gtest.h>

#include "api/load_engine.h"
#include "constrain/grammar_compiler.h"
#include "constrain/reasoning.h"
#include "engine/test_grammars.h"
#include "ops/forwarding_backend.h"

namespace nanovllm {

/// A device that keeps no quantised weights but those for which `keeps_some` holds: each other
/// becomes plain numbers while it is loaded.
template <bool (*keeps_some)(WeightFormat)>
class DequantisingBackend : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  bool keeps(WeightFormat format, int64_t n, int64_t k, bool stacked) const override {
    return keeps_some(format) && ForwardingBackend::keeps(format, n, k, stacked);
  }
};
inline bool none(WeightFormat) { return false; }
inline bool beside_plain_rows(WeightFormat format) { return !format.quantises_rows(); }
inline bool beside_quantised_rows(WeightFormat format) { return format.quantises_rows(); }
/// BackendDecorators.
template <bool (*keeps_some)(WeightFormat)>
std::unique_ptr<Backend> keeping(std::unique_ptr<Backend> ops) {
  return std::make_unique<DequantisingBackend<keeps_some>>(std::move(ops));
}
/// All weights that stand for plain numbers are those; products that quantise rows stay.
inline std::unique_ptr<Backend> dequantised(std::unique_ptr<Backend> ops) {
  return keeping<beside_quantised_rows>(std::move(ops));
}

class GrammarLLM {
 public:
  GrammarLLM(const std::string& model, const EngineConfig& config,
             const BackendDecorator& decorate = {})
      : loaded_(load_engine(model, config, decorate)),
        compiler_(std::make_unique<GrammarCompiler>(loaded_.tokenizer, loaded_.info.vocab_size,
                                                    loaded_.eos)) {}

  std::shared_ptr<const Grammar> grammar_of(const SamplingParams& params) const {
    const StructuredOutputs& asked = params.structured_outputs;
    if (asked.empty()) return nullptr;
    if (!asked.structural_tag.empty()) return compiler_->compile(asked);
    const auto& eos = loaded_.model.eos_token_ids;
    const uint64_t seed = std::stoull(asked.grammar);
    const int64_t vocab_size = loaded_.info.vocab_size;
    auto grammar = hash_grammar(seed, vocab_size, eos.empty() ? -1 : static_cast<int32_t>(eos[0]));
    if (asked.thinking_token_budget < 0) return grammar;
    const auto end = static_cast<int32_t>(2 + seed % static_cast<uint64_t>(vocab_size - 3));
    return std::make_shared<ReasoningGrammar>(std::move(grammar),
                                              Reasoning{.end = {end, end, end + 1},
                                                        .token_budget = asked.thinking_token_budget,
                                                        .eos = loaded_.eos,
                                                        .vocab_size = vocab_size});
  }
  int64_t add_request(const Prompt& prompt, const SamplingParams& params) {
    return engine().add_request(std::get<std::vector<int32_t>>(prompt.value), params,
                                grammar_of(params));
  }
  std::vector<RequestOutput> generate(const std::vector<Prompt>& prompts,
                                      const std::vector<SamplingParams>& params) {
    std::map<int64_t, size_t> place;
    for (size_t i = 0; i < prompts.size(); ++i) place[add_request(prompts[i], params[i])] = i;
    std::vector<RequestOutput> outputs(prompts.size());
    while (!is_finished())
      for (RequestOutput& output : step()) outputs[place.at(output.request_id)] = std::move(output);
    return outputs;
  }
  std::vector<RequestOutput> step() { return engine().step(); }
  void abort_request(int64_t id) { engine().abort_request(id); }
  bool is_finished() const { return loaded_.engine->is_finished(); }
  void reset_prefix_cache() { engine().reset_prefix_cache(); }
  EngineStats stats() const { return loaded_.engine->stats(); }
  const EngineInfo& info() const { return loaded_.info; }

  /// Every token of a constrained answer is one that its grammar allows there.
  void expect_allowed(const SamplingParams& params, const RequestOutput& output) const {
    const auto grammar = grammar_of(params);
    if (!grammar) return;
    for (const CompletionOutput& answer : output.outputs) {
      const auto matcher = grammar->new_matcher();
      for (const int32_t token : answer.token_ids) ASSERT_TRUE(matcher->accept(token)) << token;
    }
  }

 private:
  LLMEngine& engine() { return *loaded_.engine; }

  LoadedEngine loaded_;
  std::unique_ptr<GrammarCompiler> compiler_;
};

}  // namespace nanovllm
