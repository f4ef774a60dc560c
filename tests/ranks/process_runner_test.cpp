// A step's way to another process: it must arrive whole, and so must its token masks. What
// processes do together is tested under mpirun (tests/e2e/mpi_test.cpp).
#include "ranks/process_runner.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>

#include "engine/idle_backend.h"
#include "engine/scripted_engine.h"
#include "engine/test_grammars.h"

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
           &b.block_tables, &b.logits_rows, &input.token_source, &s.prompt_targets, &s.biases})
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

/// Messages from rank 0 to rank 1.
struct Wire {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::vector<std::byte>> messages;
};

/// Two "processes" of this one.
class WiredGroup final : public ProcessGroup {
 public:
  WiredGroup(Wire& wire, int rank) : wire_(wire), rank_(rank) {}
  int rank() const override { return rank_; }
  int world_size() const override { return 2; }
  int ranks_on_host() const override { return 2; }
  int rank_on_host() const override { return rank_; }
  std::unique_ptr<Communicator> make_communicator() override {
    return std::make_unique<NullCommunicator>(rank_, 2);
  }
  void broadcast(std::span<std::byte> bytes) override {
    std::unique_lock lock(wire_.mutex);
    if (rank_ == 0) {
      wire_.messages.emplace_back(bytes.begin(), bytes.end());
      wire_.changed.notify_one();
      return;
    }
    wire_.changed.wait(lock, [this] { return !wire_.messages.empty(); });
    ASSERT_EQ(wire_.messages.front().size(), bytes.size());
    std::ranges::copy(wire_.messages.front(), bytes.begin());
    wire_.messages.pop_front();
  }
  void await_broadcast(std::span<std::byte> bytes,
                       const std::function<void()>& meanwhile) override {
    meanwhile();
    broadcast(bytes);
  }
  void leave() override {}
  int64_t smallest(int64_t value) override { return value; }

 private:
  Wire& wire_;
  const int rank_;
};

/// Two steps may be in flight.
class AsynchronousScript final : public ScriptedBackend {
 public:
  using ScriptedBackend::ScriptedBackend;
  bool is_asynchronous() const override { return true; }
};

TEST(ProcessRunner, TheOtherRanksGetTheMasksOfEveryStep) {
  ModelConfig model = idle_model();
  model.num_attention_heads = model.num_key_value_heads = 2;
  EngineConfig config;
  config.block_size = 8;
  Wire wire;
  std::array<std::shared_ptr<ScriptedBackend::Script>, 2> scripts;
  for (auto& script : scripts) script = std::make_shared<ScriptedBackend::Script>();
  const auto make = [&](int rank) {
    return std::make_unique<ProcessRunner>(
        std::make_unique<WiredGroup>(wire, rank),
        std::make_unique<ModelRunner>(std::make_unique<AsynchronousScript>(scripts[rank]),
                                      std::make_unique<NullCommunicator>(rank, 2), model, config));
  };
  std::thread other([&] { make(1)->serve(); });
  {
    LLMEngine engine(make(0), model, config, nullptr, {99});
    const auto ones = std::make_shared<TestGrammar>([] {
      return std::make_unique<ChoiceMatcher>(std::vector<std::vector<int32_t>>{{1, 1, 1, 1, 1}},
                                             99);
    });
    for (int i = 0; i < 12; ++i)
      engine.add_request({1, 2, i}, {.max_tokens = 1 + i % 4}, i % 3 == 0 ? nullptr : ones);
    while (!engine.is_finished())
      for (const RequestOutput& output : engine.step()) EXPECT_EQ(output.error, "");
  }
  other.join();
  const std::vector<std::vector<int32_t>> one_for_each_token(20, {1});
  for (const auto& script : scripts) EXPECT_EQ(script->allowed, one_for_each_token);
}

}  // namespace
}  // namespace nanovllm
