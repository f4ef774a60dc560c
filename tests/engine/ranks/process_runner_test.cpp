// A step's way to another process: it must arrive whole. What processes do together is tested under
// mpirun (tests/e2e/mpi_test.cpp).
#include "engine/ranks/process_runner.h"

#include <gtest/gtest.h>

namespace nanovllm {
namespace {

/// Every tensor of a step: where it begins in the block, and its shape.
std::vector<std::pair<std::ptrdiff_t, std::string>> views(const StepInput& input,
                                                          const std::byte* block) {
  std::vector<std::pair<std::ptrdiff_t, std::string>> list;
  const Batch& b = input.batch;
  SamplerInput s = input.sampler;
  for (const Tensor* t : std::initializer_list<const Tensor*>{
           &b.tokens, &b.positions, &b.slot_mapping, &b.cu_seqlens_q, &b.context_lens,
           &b.block_tables, &b.logits_rows, &input.token_source, &s.prompt_targets, &s.masked})
    list.emplace_back(t->data - block, t->describe());
  for (const auto& column : s.params.tensors())
    list.emplace_back(column.tensor->data - block, column.tensor->describe());
  return list;
}

TEST(ProcessRunner, AStepArrivesWhole) {
  const StepLimits limits{.max_num_batched_tokens = 64,
                          .max_num_seqs = 4,
                          .max_model_len = 64,
                          .max_logits_rows = 4,
                          .block_size = 8,
                          .rows_worth_halving = 2};
  Plan plan;
  std::vector<Sequence> sequences(3);
  for (Sequence& s : sequences) {
    s.token_ids = {5, 6, 7, 8, 9, 10};
    s.num_prompt_tokens = 5;
    s.block_table = {3};
    s.params.top_k = 4;
    s.params.logprobs = 2;
    s.params.prompt_logprobs = 1;
    s.params.min_tokens = 9;
    s.stop_token_ids = {1, 2};
    plan.sequences.push_back({.sequence = &s, .num_tokens = 6, .samples = true, .is_new = true});
    plan.num_tokens += 6;
  }
  const BatchBuilder builder(limits);
  std::vector<std::byte> block(builder.max_bytes()), message, received(block.size());
  StepInput sent, arrived;
  builder.build(plan, block.data(), sent);
  ASSERT_GT(sent.halves.rows, 0);
  pack_step(sent, block.data(), message);
  unpack_step(message, arrived, received.data());

  EXPECT_EQ(arrived.halves.rows, sent.halves.rows);
  EXPECT_EQ(arrived.halves.seqs, sent.halves.seqs);
  EXPECT_EQ(arrived.is_decode, sent.is_decode);
  EXPECT_EQ(arrived.batch.max_seqlen_q, sent.batch.max_seqlen_q);
  EXPECT_EQ(arrived.batch.max_context_len, sent.batch.max_context_len);
  EXPECT_EQ(arrived.batch.num_decodes, sent.batch.num_decodes);
  EXPECT_EQ(arrived.sampler.num_logprobs, sent.sampler.num_logprobs);
  EXPECT_EQ(arrived.sampling.size(), sent.sampling.size());
  EXPECT_EQ(arrived.sampler.params.features, sent.sampler.params.features);
  EXPECT_EQ(views(arrived, received.data()), views(sent, block.data()));
  received.resize(arrived.bytes);
  block.resize(sent.bytes);
  EXPECT_EQ(received, block);
}

}  // namespace
}  // namespace nanovllm
