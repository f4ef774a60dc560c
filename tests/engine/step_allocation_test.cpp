// Counts calls of operator new and of the device's allocator: a decode step in the steady state
// makes none, eager or recorded, and never waits for the whole device.

#include <gtest/gtest.h>

#include "engine/idle_backend.h"
#include "engine/llm_engine.h"
#include "engine/model_runner.h"
#include "unit/engine/count_allocations.h"

namespace nanovllm {
namespace {

class StepAllocation : public testing::TestWithParam<bool> {};

TEST_P(StepAllocation, ADecodeStepAllocatesNothingAndNeverWaitsForTheDevice) {
  constexpr int kSequences = 32, kWarmUp = 20, kSteps = 200;
  const ModelConfig model = idle_model();
  EngineConfig config;
  config.block_size = 256;
  config.enforce_eager = GetParam();
  IdleCounts counts;
  auto runner = std::make_unique<ModelRunner>(
      std::make_unique<IdleBackend>(counts), std::make_unique<SingleCommunicator>(), model, config);
  LLMEngine engine(std::move(runner), model, config, nullptr, {});
  SamplingParams params;
  params.max_tokens = kWarmUp + kSteps + 100;
  params.output_kind = OutputKind::final_only;
  for (int i = 0; i < kSequences; ++i) engine.add_request({1, 2, 3}, params);
  for (int i = 0; i < kWarmUp; ++i) engine.step();

  const int64_t allocations = num_allocations;
  const IdleCounts before = counts;
  for (int i = 0; i < kSteps; ++i) engine.step();
  EXPECT_EQ(num_allocations - allocations, 0);
  EXPECT_EQ(counts.allocations, before.allocations);
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
