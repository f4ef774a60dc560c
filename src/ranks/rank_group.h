// RankGroup: tensor parallelism over the devices of one host. N ranks, each a thread with a
// ModelRunner and a communicator of its own, behind the interface of one.
//
// The caller's thread schedules and builds the batch; every rank copies it, runs it, and samples
// from gathered logits, so that all of them come to the same tokens. Rank 0's results are the
// group's.
//
// Faults. The first rank that throws, or that keeps the others waiting too long, stops the group:
// every later call throws Error with that rank and its cause, and the ranks leave
// together and give their memory back. Threads cannot be killed: one that hangs for good keeps what
// the ranks hold until it returns, but no other thread waits for it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/thread_group.h"
#include "engine/model_runner.h"
#include "ranks/device_turn.h"

namespace nanovllm {

/// A rank that takes longer than this counts as hung.
struct RankLimits {
  std::chrono::milliseconds peer{8'000};   // one rank keeps the others waiting, in a step
  std::chrono::milliseconds step{9'000};   // a whole step, on devices that run on their own
  std::chrono::milliseconds load{60'000};  // no progress while a device is opened or loaded
  std::chrono::milliseconds leave{2'000};  // for the threads of a group that is destroyed
};

class RankGroup final : public Runner {
 public:
  /// Called on the rank's thread.
  using OpenBackend = std::function<std::unique_ptr<Backend>(int rank)>;

  /// Opens all devices and allocates what will ever be allocated. All ranks get the KV blocks that
  /// the poorest has room for.
  RankGroup(int world_size, const OpenBackend& open, const ModelConfig& model,
            const EngineConfig& config, const RankLimits& limits = {});
  ~RankGroup() override;

  /// Every rank loads its shard, all at once. `checkpoint` null: random weights. `progress` is
  /// called on this thread.
  void load(const std::shared_ptr<const Checkpoint>& checkpoint, uint64_t seed,
            const LoadProgress& progress);

  int max_steps_in_flight() const override { return max_steps_in_flight_; }
  void launch(const Plan& plan) override;
  void finish_launch(const Plan& plan) override;
  StepResult wait() override;

  const MemoryPlan& memory() const override { return memory(0); }
  const MemoryPlan& memory(int rank) const;
  std::string device_name() const override;
  std::string device_name(int rank) const;
  double build_seconds() const override { return build_seconds_; }

 private:
  struct Rank;
  struct State;
  using Job = std::function<void(Rank&)>;
  /// Called now and then while ranks are waited for, with those that are not done. May fail the
  /// group.
  using Watch = std::function<void(const std::vector<int>& missing)>;

  static void run_rank(const std::shared_ptr<State>& state, Rank& rank);
  /// Has all ranks run `job`, after what they were given before.
  void post(const Job& job);
  /// Waits until every rank has done all it was given; throws the group's failure.
  void finish(const Watch& watch);
  Watch watch_progress(const LoadProgress& progress);
  Watch watch_step();
  /// The rank that has done the fewest jobs; none if all have done as many.
  std::optional<int> last_of_ranks() const;
  void fail_hung(int rank, std::string cause);
  void start(const OpenBackend& open, const ModelConfig& model, const EngineConfig& config);
  void stop();
  /// Returns when the ranks' devices have nothing to do, or the group has failed.
  void drain();

  const RankLimits limits_;
  std::shared_ptr<State> state_;  // shared with the threads
  int max_steps_in_flight_ = 1;
  bool uses_graphs_ = false;
  int64_t num_posted_ = 0, num_built_ = 0;  // jobs, steps
  std::optional<TokenMasks> masks_;
  double build_seconds_ = 0;
  DeviceTurn turn_;
};

}  // namespace nanovllm
