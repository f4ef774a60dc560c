// ModelRunner: one rank. Owns the device, the weights, the KV cache and the step's memory; runs one
// plan at a time.
#pragma once

#include <memory>
#include <vector>

#include "nanovllm/params.h"

#include "engine/memory_plan.h"
#include "layers/rotary_embedding.h"
#include "layers/sampler.h"

namespace nanovllm {

class Checkpoint;

/// The results of one step, on the host; valid until the next launch().
struct StepResult {
  std::span<const int32_t>
      sampled;  // one per sampling sequence, in plan order; -1: its logits were not finite
  // Log probabilities of all rows (sampling ones first), `width` candidates each, the chosen token
  // first; empty if none were asked for.
  std::span<const int32_t> ids, ranks;
  std::span<const float> logprobs;
  int64_t width = 0;
};

class ModelRunner {
 public:
  /// Allocates everything that will ever be allocated. Weights are undefined until load().
  ModelRunner(std::unique_ptr<Backend> backend, std::unique_ptr<Communicator> comm,
              const ModelConfig& model, const EngineConfig& config);

  /// `checkpoint` null: random weights.
  void load(const Checkpoint* checkpoint, uint64_t seed, const LoadProgress& progress);

  /// Issues one step; returns as soon as the device has its work.
  void launch(const Plan& plan);
  /// Waits for the step that was launched, and gives its results.
  StepResult wait();

  const MemoryPlan& memory() const { return plan_; }
  const StepInput& input() const { return input_; }  ///< of the step that was launched last
  Backend& backend() { return *backend_; }
  double build_seconds() const { return build_seconds_; }

 private:
  void run_step();

  // In order of construction; destroyed in reverse: what lives on the device goes before the
  // device.
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Communicator> comm_;
  const ModelConfig model_config_;
  const DType dtype_;
  const MemoryPlan plan_;
  RotaryEmbedding rope_;
  Buffer weights_, kv_, workspace_, input_host_, input_device_, output_host_, output_device_;
  WeightLoader loader_;
  std::unique_ptr<Model> model_;
  std::vector<KvCache> kv_cache_;
  Arena arena_;
  BatchBuilder builder_;
  StepInput input_;
  SamplerOutput output_;  // on the device
  Tensor output_bytes_;   // what of the output block comes back
  Sampler sampler_;
  double build_seconds_ = 0;
};

}  // namespace nanovllm
