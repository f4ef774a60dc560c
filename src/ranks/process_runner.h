// ProcessRunner: tensor parallelism over processes, which mpirun starts on one host or several.
// Every process has one rank. Rank 0 schedules and broadcasts each step's batch; the others serve.
//
// Faults. A rank that throws ends its process without taking leave, and mpirun then ends the
// others; a rank that is missing in a collective for 8 seconds, or that the others' GPUs wait for,
// has the same effect. So has one that is missing for 30 seconds while devices are opened, or long
// after the others have loaded their weights; and one of this host that is stopped for 6 seconds,
// at the start, between steps or at the end.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "engine/model_runner.h"
#include "ranks/process_wait.h"

namespace nanovllm {

/// How long ranks wait for each other until each has a device.
inline constexpr std::chrono::milliseconds kOpenPatience{30'000};

class ProcessRunner final : public Runner {
 public:
  /// `runner` is this process's rank. See make_process_runner().
  ProcessRunner(std::unique_ptr<ProcessGroup> group, std::unique_ptr<ModelRunner> runner);
  /// On rank 0: tells the others that it is over.
  ~ProcessRunner() override;

  void load(const Checkpoint* checkpoint, uint64_t seed, const LoadProgress& progress);
  /// On the other ranks: runs rank 0's steps until it is over.
  void serve();

  int max_steps_in_flight() const override { return runner_->max_steps_in_flight(); }
  void launch(const Plan& plan) override;
  void finish_launch(const Plan& plan) override;
  StepResult wait() override;

  const MemoryPlan& memory() const override { return runner_->memory(); }
  std::string device_name() const override;
  double build_seconds() const override { return build_seconds_; }

 private:
  std::string describe_wait() const;
  void send(int64_t length);
  void launch_built();
  void finish_filled();
  void guarded(const std::function<void()>& body);
  StepResult finish_step();

  std::unique_ptr<ProcessGroup> group_;
  // Both run while a device is waited for, or is given work, which may wait, too; null where no
  // device works on its own. alarm_ ends the wait. last_alarm_, which outlives the runner, ends the
  // process where that did not help.
  std::unique_ptr<AlarmClock> last_alarm_;
  std::unique_ptr<ModelRunner> runner_;
  std::vector<std::byte> block_, message_;
  StepInput input_;
  TokenMasks masks_;
  int num_in_flight_ = 0;
  std::unique_ptr<AlarmClock> alarm_;
  bool failed_ = false;  // then this process's end shall end the others
  double build_seconds_ = 0;
};

/// This process's rank, with its memory but no weights yet. Collective, like load() later. All
/// ranks get the KV blocks that the poorest has room for.
std::unique_ptr<ProcessRunner> make_process_runner(std::unique_ptr<ProcessGroup> group,
                                                   std::unique_ptr<Backend> backend,
                                                   const ModelConfig& model,
                                                   const EngineConfig& config);

/// A step and its block as bytes for another process of this program, and back. `block` has room
/// for any step.
void pack_step(const StepInput& input, const std::byte* block, std::vector<std::byte>& message);
void unpack_step(std::span<const std::byte> message, StepInput& input, std::byte* block);

}  // namespace nanovllm
