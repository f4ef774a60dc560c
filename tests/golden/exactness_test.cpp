// Exactness: the same request, the same bytes, at any load (docs/contract.md). Random requests are
// run alone, then together in random order under random limits: batch sizes, chunk sizes, block
// sizes, caches small enough to preempt, prefixes that hit. Tokens and log probabilities are
// compared bit for bit.
#include <array>
#include <cstdlib>
#include <random>

#include "devices.h"
#include "grammar_llm.h"
#include "same_output.h"

namespace nanovllm {
namespace {

struct Request {
  std::vector<int32_t> prompt;
  SamplingParams params;
};

class Exactness : public testing::TestWithParam<std::tuple<std::string, Target>> {
 protected:
  void SetUp() override {
    const auto& [name, target] = GetParam();
    directory_ = (goldens() / name).string();
    SKIP_WITHOUT(target, directory_);
    config_ = config_for(target);
    const std::string suite =
        testing::UnitTest::GetInstance()->current_test_info()->test_suite_name();
    if (suite.starts_with("Fp8Cache")) config_.kv_cache_dtype = "fp8";
    vocab_ = inspect(directory_, config_).vocab_size;
  }

  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  /// Prompts share prefixes of whole and of broken blocks; parameters cover every sampling path.
  std::vector<Request> draw_requests(int count) {
    std::vector<int32_t> shared(300);
    for (int32_t& id : shared) id = pick(0, static_cast<int>(vocab_) - 1);
    std::vector<Request> requests(static_cast<size_t>(count));
    for (Request& r : requests) {
      const int common = pick(0, 2) == 0 ? 0 : pick(1, 200), own = pick(1, 100);
      r.prompt.assign(shared.begin(), shared.begin() + common);
      for (int i = 0; i < own; ++i) r.prompt.push_back(pick(0, static_cast<int>(vocab_) - 1));
      r.params.temperature = pick(0, 2) == 0 ? 0 : 0.3 + 0.1 * pick(0, 12);
      r.params.seed = pick(0, 1 << 30);
      r.params.max_tokens = pick(1, 60);
      if (pick(0, 5) == 0) r.params.n = pick(2, 4);
      if (pick(0, 2) == 0) r.params.top_k = pick(1, 50);
      if (pick(0, 2) == 0) r.params.top_p = 0.05 * pick(2, 20);
      if (pick(0, 2) == 0) r.params.min_p = 0.02 * pick(0, 10);
      if (pick(0, 1) == 0) r.params.logprobs = pick(0, 5);
      if (pick(0, 5) == 0) r.params.prompt_logprobs = pick(0, 3);
      if (pick(0, 3) == 0) r.params.stop_token_ids = {pick(0, static_cast<int>(vocab_) - 1)};
      if (pick(0, 3) == 0) r.params.min_tokens = pick(0, static_cast<int>(r.params.max_tokens));
      if (grammars_() % 3 == 0) r.params.structured_outputs.grammar = std::to_string(grammars_());
      if (!r.params.structured_outputs.empty() && grammars_() % 3 == 0)
        r.params.structured_outputs.thinking_token_budget = static_cast<int64_t>(grammars_() % 20);
      if (pick(0, 3) == 0) r.params.repetition_penalty = 0.1 * pick(5, 30);
      if (pick(0, 3) == 0) r.params.frequency_penalty = 0.1 * pick(-20, 20);
      if (pick(0, 3) == 0) r.params.presence_penalty = 0.1 * pick(-20, 20);
      if (r.params.structured_outputs.grammar.empty() && pick(0, 3) == 0)
        for (int i = pick(1, 100); i > 0; --i)
          r.params.allowed_token_ids.push_back(pick(0, static_cast<int>(vocab_) - 1));
      if (pick(0, 3) == 0)
        for (int i = pick(1, 50); i > 0; --i)
          r.params.logit_bias[pick(0, static_cast<int>(vocab_) - 1)] = pick(-100, 100);
    }
    return requests;
  }

  EngineConfig draw_config() {
    EngineConfig c = config_;
    c.block_size = 8 << pick(0, 3);
    // Odd budgets, too, below the number of sequences: what steps are padded to must not exceed
    // them.
    c.max_num_seqs = pick(0, 2) ? pick(1, 12) : pick(13, 40);
    c.max_num_batched_tokens = std::array{pick(1, 9), pick(16, 64), pick(33, 39),
                                          pick(100, 1000)}[static_cast<size_t>(pick(0, 3))];
    c.enable_prefix_caching = pick(0, 3) != 0;
    c.num_threads = pick(1, 2);
    c.enforce_eager = pick(0, 1) == 0;
    c.decode_micro_batches = pick(0, 2);
    if (pick(0, 1)) c.num_gpu_blocks_override = 400 / c.block_size + pick(1, 6);  // preempts
    return c;
  }

  std::string directory_;
  EngineConfig config_;
  int64_t vocab_ = 0;
  std::mt19937 random_{20261120}, grammars_{20};
};

TEST_P(Exactness, ARequestGivesTheSameBytesAloneAndAtAnyLoad) {
  const bool is_long = std::getenv("NANOVLLM_LONG_TESTS") != nullptr;
  const auto requests = draw_requests(is_long ? 200 : 40);
  std::vector<RequestOutput> alone;
  {
    EngineConfig eager = config_;
    eager.enforce_eager = true;
    // Quantised weights that stand for plain numbers are those here, and as the device keeps them
    // below.
    GrammarLLM llm(directory_, eager, dequantised);
    for (const Request& r : requests) {
      alone.push_back(run_alone(llm, r.prompt, r.params));
      llm.expect_allowed(r.params, alone.back());
    }
  }
  int64_t preemptions = 0, hits = 0;
  // Whether a round preempts follows from what the model answers: the last ones are likely to.
  for (int round = 0; round < (is_long ? 60 : preemptions > 0 ? 6 : 16); ++round) {
    EngineConfig config = draw_config();
    if (round >= 6 && !is_long) {
      config.max_num_seqs = 40;
      config.num_gpu_blocks_override = 400 / config.block_size + 1;
    }
    SCOPED_TRACE(testing::Message()
                 << "round " << round << ": block_size " << config.block_size << " max_num_seqs "
                 << config.max_num_seqs << " max_num_batched_tokens "
                 << config.max_num_batched_tokens << " blocks " << config.num_gpu_blocks_override
                 << " threads " << config.num_threads);
    GrammarLLM llm(directory_, config);
    std::vector<size_t> order(requests.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<Prompt> prompts;
    std::vector<SamplingParams> params;
    for (const size_t i : order) {
      prompts.emplace_back(requests[i].prompt);
      params.push_back(requests[i].params);
    }
    const auto together = llm.generate(prompts, params);
    for (size_t i = 0; i < order.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "request " << order[i]);
      expect_same(alone[order[i]], together[i]);
    }
    preemptions += llm.stats().preemptions;
    hits += llm.stats().cached_prompt_tokens;
    if (HasFailure()) break;
  }
  // A fuzz that never preempts and never hits proves nothing.
  EXPECT_GT(preemptions, 0);
  EXPECT_GT(hits, 0);
}

TEST_P(Exactness, TwoEnginesInOneProcessDoNotDisturbEachOther) {
  const auto requests = draw_requests(6);
  EngineConfig other = config_;
  other.num_threads = 1;
  other.block_size = 16;
  GrammarLLM first(directory_, config_), second(directory_, other),
      reference(directory_, config_, dequantised);
  for (const Request& r : requests) {
    first.add_request(r.prompt, r.params);
    second.add_request(r.prompt, r.params);
  }
  std::vector<RequestOutput> a(requests.size()), b(requests.size());
  while (!first.is_finished() || !second.is_finished()) {
    for (auto& out : first.step())
      if (out.finished) a[static_cast<size_t>(out.request_id)] = out;
    for (auto& out : second.step())
      if (out.finished) b[static_cast<size_t>(out.request_id)] = out;
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto alone =
        reference.generate({Prompt(requests[i].prompt)}, {requests[i].params}).front();
    expect_same(alone, a[i]);
    expect_same(alone, b[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Exactness,
    testing::Combine(testing::Values("qwen3-tied-gqa", "qwen3-sharded-mha-80",
                                     "llama-untied-biases", "mistral-window",
                                     "qwen3-moe-some-dense", "quantised-gptq-128-ordered",
                                     "quantised-awq-64-experts", "quantised-fp8-blocks",
                                     "quantised-fp8-channel", "quantised-int8-channel",
                                     "quantised-packed-32-experts", "quantised-fp8-blocks-experts",
                                     "quantised-int8-channel-experts", "quantised-w4a8-64",
                                     "quantised-w4a8-32-packed-experts", "quantised-fp8-kv-heads"),
                     testing::ValuesIn(kTargets)),
    case_name);
INSTANTIATE_TEST_SUITE_P(Fp8Cache, Exactness,
                         testing::Combine(testing::Values("qwen3-sharded-mha-80", "mistral-window",
                                                          "quantised-fp8-channel"),
                                          testing::ValuesIn(kTargets)),
                         case_name);

}  // namespace
}  // namespace nanovllm
