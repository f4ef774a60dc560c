// Sampler: what is sampled and what log probabilities are of, where some tokens may not be. Over
// the CPU, so that logits are real.
#include "layers/sampler.h"

#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include "engine/llm_engine.h"
#include "engine/model_runner.h"
#include "engine/test_grammars.h"

namespace nanovllm {
namespace {

constexpr int kRequests = 70;  // more than the head takes at once
using Grammars = std::vector<std::shared_ptr<const Grammar>>;

/// The answers to kRequests different prompts, all in the same steps.
std::vector<CompletionOutput> answers(const std::vector<SamplingParams>& params,
                                      const Grammars& grammars = Grammars(kRequests)) {
  ModelConfig model;
  model.architecture = "Qwen3ForCausalLM";
  model.vocab_size = 150;
  model.hidden_size = 32;
  model.intermediate_size = 48;
  model.num_hidden_layers = 2;
  model.num_attention_heads = model.num_key_value_heads = 2;
  model.head_dim = 16;
  model.max_position_embeddings = 64;
  model.dtype = DType::f32;
  EngineConfig config;
  config.block_size = 8;
  auto runner =
      std::make_unique<ModelRunner>(make_backend("cpu", {.num_threads = 1}),
                                    std::make_unique<SingleCommunicator>(), model, config);
  runner->load(nullptr, 7, {});
  LLMEngine engine(std::move(runner), model, config, nullptr, {});
  for (int i = 0; i < kRequests; ++i)
    engine.add_request({i, 3, 2 * i}, params[static_cast<size_t>(i)],
                       grammars[static_cast<size_t>(i)]);
  std::vector<CompletionOutput> last(kRequests);
  while (!engine.is_finished())
    for (RequestOutput& output : engine.step()) {
      const auto id = static_cast<size_t>(output.request_id);
      last[id] = std::move(output.outputs[0]);
    }
  return last;
}

TEST(Sampler, LogprobsBelowMinTokensAreThoseOfTheModel) {
  SamplingParams plain;
  plain.temperature = 0;
  plain.max_tokens = 3;
  plain.logprobs = 4;
  const auto without = answers(std::vector<SamplingParams>(kRequests, plain));
  std::vector<SamplingParams> masked(kRequests, plain);
  for (size_t i = 0; i < masked.size(); ++i) {
    masked[i].min_tokens = 3;
    // The second best may not be sampled. It would not be.
    for (const PositionLogprobs& position : without[i].logprobs)
      masked[i].stop_token_ids.push_back(position[2].token_id);
    for (const int32_t id : without[i].token_ids) std::erase(masked[i].stop_token_ids, id);
  }
  const auto with = answers(masked);
  for (size_t i = 0; i < with.size(); ++i) {
    ASSERT_EQ(with[i].token_ids, without[i].token_ids) << i;
    ASSERT_EQ(with[i].logprobs.size(), 3u);
    for (size_t p = 0; p < 3; ++p)
      for (size_t k = 0; k < 5; ++k) {
        const TokenLogprob &a = without[i].logprobs[p][k], &b = with[i].logprobs[p][k];
        ASSERT_EQ(a.token_id, b.token_id) << i;
        ASSERT_EQ(std::memcmp(&a.logprob, &b.logprob, sizeof(float)), 0) << i;
        ASSERT_TRUE(std::isfinite(b.logprob)) << i;
      }
  }
}

TEST(Sampler, TokensBelowMinTokensAreNotSampled) {
  SamplingParams plain;
  plain.temperature = 0;
  plain.max_tokens = 3;
  const auto without = answers(std::vector<SamplingParams>(kRequests, plain));
  std::vector<SamplingParams> masked(kRequests, plain);
  for (size_t i = 0; i < masked.size(); ++i) {
    masked[i].min_tokens = 3;
    masked[i].stop_token_ids = {without[i].token_ids[0]};
  }
  const auto with = answers(masked);
  for (size_t i = 0; i < with.size(); ++i) {
    EXPECT_EQ(with[i].token_ids.size(), 3u);
    for (size_t t = 0; t < 2; ++t) EXPECT_NE(with[i].token_ids[t], without[i].token_ids[0]) << i;
  }
}

bool same_bits(const PositionLogprobs& a, const PositionLogprobs& b, size_t from) {
  return std::equal(
      a.begin() + static_cast<int64_t>(from), a.end(), b.begin() + static_cast<int64_t>(from),
      b.end(), [](const TokenLogprob& x, const TokenLogprob& y) {
        return x.token_id == y.token_id && std::memcmp(&x.logprob, &y.logprob, sizeof(float)) == 0;
      });
}

TEST(Sampler, AGrammarLeavesTheLikeliestOfItsTokensAndTouchesNeitherLogprobsNorOtherRows) {
  SamplingParams plain;
  plain.temperature = 0;
  plain.max_tokens = 3;
  plain.ignore_eos = true;
  plain.logprobs = 20;
  const std::vector<SamplingParams> params(kRequests, plain);
  const auto without = answers(params);
  Grammars grammars(kRequests);
  for (size_t i = 0; i < grammars.size(); i += 2) grammars[i] = hash_grammar(i, 150, 149);
  const auto with = answers(params, grammars);
  int others = 0;
  for (size_t i = 0; i < with.size(); ++i) {
    ASSERT_TRUE(same_bits(with[i].logprobs[0], without[i].logprobs[0], 1)) << i;
    if (!grammars[i]) {
      ASSERT_EQ(with[i].token_ids, without[i].token_ids) << i;
      for (size_t t = 0; t < 3; ++t)
        ASSERT_TRUE(same_bits(with[i].logprobs[t], without[i].logprobs[t], 0)) << i;
      continue;
    }
    const auto matcher = grammars[i]->new_matcher();
    for (size_t t = 0; t < with[i].token_ids.size(); ++t) {
      std::array<uint32_t, 5> mask{};
      matcher->fill_mask(mask);
      const auto is_allowed = [&](int32_t id) {
        return (mask[static_cast<size_t>(id) / 32] >> id % 32 & 1) != 0;
      };
      // Of those that are shown, the first that is allowed.
      const PositionLogprobs& shown = with[i].logprobs[t];
      const auto best = std::find_if(shown.begin() + 1, shown.end(),
                                     [&](const TokenLogprob& p) { return is_allowed(p.token_id); });
      const int32_t token = with[i].token_ids[t];
      if (best != shown.end()) {
        ASSERT_EQ(token, best->token_id) << i;
      }
      ASSERT_TRUE(is_allowed(token)) << i;
      others += token != shown[1].token_id;
      ASSERT_TRUE(matcher->accept(token));
    }
  }
  EXPECT_GT(others, 50) << "masks that change nothing prove nothing";
}

}  // namespace
}  // namespace nanovllm
