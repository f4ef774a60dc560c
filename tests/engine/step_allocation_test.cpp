// Counts calls of operator new and of the device's allocator: a decode step in the steady state
// makes none, eager or recorded, and never waits for the whole device.

#include <gtest/gtest.h>
#include <malloc.h>
#include <nlohmann/json.hpp>

#include "engine/idle_backend.h"
#include "engine/llm_engine.h"
#include "engine/model_runner.h"
#include "engine/test_grammars.h"
#include "io/json_object.h"
#include "io/quantised/quantization.h"
#include "ops/cpu/cpu_backend.h"
#include "unit/engine/scheduler/count_allocations.h"

namespace {
int64_t num_aligned = 0;
}

// By which the CPU backend takes its memory; counted here.
extern "C" void* aligned_alloc(size_t alignment, size_t size) noexcept {
  ++num_aligned;
  void* data = nullptr;
  return posix_memalign(&data, alignment, size) == 0 ? data : nullptr;
}

namespace nanovllm {
namespace {

/// Allows every token at any time.
class AnythingMatcher final : public TokenMatcher {
 public:
  void fill_mask(std::span<uint32_t> mask) override { std::ranges::fill(mask, ~0u); }
  bool accept(int32_t) override { return true; }
};

/// Eager; with grammars.
class StepAllocation : public testing::TestWithParam<std::tuple<bool, bool>> {};

TEST_P(StepAllocation, ADecodeStepAllocatesNothingAndNeverWaitsForTheDevice) {
  constexpr int kSequences = 32, kWarmUp = 20, kSteps = 200;
  const auto [is_eager, with_grammars] = GetParam();
  const ModelConfig model = idle_model();
  EngineConfig config;
  config.block_size = 256;
  config.enforce_eager = is_eager;
  IdleCounts counts;
  auto runner = std::make_unique<ModelRunner>(
      std::make_unique<IdleBackend>(counts), std::make_unique<SingleCommunicator>(), model, config);
  LLMEngine engine(std::move(runner), model, config, nullptr, {});
  SamplingParams params;
  params.max_tokens = kWarmUp + kSteps + 100;
  params.output_kind = OutputKind::final_only;
  const auto all =
      std::make_shared<TestGrammar>([] { return std::make_unique<AnythingMatcher>(); });
  for (int i = 0; i < kSequences; ++i)
    engine.add_request({1, 2, 3}, params, with_grammars ? all : nullptr);
  for (int i = 0; i < kWarmUp; ++i) engine.step();

  const int64_t allocations = num_allocations;
  const IdleCounts before = counts;
  for (int i = 0; i < kSteps; ++i) engine.step();
  EXPECT_EQ(num_allocations - allocations, 0);
  EXPECT_EQ(counts.allocations, before.allocations);
  EXPECT_EQ(counts.synchronizations, before.synchronizations);
  // A step with masks is two.
  EXPECT_EQ(counts.launches - before.launches, is_eager ? 0 : with_grammars ? 2 * kSteps : kSteps);
  EXPECT_EQ(engine.stats().generated_tokens, kSequences * (kWarmUp + kSteps));
}

std::string name_of_mode(const testing::TestParamInfo<std::tuple<bool, bool>>& mode) {
  const auto [is_eager, with_grammars] = mode.param;
  return std::string(is_eager ? "eager" : "recorded") + (with_grammars ? "_grammars" : "");
}
INSTANTIATE_TEST_SUITE_P(Engine, StepAllocation, testing::Combine(testing::Bool(), testing::Bool()),
                         name_of_mode);

// -- The CPU backend, which computes: dense and with experts.

ModelConfig computing_model(bool is_mixture) {
  ModelConfig model = idle_model();
  model.hidden_size = 32;
  model.head_dim = model.intermediate_size = 16;
  model.num_hidden_layers = 2;
  if (is_mixture) {
    model.architecture = "Qwen3MoeForCausalLM";
    model.moe.emplace();
    model.moe->num_experts = 4;
    model.moe->num_experts_per_tok = 2;
    model.moe->moe_intermediate_size = 24;
  }
  return model;
}

/// Bytes of the process's heap that are in use.
size_t heap() {
  const auto info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

/// An engine over the kernels of `isa`; empty: oneDNN's products. On one thread: OpenMP's own
/// bookkeeping for more is none of ours.
LLMEngine engine_on_cpu(std::string_view isa, bool is_mixture, DType dtype,
                        bool quantises_rows = false) {
  ModelConfig model = computing_model(is_mixture);
  model.dtype = dtype;
  if (quantises_rows) {
    const Json json = Json::parse(R"({"quantization_config": {"quant_method": "fp8"}})");
    model.quantization = std::make_shared<const QuantizationConfig>(
        *JsonObject(json, "config.json", ErrorKind::model).optional_object("quantization_config"),
        model.warnings);
  }
  EngineConfig config;
  config.block_size = 256;
  config.max_num_batched_tokens = 64;
  auto runner = std::make_unique<ModelRunner>(
      std::make_unique<cpu::CpuBackend>(BackendOptions{.num_threads = 1}, isa),
      std::make_unique<SingleCommunicator>(), model, config);
  runner->load(nullptr, 1, {});
  return LLMEngine(std::move(runner), model, config, nullptr, {});
}

std::string_view own_kernels() { return cpu::best_kernels(cpu::onednn_allows_amx()).name; }

class CpuStepAllocation : public testing::TestWithParam<bool> {};

TEST_P(CpuStepAllocation, ADecodeStepOfOurOwnKernelsAllocatesNothing) {
  for (const auto& [dtype, quantises_rows] :
       {std::pair{DType::f32, false}, {DType::bf16, false}, {DType::bf16, true}}) {
    LLMEngine engine = engine_on_cpu(own_kernels(), GetParam(), dtype, quantises_rows);
    SamplingParams params;
    params.max_tokens = 200;
    params.top_k = 5;
    params.output_kind = OutputKind::final_only;
    for (int i = 0; i < 8; ++i) engine.add_request({1, 2, i}, params);
    for (int i = 0; i < 20; ++i) engine.step();
    const int64_t allocations = num_allocations;
    const size_t before = heap();
    for (int i = 0; i < 100; ++i) engine.step();
    EXPECT_EQ(num_allocations - allocations, 0) << name_of(dtype);
    EXPECT_EQ(heap(), before) << name_of(dtype);
  }
}

// oneDNN makes small objects for each call, and code for each number of rows that is new to it.
TEST_P(CpuStepAllocation, ADecodeStepOverOneDnnKeepsNothing) {
  LLMEngine engine = engine_on_cpu({}, GetParam(), DType::f32);
  SamplingParams params;
  params.max_tokens = 200;
  params.output_kind = OutputKind::final_only;
  for (int i = 0; i < 8; ++i) engine.add_request({1, 2, i}, params);
  for (int i = 0; i < 60; ++i) engine.step();  // an expert has met every number of rows by now
  const size_t before = heap();
  for (int i = 0; i < 100; ++i) engine.step();
  EXPECT_LE(heap(), before + (GetParam() ? size_t{1} << 20 : 0));
}

INSTANTIATE_TEST_SUITE_P(Engine, CpuStepAllocation, testing::Bool(), [](const auto& instance) {
  return std::string(instance.param ? "mixture" : "dense");
});

// The largest step, with filters and log probabilities.
TEST(CpuScratch, IsReservedBeforeTheFirstStep) {
  using Case = std::tuple<bool, DType, bool>;
  for (const auto& [is_mixture, dtype, quantises_rows] : {Case{false, DType::f32, false},
                                                          {true, DType::f32, false},
                                                          {false, DType::bf16, false},
                                                          {true, DType::bf16, false},
                                                          {false, DType::bf16, true},
                                                          {true, DType::bf16, true}}) {
    LLMEngine engine = engine_on_cpu(own_kernels(), is_mixture, dtype, quantises_rows);
    SamplingParams params;
    params.max_tokens = 2;
    params.top_p = 0.5;
    params.prompt_logprobs = 2;
    params.output_kind = OutputKind::final_only;
    engine.add_request(std::vector<int32_t>(64, 1), params);
    const int64_t before = num_aligned;
    while (!engine.is_finished()) engine.step();
    EXPECT_EQ(num_aligned - before, 0);
  }
}

}  // namespace
}  // namespace nanovllm
