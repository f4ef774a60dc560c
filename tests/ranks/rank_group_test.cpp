// RankGroup over devices that fail on command: whatever one rank does, at whatever point, the
// caller hears of it in time, in one message that names the rank and the cause; then all threads
// end and the memory is given back.
#include "ranks/rank_group.h"

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include <gtest/gtest.h>

#include "engine/gate.h"
#include "engine/llm_engine.h"
#include "ops/null_backend.h"
#include "unit/one_thread.h"

namespace nanovllm {
namespace {

using namespace std::chrono_literals;

enum class Fault { none, error, other_exception, hang, slow };
enum class Phase { open, load, prefill, decode };

constexpr auto kForever = 900s;  // longer than a test may take

/// The state that all ranks' devices of a test share.
struct Scene {
  Fault fault = Fault::none;
  Phase phase = Phase::open;
  int rank = 1;
  std::atomic<int64_t> bytes = 0;      // allocated and not given back
  std::atomic<int> devices = 0;        // open
  std::atomic<int> loads = 0;          // of weights, on the rank with the fault
  Gate released;                       // hung devices go on
  std::chrono::milliseconds delay{0};  // of a slow one, each time

  void at(Phase now, int who) {
    if (who != rank || now != phase) return;
    if (fault == Fault::error) throw Error(ErrorKind::device, "the device is gone");
    if (fault == Fault::other_exception) throw 42;
    if (phase == Phase::load) ++loads;
    if (fault == Fault::slow) std::this_thread::sleep_for(delay);
    if (fault == Fault::hang) released.wait();
  }
};

/// Host memory, no arithmetic; token 1 always.
class FaultyBackend : public NullBackend {
 public:
  FaultyBackend(std::shared_ptr<Scene> scene, int rank) : scene_(std::move(scene)), rank_(rank) {
    ++scene_->devices;
    try {
      scene_->at(Phase::open, rank_);
    } catch (...) {
      --scene_->devices;
      throw;
    }
  }
  ~FaultyBackend() override { --scene_->devices; }

  std::string name() const override { return fmt::format("device {}", rank_); }
  // Rank 1 is the poorest.
  MemoryInfo memory() const override {
    const size_t size = size_t{rank_ == 1 ? 16u : 32u} << 20;
    return {size, size};
  }
  Buffer allocate(size_t bytes) override {
    scene_->bytes += static_cast<int64_t>(bytes);
    return {new std::byte[bytes](), [scene = scene_, bytes](std::byte* data) {
              scene->bytes -= static_cast<int64_t>(bytes);
              delete[] data;
            }};
  }
  Buffer allocate_host(size_t bytes) override { return allocate(bytes); }
  void copy(Tensor dst, Tensor src) override { std::memcpy(dst.data, src.data, src.bytes()); }
  int64_t max_logits_rows() const override { return 2; }
  void load(Tensor, std::span<const Tensor>) override { scene_->at(Phase::load, rank_); }
  void attention(Tensor, Tensor, KvCache, const Batch& batch, float, int64_t) override {
    scene_->at(batch.max_seqlen_q > 1 ? Phase::prefill : Phase::decode, rank_);
  }
  void sample(Tensor token_ids, Tensor, const SamplingBatch&) override {
    for (int64_t i = 0; i < token_ids.shape[0]; ++i) token_ids.ptr<int32_t>()[i] = 1;
  }

 private:
  std::shared_ptr<Scene> scene_;
  int rank_;
};

int64_t threads_of_this_process() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                       std::filesystem::directory_iterator{});
}

/// With what a sanitizer starts for itself when there is a second thread.
int64_t threads_at_rest() {
  std::thread([] {}).join();
  return threads_of_this_process();
}

class RankGroupTest : public testing::Test {
 protected:
  RankGroupTest() {
    model_.architecture = "Qwen3ForCausalLM";
    model_.vocab_size = 101;
    model_.hidden_size = model_.head_dim = 8;
    model_.intermediate_size = 24;
    model_.num_hidden_layers = 2;
    model_.num_attention_heads = model_.num_key_value_heads = 12;
    model_.max_position_embeddings = 64;
    model_.dtype = DType::f32;
    config_.block_size = 8;
    config_.max_num_seqs = 4;
    config_.max_num_batched_tokens = 32;
    config_.skip_tokenizer_init = true;
  }
  std::unique_ptr<RankGroup> make(int world) {
    // Short where a rank will hang; else long enough for a machine that has much else to do.
    const bool hangs = scene_->fault == Fault::hang;
    const bool early = scene_->phase == Phase::open || scene_->phase == Phase::load;
    const auto peer = hangs && !early ? 3s : kForever, load = hangs && early ? 6s : kForever;
    return std::make_unique<RankGroup>(
        world, [scene = scene_](int rank) { return std::make_unique<FaultyBackend>(scene, rank); },
        model_, config_, RankLimits{.peer = peer, .step = kForever, .load = load, .leave = 500ms});
  }
  /// Makes an engine of `world` ranks and has it answer; the error that this ends in, if any.
  std::string run(int world) {
    try {
      auto group = make(world);
      group->load(nullptr, 0, {});
      LLMEngine engine(std::move(group), model_, config_, nullptr, {100});
      SamplingParams params;
      params.max_tokens = 4;
      engine.add_request({1, 2, 3}, params);
      engine.add_request({4, 5}, params);
      while (!engine.is_finished()) engine.step();
    } catch (const Error& error) {
      kind_ = error.kind();
      return error.what();
    }
    return "";
  }
  void expect_all_gone() {
    for (int i = 0; i < 10'000 && threads_of_this_process() > threads_; ++i)
      std::this_thread::sleep_for(10ms);
    EXPECT_LE(threads_of_this_process(), threads_);
    EXPECT_EQ(scene_->devices, 0);
    EXPECT_EQ(scene_->bytes, 0);
  }

  ModelConfig model_;
  EngineConfig config_;
  std::shared_ptr<Scene> scene_ = std::make_shared<Scene>();
  const int64_t threads_ = threads_at_rest();
  std::optional<ErrorKind> kind_;  // of the error that run() ended in
};

TEST_F(RankGroupTest, RanksAnswerTogetherAndLeaveNothingBehind) {
  for (const int world : {2, 4}) {
    EXPECT_EQ(run(world), "");
    expect_all_gone();
  }
}

TEST_F(RankGroupTest, AllRanksGetTheBlocksOfThePoorest) {
  config_.max_num_seqs = 256;
  const auto group = make(2);
  const MemoryPlan &rich = group->memory(0), &poor = group->memory(1);
  EXPECT_EQ(rich.num_blocks, poor.num_blocks);
  EXPECT_LE(poor.weights + poor.workspace + poor.kv_cache(), poor.available);
  EXPECT_GT(poor.weights + poor.workspace + poor.kv_cache() + poor.bytes_per_block, poor.available);
  EXPECT_EQ(rich.available, 2 * poor.available);
  EXPECT_EQ(group->device_name(1), "device 1");
}

struct FaultCase {
  Fault fault;
  Phase phase;
  std::string cause;
};

TEST_F(RankGroupTest, OneRanksFaultStopsTheGroupAndIsNamed) {
  std::vector<FaultCase> cases;
  for (const Phase phase : {Phase::open, Phase::load, Phase::prefill, Phase::decode}) {
    cases.push_back({Fault::error, phase, "rank 1 of 3: the device is gone"});
    cases.push_back(
        {Fault::other_exception, phase, "rank 1 of 3: threw something that is no std::exception"});
    cases.push_back({Fault::hang, phase, "rank 1 of 3: hangs: "});
  }
  for (const FaultCase& c : cases) {
    SCOPED_TRACE(testing::Message()
                 << static_cast<int>(c.fault) << " in " << static_cast<int>(c.phase));
    scene_ = std::make_shared<Scene>();
    scene_->fault = c.fault;
    scene_->phase = c.phase;
    const std::string message = run(3);
    EXPECT_NE(message.find(c.cause), std::string::npos) << message;
    // Before the first step the kind is the rank's own, and so is the program's exit code.
    const bool starts = c.phase == Phase::open || c.phase == Phase::load;
    EXPECT_EQ(kind_, starts && c.fault == Fault::error ? ErrorKind::device : ErrorKind::engine);
    EXPECT_EQ(message.find("rank", message.find("rank") + 1), message.find("ranks")) << message;
    scene_->released.open();
    expect_all_gone();
  }
}

TEST_F(RankGroupTest, ARankThatCannotStartLeavesNoOther) {
  {
    const OneThread limit;
    EXPECT_THROW(make(3), std::system_error);
  }
  for (int i = 0; i < 300 && threads_of_this_process() > threads_; ++i)
    std::this_thread::sleep_for(10ms);
  EXPECT_LE(threads_of_this_process(), threads_);
}

// A rank that hangs may go on at any time after its group is gone.
TEST_F(RankGroupTest, TheMemoryStaysForARankThatHangs) {
  scene_->fault = Fault::hang;
  scene_->phase = Phase::decode;
  EXPECT_NE(run(2), "");
  EXPECT_EQ(scene_->devices, 2);
  EXPECT_GT(scene_->bytes, 0);
  scene_->released.open();
  expect_all_gone();
}

TEST_F(RankGroupTest, TwoGroupsDoNotDisturbEachOther) {
  auto healthy = make(2);
  healthy->load(nullptr, 0, {});
  scene_ = std::make_shared<Scene>();
  scene_->fault = Fault::error;
  scene_->phase = Phase::decode;
  EXPECT_NE(run(2), "");
  LLMEngine engine(std::move(healthy), model_, config_, nullptr, {100});
  SamplingParams params;
  params.max_tokens = 4;
  engine.add_request({1, 2, 3}, params);
  std::vector<RequestOutput> last;
  while (!engine.is_finished()) last = engine.step();
  ASSERT_EQ(last.size(), 1u);
  EXPECT_EQ(last[0].outputs[0].token_ids, (std::vector<int32_t>{1, 1, 1, 1}));
}

TEST_F(RankGroupTest, ProgressCountsAllRanksAndAFailingCallbackEndsTheLoad) {
  auto group = make(2);
  int64_t last = 0, total = 0;
  group->load(nullptr, 0, [&](int64_t done, int64_t all) {
    EXPECT_GE(done, last);
    last = done, total = all;
  });
  EXPECT_EQ(last, total);
  EXPECT_EQ(total, static_cast<int64_t>(group->memory(0).weights + group->memory(1).weights));
  EXPECT_THROW(group->load(nullptr, 0, [](int64_t, int64_t) { throw std::runtime_error("no"); }),
               std::runtime_error);
  group.reset();
  expect_all_gone();
}

// Weights come late, but they come: loading takes longer than a rank may be silent.
TEST_F(RankGroupTest, SlowLoadingWithProgressIsNotHanging) {
  constexpr auto kSilence = 4s;
  scene_->fault = Fault::slow;
  scene_->phase = Phase::load;
  auto group = std::make_unique<RankGroup>(
      2, [scene = scene_](int rank) { return std::make_unique<FaultyBackend>(scene, rank); },
      model_, config_, RankLimits{.load = kSilence});
  group->load(nullptr, 0, {});
  scene_->delay = std::chrono::milliseconds(kSilence + 1s) / scene_->loads.load();
  EXPECT_NO_THROW(group->load(nullptr, 0, {}));
}

}  // namespace
}  // namespace nanovllm
