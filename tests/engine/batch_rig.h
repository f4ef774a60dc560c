// Shared by tests of batches: sequences in arbitrary states, and plans of them.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "engine/batch_builder.h"

namespace nanovllm {

template <class T>
std::vector<T> values(const Tensor& t) {
  return {t.ptr<T>(), t.ptr<T>() + t.numel()};
}

/// A plan's step, and the block that it lies in.
struct Built {
  std::vector<std::byte> block;
  StepInput input;
  Built(const Plan& plan, const StepLimits& limits) {
    const BatchBuilder builder(limits);
    block.resize(builder.max_bytes());
    builder.build(plan, block.data(), input);
  }
};

/// Sequences in arbitrary states, and the plans that could be made of them. Nothing here knows the
/// scheduler.
class BatchBuilderTest : public testing::Test {
 protected:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  StepLimits draw_limits() {
    StepLimits limits;
    limits.max_num_seqs = pick(1, 12);
    limits.max_num_batched_tokens = pick(static_cast<int>(limits.max_num_seqs), 200);
    limits.max_model_len = pick(8, 300);
    limits.max_logits_rows = pick(1, 20);
    limits.block_size = 8 << pick(0, 3);
    limits.rows_worth_halving = pick(0, 1) == 0 ? pick(2, 150) : 0;
    return limits;
  }

  /// A sequence of `length` known tokens, `prompt` of them its prompt, with blocks for all of them.
  Sequence& add_sequence(const StepLimits& limits, int length, int prompt) {
    auto s = std::make_unique<Sequence>();
    s->request_id = static_cast<int64_t>(sequences_.size());
    s->num_prompt_tokens = prompt;
    s->num_in_flight = 1;  // the token that this step samples, as the scheduler counts it
    for (int i = 0; i < length; ++i) s->token_ids.push_back(pick(0, 999));
    for (int i = 0; i < length; i += limits.block_size) s->block_table.push_back(pick(0, 5000));
    s->seed = random_() | uint64_t{1} << 63;
    SamplingParams& p = s->params;
    p.temperature = pick(0, 2) == 0 ? 0 : 0.1 * pick(1, 20);
    p.top_k = std::array<int64_t, 5>{0, -1, 5, 40, INT64_MAX}[static_cast<size_t>(pick(0, 4))];
    p.top_p = 0.1 * pick(1, 10);
    p.min_p = 0.1 * pick(0, 9);
    p.min_tokens = pick(0, 3);
    if (pick(0, 1)) p.logprobs = pick(0, kMaxLogprobs);
    if (pick(0, 2) == 0) p.prompt_logprobs = pick(0, kMaxLogprobs);
    for (int i = pick(0, 4); i > 0; --i) s->stop_token_ids.push_back(pick(0, 999));
    for (int i = pick(0, 4); i > 0; --i)
      s->rules.biases.push_back({pick(0, 999), 0.5f * static_cast<float>(pick(-200, 200))});
    if (pick(0, 2) == 0) p.repetition_penalty = 0.1 * pick(5, 20);
    if (pick(0, 2) == 0) p.frequency_penalty = 0.1 * pick(-20, 20);
    if (pick(0, 2) == 0) p.presence_penalty = 0.1 * pick(-20, 20);
    sequences_.push_back(std::move(s));
    return *sequences_.back();
  }

  static StepLimits small_limits(int64_t tokens, int64_t seqs) {
    return {.max_num_batched_tokens = tokens,
            .max_num_seqs = seqs,
            .max_model_len = 64,
            .max_logits_rows = 4,
            .block_size = 8};
  }

  /// Decodes, whole prompts and chunks in one plan, within the limits.
  Plan draw_plan(const StepLimits& limits) {
    Plan plan;
    const int count = pick(1, static_cast<int>(limits.max_num_seqs));
    for (int i = 0; i < count; ++i) {
      const int64_t budget = limits.max_num_batched_tokens - plan.num_tokens;
      if (budget == 0) break;
      const int length = pick(1, static_cast<int>(limits.max_model_len)), prompt = pick(1, length);
      Sequence& s = add_sequence(limits, length, prompt);
      const int64_t start = prompt < length ? length - 1 : pick(0, length - 1);
      const int64_t tokens = std::min<int64_t>(budget, pick(1, static_cast<int>(length - start)));
      plan.sequences.push_back({.sequence = &s,
                                .start = start,
                                .num_tokens = tokens,
                                .samples = start + tokens == length,
                                .is_new = pick(0, 9) == 0});
      plan.num_tokens += tokens;
    }
    return plan;
  }

  std::mt19937_64 random_{11};
  std::vector<std::unique_ptr<Sequence>> sequences_;
};

}  // namespace nanovllm
