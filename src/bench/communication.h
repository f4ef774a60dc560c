// How much of a run ranks spend on what they say to each other: the collectives of its steps,
// issued again by themselves when it is over.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "api/load_engine.h"
#include "bench/step_recorder.h"

namespace nanovllm::cli {

/// A recorder for each rank of an engine.
class StepRecorders {
 public:
  /// For load_engine(); this outlives the engine.
  BackendDecorator decorator();
  /// In the order of ranks, once the engine is loaded.
  const std::vector<StepRecorder*>& all();
  /// The backends that record.
  std::vector<Backend*> devices();

 private:
  std::mutex mutex_;
  std::vector<StepRecorder*> recorders_;
};

/// Times the collectives of steps that were run, while the engine is idle.
class CommunicationMeter {
 public:
  struct Reading {
    double seconds = 0;
    int64_t calls = 0;
  };

  explicit CommunicationMeter(StepRecorders& recorders) : recorders_(recorders) {}

  /// Nothing counts that ran before.
  void begin();
  /// The last step that ran, each of its collectives once; the median of `repetitions`.
  Reading last_step(int64_t repetitions);
  /// All steps since begin(): each kind of them timed once in this object's life, times their
  /// number.
  Reading all_steps();

 private:
  double seconds_of(const std::string& kind, int64_t repetitions);

  StepRecorders& recorders_;
  std::map<std::string, double> seconds_;  // of a step of each kind
};

/// The note of reports below such figures.
inline constexpr const char* kCommunicationNote =
    "communication: the collectives of these steps, issued alone on all ranks after the run; sums "
    "within the one kernel of all layers as operations of their own. In the run, other work may "
    "hide them.";

}  // namespace nanovllm::cli
