// Ranks on GPUs of which one fails on command: the caller hears of it in time, in one message that
// names the rank and the cause, and the memory of all GPUs is given back. The same on devices that
// only pretend: rank_group_test.cpp.
#include <atomic>
#include <thread>

#include <gtest/gtest.h>

#include "bench/step_recorder.h"
#include "engine/gate.h"
#include "engine/llm_engine.h"
#include "ranks/rank_group.h"

namespace nanovllm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

enum class Fault { error, hang };
enum class Phase { load, prefill, eager_decode, recorded_decode };

struct Case {
  Fault fault;
  Phase phase;
};

/// The state that the devices of a test share.
struct Scene {
  Case now;
  std::atomic<bool> decodes = false;  // all graphs are recorded
  Gate released;                      // who hangs goes on

  void fail() {
    if (now.fault == Fault::error) throw Error(ErrorKind::device, "the device is gone");
    released.wait();
  }
};

/// A GPU, on rank 1 one that fails.
class FaultyBackend final : public cli::StepRecorder {
 public:
  FaultyBackend(std::unique_ptr<Backend> ops, std::shared_ptr<Scene> scene, int rank)
      : StepRecorder(std::move(ops)), scene_(std::move(scene)), fails_(rank == 1) {}

  void load(Tensor dst, std::span<const Tensor> parts) override {
    fail_in(Phase::load);
    StepRecorder::load(dst, parts);
  }
  void load_all(std::span<const WeightSource> weights, const SourceReader& read,
                const std::function<void(size_t)>& loaded) override {
    fail_in(Phase::load);
    StepRecorder::load_all(weights, read, loaded);
  }
  void begin_step(const Batch& batch) override {
    fail_in(batch.max_seqlen_q > 1 ? Phase::prefill : Phase::eager_decode);
    StepRecorder::begin_step(batch);
  }
  // A recorded step still copies its input.
  void copy(Tensor dst, Tensor src) override {
    if (scene_->decodes) fail_in(Phase::recorded_decode);
    StepRecorder::copy(dst, src);
  }

 private:
  void fail_in(Phase phase) {
    if (fails_ && phase == scene_->now.phase) scene_->fail();
  }

  const std::shared_ptr<Scene> scene_;
  const bool fails_;
};

size_t free_bytes() { return make_backend("cuda:1", {})->memory().free; }

/// Loads a model of random weights and answers a prompt.
void run(const std::shared_ptr<Scene>& scene) {
  ModelConfig model = load_model_config(
      std::string(NANOVLLM_SOURCE_DIR) + "/bench/configs/qwen3-0.6b", config_defaults);
  model.num_hidden_layers = 2;
  EngineConfig config;
  config.num_gpu_blocks_override = 64;
  config.max_model_len = 512;
  RankLimits limits;
  limits.peer = 1500ms;
  limits.step = 3s;
  limits.load = 3s;
  auto group = std::make_unique<RankGroup>(
      2,
      [&](int rank) {
        return std::make_unique<FaultyBackend>(make_backend(fmt::format("cuda:{}", rank), {}),
                                               scene, rank);
      },
      model, config, limits);
  group->load(nullptr, 3, {});
  LLMEngine engine(std::move(group), model, config, nullptr, std::vector<int32_t>{});
  SamplingParams params{.temperature = 0, .max_tokens = 100};
  params.ignore_eos = true;
  engine.add_request({1, 2, 3, 4, 5}, params);
  for (size_t tokens = 0; !engine.is_finished();)
    for (const RequestOutput& output : engine.step())
      if ((tokens += output.outputs[0].token_ids.size()) > 20) scene->decodes = true;
}

class CudaFault : public testing::TestWithParam<Case> {};

TEST_P(CudaFault, EndsTheGroupInTimeAndIsNamed) {
  try {
    free_bytes();
  } catch (const Error&) {
    GTEST_SKIP() << "no two cuda devices here";
  }
  const size_t before = free_bytes();
  const auto scene = std::make_shared<Scene>();
  scene->now = GetParam();
  const auto begin = Clock::now();
  try {
    run(scene);
    ADD_FAILURE() << "it should have failed";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("rank 1 of 2"), std::string::npos) << message;
    EXPECT_NE(message.find(scene->now.fault == Fault::error ? "the device is gone" : "hangs"),
              std::string::npos)
        << message;
  }
  EXPECT_LT(Clock::now() - begin, 10s);
  scene->released.open();
  // A rank that hung leaves when it can.
  constexpr size_t kSlack = size_t{64} << 20;
  while (free_bytes() + kSlack < before && Clock::now() - begin < 15s)
    std::this_thread::sleep_for(100ms);
  EXPECT_GT(free_bytes() + kSlack, before);
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const char* phases[] = {"Load", "Prefill", "EagerDecode", "RecordedDecode"};
  return std::string(info.param.fault == Fault::error ? "Error" : "Hang") + "In" +
         phases[static_cast<int>(info.param.phase)];
}

INSTANTIATE_TEST_SUITE_P(All, CudaFault, testing::ValuesIn([] {
                           std::vector<Case> cases;
                           for (const Fault fault : {Fault::error, Fault::hang})
                             for (const Phase phase : {Phase::load, Phase::prefill,
                                                       Phase::eager_decode, Phase::recorded_decode})
                               cases.push_back({fault, phase});
                           return cases;
                         }()),
                         case_name);

}  // namespace
}  // namespace nanovllm
