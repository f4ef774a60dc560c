// From a configuration to a runner with its weights, on however many ranks: opens the devices of
// this process's ranks, and joins what mpirun started.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "nanovllm/llm.h"

#include "comm/process_group.h"
#include "core/seconds.h"
#include "engine/runner.h"
#include "ops/backend.h"

namespace nanovllm {

class Checkpoint;
struct ModelConfig;

/// When each part of a start began and ended; parts run on several threads.
class PhaseLog {
 public:
  /// body(), timed.
  template <class Body>
  auto run(const char* name, Body&& body) {
    const double begin = now();
    const auto add = [&] {
      const std::lock_guard lock(mutex_);
      phases_.push_back({name, begin, now()});
    };
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      add();
    } else {
      auto result = body();
      add();
      return result;
    }
  }
  std::vector<StartupPhase> phases() const { return phases_; }

 private:
  double now() const { return seconds_since(start_); }
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::vector<StartupPhase> phases_;
};

/// Puts something between the engine and its device, such as a recorder of what is asked of it.
/// Each of several ranks calls it, on a thread of its own.
using BackendDecorator = std::function<std::unique_ptr<Backend>(std::unique_ptr<Backend>)>;

/// A runner with its weights, and what there is to say about each of its ranks.
struct LoadedRunner {
  std::unique_ptr<Runner> runner;
  std::vector<RankInfo> ranks;
};

/// Devices that open while the caller does other things. What the constructor is given must outlive
/// it.
class RunnerLoader {
 public:
  /// Waits for the other processes where mpirun started some. Throws Error(invalid_argument) where
  /// they are not as many as the ranks.
  RunnerLoader(const ModelConfig& model, const EngineConfig& config, PhaseLog& log);

  /// The first device of this process; `note` says how it was chosen. Throws Error(device).
  const Backend& wait_for_device(std::string& note);
  /// Once, after that. `checkpoint` is null for dummy weights.
  LoadedRunner load(const std::shared_ptr<const Checkpoint>& checkpoint,
                    const BackendDecorator& decorate);

 private:
  using OpeningDevice = std::future<std::unique_ptr<Backend>>;
  LoadedRunner load_processes(const std::shared_ptr<const Checkpoint>& checkpoint,
                              const LoadProgress& progress);
  LoadedRunner load_group(const std::shared_ptr<const Checkpoint>& checkpoint,
                          const BackendDecorator& decorate, const LoadProgress& progress);

  const ModelConfig& model_;
  const EngineConfig& config_;
  PhaseLog& log_;
  std::unique_ptr<ProcessGroup> processes_;  // null: all ranks are of this process
  std::string note_;
  OpeningDevice opening_;
  std::vector<OpeningDevice> others_;  // GPUs of ranks 1, 2, ... of this process
  std::unique_ptr<Backend> first_;
};

RankInfo rank_info(const std::string& device, const MemoryPlan& plan);

/// Under mpirun, on ranks other than 0: loads this rank's shard and runs rank 0's steps until its
/// engine is gone. False, at once, on rank 0 and where mpirun did not start this process.
bool serve_engine_rank(const std::string& directory, const EngineConfig& config);

}  // namespace nanovllm
