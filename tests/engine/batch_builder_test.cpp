#include "engine/batch_builder.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "engine/batch_rig.h"

namespace nanovllm {
namespace {

/// The result that build() should give, by the definitions in core/batch.h and layers/sampler.h,
/// one row at a time.
struct Expected {
  std::vector<int32_t> tokens, positions, slots, starts{0}, contexts, logits_rows, targets;
  std::vector<float> temperature;
  std::vector<int32_t> top_k, sampled_position;
  std::vector<int64_t> seed;
  std::vector<size_t> planned;  // where in the plan a sequence is
  // Row among all logits rows, token, bias.
  std::vector<std::tuple<int64_t, int32_t, float>> biases;
  std::vector<float> repetition, frequency, presence;
  std::vector<int32_t> prompts;
  int64_t longest_query = 0, longest_context = 0, leading_decodes = 0, num_logprobs = -1;
  uint32_t features = 0;

  Expected(const Plan& plan, const StepLimits& limits) {
    for (const ScheduledSequence& s : plan.sequences) {
      if (s.num_tokens == 1 && !s.is_new && leading_decodes == std::ssize(contexts))
        ++leading_decodes;
      add_rows(s, limits);
    }
    for (size_t i = 0; i < plan.sequences.size(); ++i)
      if (plan.sequences[i].samples) add_sample(plan.sequences[i], starts[i + 1] - 1);
    for (size_t i = 0; i < plan.sequences.size(); ++i)
      add_prompt_rows(plan.sequences[i], starts[i]);
  }

  /// Makes two of a sequence with rows on both sides of `row`; the number of those before it.
  int64_t cut_at(int64_t row) {
    const auto at = std::ranges::lower_bound(starts, row) - starts.begin();
    if (starts[static_cast<size_t>(at)] == row) return at;
    const auto last_row = starts[static_cast<size_t>(at)];
    contexts.insert(contexts.begin() + at - 1,
                    contexts[static_cast<size_t>(at - 1)] - (last_row - static_cast<int32_t>(row)));
    planned.insert(planned.begin() + at, planned[static_cast<size_t>(at - 1)]);
    starts.insert(starts.begin() + at, static_cast<int32_t>(row));
    return at;
  }
  void add_rows(const ScheduledSequence& s, const StepLimits& limits) {
    for (int64_t p = s.start; p < s.start + s.num_tokens; ++p) {
      tokens.push_back(s.sequence->token_ids[static_cast<size_t>(p)]);
      positions.push_back(static_cast<int32_t>(p));
      slots.push_back(s.sequence->block_table[static_cast<size_t>(p / limits.block_size)] *
                          limits.block_size +
                      static_cast<int32_t>(p % limits.block_size));
    }
    starts.push_back(static_cast<int32_t>(tokens.size()));
    planned.push_back(planned.size());
    contexts.push_back(positions.back() + 1);
    longest_query = std::max(longest_query, s.num_tokens);
    longest_context = std::max<int64_t>(longest_context, contexts.back());
  }
  void add_sample(const ScheduledSequence& s, int32_t row) {
    const SamplingParams& p = s.sequence->params;
    for (const TokenBias& bias : s.sequence->rules.biases)
      biases.emplace_back(std::ssize(logits_rows), bias.token_id, bias.bias);
    if (s.sequence->num_generated() < p.min_tokens)
      for (const int32_t id : s.sequence->stop_token_ids)
        biases.emplace_back(std::ssize(logits_rows), id, -INFINITY);
    repetition.push_back(static_cast<float>(p.repetition_penalty));
    frequency.push_back(static_cast<float>(p.frequency_penalty));
    presence.push_back(static_cast<float>(p.presence_penalty));
    prompts.push_back(static_cast<int32_t>(s.sequence->num_prompt_tokens));
    if (p.repetition_penalty != 1 || p.frequency_penalty != 0 || p.presence_penalty != 0)
      features |= kSamplePenalised;
    logits_rows.push_back(row);
    temperature.push_back(static_cast<float>(p.temperature));
    top_k.push_back(p.top_k < 0           ? 0
                    : p.top_k > INT32_MAX ? INT32_MAX
                                          : static_cast<int32_t>(p.top_k));
    seed.push_back(static_cast<int64_t>(s.sequence->seed));
    sampled_position.push_back(static_cast<int32_t>(s.sequence->num_tokens()));
    if (p.temperature > 0) {
      features |= kSampleRandom;
      if (p.top_k > 0 || p.top_p < 1 || p.min_p > 0) features |= kSampleFiltered;
    }
    if (p.logprobs) num_logprobs = std::max<int64_t>(num_logprobs, *p.logprobs);
  }
  void add_prompt_rows(const ScheduledSequence& s, int32_t first_row) {
    const Sequence& sequence = *s.sequence;
    for (int64_t p = s.start; sequence.params.prompt_logprobs && p < s.start + s.num_tokens; ++p) {
      if (p + 1 >= sequence.num_prompt_tokens) continue;
      logits_rows.push_back(first_row + static_cast<int32_t>(p - s.start));
      targets.push_back(sequence.token_ids[static_cast<size_t>(p + 1)]);
      num_logprobs = std::max<int64_t>(num_logprobs, *sequence.params.prompt_logprobs);
    }
  }
};

/// The arrays that say which rows there are. `expected` gets the halves of `input`.
void expect_rows(const Plan& plan, const StepLimits& limits, const StepInput& input,
                 Expected& expected) {
  const Batch& batch = input.batch;
  const int64_t rows = batch.num_tokens();
  ASSERT_EQ(input.halves.rows > 0,
            limits.rows_worth_halving > 0 && rows >= limits.rows_worth_halving);
  if (input.halves.rows > 0) {
    ASSERT_GE(input.halves.rows, rows / 2);
    ASSERT_LT(input.halves.rows, std::min(rows, rows / 2 + 128));
    ASSERT_EQ(input.halves.seqs, expected.cut_at(input.halves.rows));
  }
  ASSERT_EQ(values<int32_t>(batch.tokens), expected.tokens);
  ASSERT_EQ(values<int32_t>(batch.positions), expected.positions);
  ASSERT_EQ(values<int32_t>(batch.slot_mapping), expected.slots);
  ASSERT_EQ(values<int32_t>(batch.cu_seqlens_q), expected.starts);
  ASSERT_EQ(values<int32_t>(batch.context_lens), expected.contexts);
  for (size_t i = 0; i < expected.planned.size(); ++i) {
    const auto& table = plan.sequences[expected.planned[i]].sequence->block_table;
    const Tensor row = batch.block_tables[static_cast<int64_t>(i)];
    ASSERT_TRUE(std::equal(table.begin(), table.end(), row.ptr<int32_t>()));
  }
}

TEST_F(BatchBuilderTest, GivesTheArraysThatTheirDefinitionsSay) {
  for (int round = 0; round < 500; ++round) {
    const StepLimits limits = draw_limits();
    sequences_.clear();
    const Plan plan = draw_plan(limits);
    Built built(plan, limits);
    StepInput& input = built.input;
    Expected expected(plan, limits);

    expect_rows(plan, limits, input, expected);
    const Batch& batch = input.batch;
    ASSERT_EQ(values<int32_t>(batch.logits_rows), expected.logits_rows);
    ASSERT_EQ(batch.max_seqlen_q, expected.longest_query);
    ASSERT_EQ(batch.max_context_len, expected.longest_context);
    ASSERT_EQ(batch.num_decodes, expected.leading_decodes);

    const SamplerInput& sampler = input.sampler;
    ASSERT_EQ(sampler.num_logprobs, expected.num_logprobs);
    ASSERT_EQ(values<int32_t>(sampler.prompt_targets), expected.targets);
    ASSERT_EQ(values<float>(sampler.params.temperature), expected.temperature);
    ASSERT_EQ(values<int32_t>(sampler.params.top_k), expected.top_k);
    ASSERT_EQ(values<int64_t>(sampler.params.seed), expected.seed);
    ASSERT_EQ(values<int32_t>(sampler.params.position), expected.sampled_position);
    ASSERT_EQ(values<float>(sampler.params.repetition_penalty), expected.repetition);
    ASSERT_EQ(values<float>(sampler.params.frequency_penalty), expected.frequency);
    ASSERT_EQ(values<float>(sampler.params.presence_penalty), expected.presence);
    ASSERT_EQ(values<int32_t>(sampler.params.num_prompt_tokens), expected.prompts);
    // Its sequence's keys are those of the row that it samples from.
    for (int64_t i = 0; i < sampler.params.sequence.numel(); ++i) {
      const int32_t of = sampler.params.sequence.ptr<int32_t>()[i];
      ASSERT_EQ(batch.cu_seqlens_q.ptr<int32_t>()[of + 1] - 1, batch.logits_rows.ptr<int32_t>()[i]);
    }
    if (!expected.biases.empty()) expected.features |= kSampleBiased;
    if (expected.num_logprobs >= 0) expected.features |= kSampleLogprobs;
    ASSERT_EQ(sampler.params.features, expected.features);
    std::vector<std::tuple<int64_t, int32_t, float>> biases;
    const auto entries = values<int32_t>(sampler.biases);
    for (size_t i = 0; i < entries.size(); i += 4) {
      biases.emplace_back(entries[i], entries[i + 1], std::bit_cast<float>(entries[i + 2]));
      ASSERT_EQ(entries[i + 3], -1);
    }
    ASSERT_EQ(biases, expected.biases);
    ASSERT_LE(input.bytes, built.block.size());
  }
}

// 64 rows fill their arrays: nothing lies between one and the next.
TEST_F(BatchBuilderTest, HalvesWithinASequenceLeaveTheOtherArraysAlone) {
  StepLimits limits = small_limits(64, 2);
  limits.rows_worth_halving = 2;
  Plan plan;
  for (const int64_t length : {40, 24}) {
    Sequence& s = add_sequence(limits, static_cast<int>(length), static_cast<int>(length));
    plan.sequences.push_back({.sequence = &s, .num_tokens = length, .is_new = true});
    plan.num_tokens += length;
  }
  Built built(plan, limits);
  StepInput& input = built.input;
  Expected expected(plan, limits);
  expect_rows(plan, limits, input, expected);
  EXPECT_EQ(values<int32_t>(input.batch.cu_seqlens_q), (std::vector{0, 32, 40, 64}));
  EXPECT_EQ(values<int32_t>(input.batch.context_lens), (std::vector{32, 40, 24}));
}

// Their last tokens, where the answer ends in those before; of a token that the device alone knows,
// the device is told which one it must be.
TEST_F(BatchBuilderTest, BadWordsThatTheAnswerHasBegunAreMasked) {
  const StepLimits limits = small_limits(64, 2);
  const auto masked = std::bit_cast<int32_t>(-INFINITY);
  for (const bool on_device : {false, true}) {
    Sequence& s = add_sequence(limits, 10, 10);
    s.params = {};
    s.rules.biases.clear();
    s.stop_token_ids.clear();
    s.token_ids[9] = 4;
    for (const int32_t id : {5, 6}) s.token_ids.push_back(id);
    if (!on_device) s.token_ids.push_back(7);
    s.block_table.push_back(1);
    s.rules.bad_words = {{6, 7, 8}, {7, 9}, {5, 6, 7, 2}, {4, 5, 6, 7, 1}, {5, 7, 8}, {6, 3}};
    Plan plan;
    plan.sequences.push_back({.sequence = &s,
                              .start = 12,
                              .num_tokens = 1,
                              .samples = true,
                              .input_on_device = on_device});
    plan.num_tokens = 1;
    const Built built(plan, limits);
    EXPECT_EQ(values<int32_t>(built.input.sampler.biases),
              on_device
                  ? (std::vector<int32_t>{0, 8, masked, 7, 0, 9, masked, 7, 0, 2, masked, 7, 0, 3,
                                          masked, 6})
                  : (std::vector<int32_t>{0, 8, masked, -1, 0, 9, masked, -1, 0, 2, masked, -1}));
  }
}

TEST_F(BatchBuilderTest, MovedViewsShowTheSameBytesElsewhere) {
  const StepLimits limits = small_limits(100, 8);
  const Plan plan = draw_plan(limits);
  Built built(plan, limits);
  std::vector<std::byte>& from = built.block;
  StepInput& input = built.input;
  std::vector<std::byte> to(from.begin(), from.begin() + static_cast<int64_t>(input.bytes));
  std::fill(from.begin(), from.end(), std::byte{0xee});
  move_to(input, from.data(), to.data(), {});
  const Expected expected(plan, limits);
  EXPECT_EQ(values<int32_t>(input.batch.tokens), expected.tokens);
  EXPECT_EQ(values<int32_t>(input.batch.logits_rows), expected.logits_rows);
  EXPECT_EQ(values<int64_t>(input.sampler.params.seed), expected.seed);
  EXPECT_EQ(values<int32_t>(input.sampler.prompt_targets), expected.targets);
}

// The worst steps: all sequences as long as they may be, every id masked that a request and a model
// may name, all rows with logits.
TEST_F(BatchBuilderTest, AnyStepWithinTheLimitsFits) {
  for (const auto& [seqs, tokens, length, block_size] : {std::tuple{1, 1, 8, 8},
                                                         {1, 500, 500, 8},
                                                         {256, 256, 100, 8},
                                                         {64, 4096, 64, 256},
                                                         {3, 1000, 8, 8}}) {
    const StepLimits limits{.max_num_batched_tokens = tokens,
                            .max_num_seqs = seqs,
                            .max_model_len = length,
                            .max_logits_rows = 7,
                            .block_size = block_size};
    sequences_.clear();
    Plan plan;
    for (int i = 0; i < seqs; ++i) {
      const int count = std::min(length, tokens / seqs);
      Sequence& s = add_sequence(limits, length, length);
      s.params.prompt_logprobs = s.params.logprobs = kMaxLogprobs;
      s.params.min_tokens = 1;
      s.stop_token_ids.assign(kMaxStopTokenIds + kMaxEosIds, 1);
      s.rules.biases.assign(kMaxLogitBias, {});
      s.rules.bad_words.assign(2 * kMaxBadWords, {s.token_ids.back(), 1});
      s.num_prompt_tokens = length - 1;
      s.params.min_tokens = 2;
      plan.sequences.push_back(
          {.sequence = &s, .start = length - count, .num_tokens = count, .samples = true});
      plan.num_tokens += count;
    }
    const BatchBuilder builder(limits);
    std::vector<std::byte> block(builder.max_bytes());
    StepInput input;
    ASSERT_NO_THROW(builder.build(plan, block.data(), input));
    EXPECT_LE(input.bytes, builder.max_bytes());
    EXPECT_EQ(input.sampler.biases.shape[0], limits.max_biases());
  }
}

}  // namespace
}  // namespace nanovllm
