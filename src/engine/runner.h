// Runner: what the engine asks of its devices: of one (ModelRunner), or of several ranks of tensor
// parallelism (RankGroup).
#pragma once

#include <span>
#include <string>

#include "engine/memory_plan.h"
#include "engine/scheduler/scheduler.h"

namespace nanovllm {

/// The results of one step, on the host; valid until launch() or wait() is called again.
struct StepResult {
  const StepInput* input = nullptr;  // what the rows below belong to
  // One per sampling sequence, in the plan's order; -1: its logits were not finite.
  std::span<const int32_t> sampled;
  // Log probabilities of all rows (sampling ones first), `width` candidates each, the chosen token
  // first; empty if none were asked for.
  std::span<const int32_t> ids, ranks;
  std::span<const float> logprobs;
  int64_t width = 0;
};

/// Belongs to one thread. Anything thrown is final: the runner can only be destroyed then.
class Runner {
 public:
  virtual ~Runner() = default;
  /// How many steps may be launched and not waited for: 2 where the host can prepare one while the
  /// devices run another.
  virtual int max_steps_in_flight() const = 0;
  /// Issues one step; returns as soon as the devices have their work. `plan` is not kept. Where
  /// plan.needs_masks(), only the forward pass is issued: finish_launch() must follow, before
  /// anything else but wait() for the step before it.
  virtual void launch(const Plan& plan) = 0;
  /// Makes the token masks of the step that was launched last, and issues its sampling. The tokens
  /// of all steps before it have been processed. `plan` is that step's.
  virtual void finish_launch(const Plan& plan) = 0;
  /// Waits for the oldest step that was launched and not waited for, and gives its results.
  virtual StepResult wait() = 0;

  virtual const MemoryPlan& memory() const = 0;  ///< of one rank
  virtual std::string device_name() const = 0;
  virtual double build_seconds() const = 0;  ///< spent so far on turning plans into batches
};

}  // namespace nanovllm
