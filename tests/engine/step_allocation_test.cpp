// Counts calls of operator new and of the device's allocator: a decode step in the steady state
// makes none, eager or recorded, and never waits for the whole device.

#include <gtest/gtest.h>

#include "engine/llm_engine.h"
#include "engine/model_runner.h"
#include "ops/null_backend.h"
#include "unit/engine/count_allocations.h"

namespace nanovllm {
namespace {

struct Counts {
  int device_allocations = 0, synchronizations = 0, launches = 0;
};

/// Computes nothing at once; every token is 1.
class IdleBackend : public NullBackend {
 public:
  explicit IdleBackend(Counts& counts) : counts_(counts) {}
  MemoryInfo memory() const override { return {size_t{1} << 30, size_t{1} << 30}; }
  Buffer allocate(size_t bytes) override {
    ++counts_.device_allocations;
    return {new std::byte[bytes](), [](std::byte* data) { delete[] data; }};
  }
  Buffer allocate_host(size_t bytes) override { return allocate(bytes); }
  bool is_asynchronous() const override { return true; }
  bool has_graphs() const override { return true; }
  void synchronize() override { ++counts_.synchronizations; }
  std::unique_ptr<Fence> make_fence() override { return std::make_unique<OpenFence>(); }
  std::unique_ptr<Graph> capture(const std::function<void()>& body) override {
    body();
    return std::make_unique<CountingGraph>(counts_);
  }
  void copy(Tensor dst, Tensor src) override { std::memcpy(dst.data, src.data, src.bytes()); }
  void sample(Tensor ids, Tensor, const SamplingBatch&) override {
    for (int64_t i = 0; i < ids.numel(); ++i) ids.ptr<int32_t>()[i] = 1;
  }

 private:
  struct OpenFence final : Fence {
    void record() override {}
    void wait() override {}
  };
  struct CountingGraph final : Graph {
    explicit CountingGraph(Counts& c) : counts(c) {}
    void launch() override { ++counts.launches; }
    Counts& counts;
  };
  Counts& counts_;
};

class StepAllocation : public testing::TestWithParam<bool> {};

TEST_P(StepAllocation, ADecodeStepAllocatesNothingAndNeverWaitsForTheDevice) {
  constexpr int kSequences = 32, kWarmUp = 20, kSteps = 200;
  ModelConfig model;
  model.architecture = "Qwen3ForCausalLM";
  model.vocab_size = 100;
  model.hidden_size = model.head_dim = model.intermediate_size = 8;
  model.num_hidden_layers = model.num_attention_heads = model.num_key_value_heads = 1;
  model.max_position_embeddings = 1024;
  model.dtype = DType::f32;
  EngineConfig config;
  config.block_size = 256;
  config.enforce_eager = GetParam();
  Counts counts;
  auto runner = std::make_unique<ModelRunner>(
      std::make_unique<IdleBackend>(counts), std::make_unique<SingleCommunicator>(), model, config);
  LLMEngine engine(std::move(runner), model, config, nullptr, {});
  SamplingParams params;
  params.max_tokens = kWarmUp + kSteps + 100;
  params.output_kind = OutputKind::final_only;
  for (int i = 0; i < kSequences; ++i) engine.add_request({1, 2, 3}, params);
  for (int i = 0; i < kWarmUp; ++i) engine.step();

  const int64_t allocations = num_allocations;
  const Counts before = counts;
  for (int i = 0; i < kSteps; ++i) engine.step();
  EXPECT_EQ(num_allocations - allocations, 0);
  EXPECT_EQ(counts.device_allocations, before.device_allocations);
  EXPECT_EQ(counts.synchronizations, before.synchronizations);
  EXPECT_EQ(counts.launches - before.launches, GetParam() ? 0 : kSteps);
  EXPECT_EQ(engine.stats().generated_tokens, kSequences * (kWarmUp + kSteps));
}

std::string name_of_mode(const testing::TestParamInfo<bool>& mode) {
  return mode.param ? "eager" : "recorded";
}
INSTANTIATE_TEST_SUITE_P(Engine, StepAllocation, testing::Bool(), name_of_mode);

}  // namespace
}  // namespace nanovllm
