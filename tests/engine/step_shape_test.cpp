// The shapes that steps of decodes are padded to, and what the padding is.
#include <gtest/gtest.h>

#include "engine/batch_rig.h"

namespace nanovllm {
namespace {

// A step that is recorded before there is one: views of the same shapes at the same places as those
// of a step of that shape, which is what a graph knows of it.
TEST_F(BatchBuilderTest, AnEmptyPlanOfAShapeLooksLikeAnyOfThatShape) {
  const StepLimits limits = small_limits(100, 100);
  Plan plan;
  for (int i = 0; i < 70; ++i) {
    Sequence& s = add_sequence(limits, 20, 10);
    s.params.min_tokens = i % 30;
    plan.sequences.push_back({.sequence = &s, .start = 19, .num_tokens = 1, .samples = true});
    ++plan.num_tokens;
  }
  const auto shape = decode_shape(plan, limits);
  ASSERT_TRUE(shape);
  const BatchBuilder builder(limits);
  std::vector<std::byte> one(builder.max_bytes()), two(builder.max_bytes());
  StepInput real, empty;
  builder.build(plan, one.data(), real, shape);
  builder.build({}, two.data(), empty, shape);
  EXPECT_GT(shape->num_biases, 0);
  EXPECT_GE(shape->num_logprobs, 0);
  const auto views = [](StepInput& input, const std::byte* block) {
    std::vector<std::pair<std::ptrdiff_t, std::string>> list;
    Batch& b = input.batch;
    for (const Tensor* t : {&b.tokens, &b.positions, &b.slot_mapping, &b.cu_seqlens_q,
                            &b.context_lens, &b.block_tables, &b.logits_rows, &input.token_source,
                            &input.sampler.prompt_targets, &input.sampler.biases})
      list.emplace_back(t->data - block, t->describe());
    for (const auto& column : input.sampler.params.tensors())
      list.emplace_back(column.tensor->data - block, column.tensor->describe());
    return list;
  };
  EXPECT_EQ(views(real, one.data()), views(empty, two.data()));
  for (const auto member : {&Batch::max_seqlen_q, &Batch::max_context_len, &Batch::num_decodes})
    EXPECT_EQ(real.batch.*member, empty.batch.*member);
  EXPECT_EQ(real.sampler.num_logprobs, empty.sampler.num_logprobs);
  EXPECT_TRUE(empty.is_decode);
}

// Whatever its row computes: it stores nothing, reads no key, asks for nothing, and masks nothing.
TEST_F(BatchBuilderTest, PaddingStoresAndReadsNothing) {
  const StepLimits limits = small_limits(100, 100);
  Plan plan;
  for (int i = 0; i < 3; ++i) {
    Sequence& s = add_sequence(limits, 20, 10);
    s.params = {};
    s.params.temperature = 0.5;
    s.params.top_p = 0.5;
    s.params.min_tokens = 15;
    s.stop_token_ids = {7};
    s.rules.biases.clear();
    plan.sequences.push_back({.sequence = &s, .start = 19, .num_tokens = 1, .samples = true});
    ++plan.num_tokens;
  }
  const BatchBuilder builder(limits);
  std::vector<std::byte> block(builder.max_bytes(), std::byte{0x7f});
  StepInput input;
  builder.build(plan, block.data(), input, decode_shape(plan, limits));
  const Batch& b = input.batch;
  ASSERT_EQ(b.num_tokens(), 4);
  EXPECT_EQ(values<int32_t>(b.slot_mapping)[3], -1);
  EXPECT_EQ(values<int32_t>(b.context_lens)[3], 0);
  EXPECT_EQ(values<int32_t>(b.cu_seqlens_q), (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(values<int32_t>(input.token_source)[3], -1);
  EXPECT_EQ(values<int32_t>(b.tokens)[3], 0);
  EXPECT_EQ(values<int32_t>(b.positions)[3], 0);
  EXPECT_EQ(values<int32_t>(b.logits_rows), (std::vector<int32_t>{0, 1, 2, 3}));
  for (int64_t i = 0; i < b.block_tables.shape[1]; ++i)
    EXPECT_EQ(b.block_tables[3].ptr<int32_t>()[i], 0);
  const SamplingBatch& s = input.sampler.params;
  EXPECT_EQ(values<float>(s.temperature)[3], 0);
  EXPECT_EQ(values<int32_t>(s.top_k)[3], 0);
  EXPECT_EQ(values<float>(s.top_p)[3], 1);
  EXPECT_EQ(values<float>(s.min_p)[3], 0);
  EXPECT_EQ(values<float>(s.repetition_penalty)[3], 1);
  EXPECT_EQ(values<float>(s.frequency_penalty)[3], 0);
  EXPECT_EQ(values<float>(s.presence_penalty)[3], 0);
  const auto biases = values<int32_t>(input.sampler.biases);
  ASSERT_EQ(biases.size(), 32u);
  const auto masked = std::bit_cast<int32_t>(-INFINITY);
  EXPECT_EQ(std::vector(biases.begin(), biases.begin() + 12),
            (std::vector<int32_t>{0, 7, masked, -1, 1, 7, masked, -1, 2, 7, masked, -1}));
  for (size_t i = 12; i < biases.size(); ++i) EXPECT_EQ(biases[i], -1);
}

TEST_F(BatchBuilderTest, OnlyStepsOfDecodesHaveAShapeAndItKeepsToTheLimits) {
  const auto shape_of_one = [&](const ScheduledSequence& s) {
    Plan plan;
    plan.sequences = {s};
    plan.num_tokens = s.num_tokens;
    return decode_shape(plan, small_limits(100, 100));
  };
  Sequence& s = add_sequence(small_limits(100, 100), 20, 10);
  EXPECT_TRUE(shape_of_one({.sequence = &s, .start = 19, .num_tokens = 1, .samples = true}));
  EXPECT_FALSE(shape_of_one({.sequence = &s, .start = 18, .num_tokens = 2, .samples = true}));
  EXPECT_FALSE(shape_of_one({.sequence = &s, .start = 18, .num_tokens = 1}));
  EXPECT_FALSE(shape_of_one(
      {.sequence = &s, .start = 19, .num_tokens = 1, .samples = true, .is_new = true}));
  for (const auto& [tokens, seqs] : {std::pair{100, 200}, {200, 100}, {3, 3}, {97, 97}}) {
    Plan plan;
    for (int i = 0; i < std::min(tokens, seqs); ++i)
      plan.sequences.push_back({.sequence = &s, .start = 19, .num_tokens = 1, .samples = true});
    const auto shape = decode_shape(plan, small_limits(tokens, seqs));
    ASSERT_TRUE(shape);
    EXPECT_EQ(shape->num_seqs, std::min(tokens, seqs));
  }
}

TEST_F(BatchBuilderTest, TheShapeBelowIsThatOfTheNextFewerSequences) {
  const StepLimits limits = small_limits(600, 600);
  Sequence& s = add_sequence(limits, 20, 10);
  s.params.min_tokens = 0;
  s.params.logprobs.reset();
  Plan plan;
  std::optional<StepShape> before;
  for (int rows = 1; rows <= 512; ++rows) {
    plan.sequences.push_back({.sequence = &s, .start = 19, .num_tokens = 1, .samples = true});
    const auto shape = decode_shape(plan, limits);
    ASSERT_TRUE(shape);
    if (before && shape->num_seqs == before->num_seqs) continue;
    const auto below = shape_below(*shape);
    ASSERT_EQ(below.has_value(), before.has_value()) << rows;
    if (below) {
      EXPECT_EQ(below->num_seqs, before->num_seqs);
      EXPECT_EQ(below->max_blocks, before->max_blocks);
    }
    before = shape;
  }
}

}  // namespace
}  // namespace nanovllm
