#include "engine/batch_builder.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

namespace nanovllm {
namespace {

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

/// What build() should give, by the definitions in core/batch.h and layers/sampler.h, one row at a
/// time.
struct Expected {
  std::vector<int32_t> tokens, positions, slots, starts{0}, contexts, logits_rows, targets;
  std::vector<float> temperature;
  std::vector<int32_t> top_k, sampled_position;
  std::vector<int64_t> seed;
  std::vector<size_t> planned;                       // where in the plan a sequence is
  std::vector<std::tuple<int64_t, int32_t>> masked;  // row among all logits rows, token
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
    if (s.sequence->num_generated() < p.min_tokens)
      for (const int32_t id : s.sequence->stop_token_ids)
        masked.emplace_back(std::ssize(logits_rows), id);
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
    if (!expected.masked.empty()) expected.features |= kSampleMasked;
    if (expected.num_logprobs >= 0) expected.features |= kSampleLogprobs;
    ASSERT_EQ(sampler.params.features, expected.features);
    std::vector<std::tuple<int64_t, int32_t>> masked;
    const auto pairs = values<int32_t>(sampler.masked);
    for (size_t i = 0; i < pairs.size(); i += 2) masked.emplace_back(pairs[i], pairs[i + 1]);
    ASSERT_EQ(masked, expected.masked);
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
  EXPECT_GT(shape->num_masked, 0);
  EXPECT_GE(shape->num_logprobs, 0);
  const auto views = [](StepInput& input, const std::byte* block) {
    std::vector<std::pair<std::ptrdiff_t, std::string>> list;
    Batch& b = input.batch;
    for (const Tensor* t : {&b.tokens, &b.positions, &b.slot_mapping, &b.cu_seqlens_q,
                            &b.context_lens, &b.block_tables, &b.logits_rows, &input.token_source,
                            &input.sampler.prompt_targets, &input.sampler.masked})
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
  const auto pairs = values<int32_t>(input.sampler.masked);
  ASSERT_EQ(pairs.size(), 16u);
  EXPECT_EQ(std::vector(pairs.begin(), pairs.begin() + 6),
            (std::vector<int32_t>{0, 7, 1, 7, 2, 7}));
  for (size_t i = 6; i < pairs.size(); ++i) EXPECT_EQ(pairs[i], -1);
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
      plan.sequences.push_back(
          {.sequence = &s, .start = length - count, .num_tokens = count, .samples = true});
      plan.num_tokens += count;
    }
    const BatchBuilder builder(limits);
    std::vector<std::byte> block(builder.max_bytes());
    StepInput input;
    ASSERT_NO_THROW(builder.build(plan, block.data(), input));
    EXPECT_LE(input.bytes, builder.max_bytes());
    EXPECT_EQ(input.sampler.masked.shape[0], seqs * (kMaxStopTokenIds + kMaxEosIds));
  }
}

}  // namespace
}  // namespace nanovllm
