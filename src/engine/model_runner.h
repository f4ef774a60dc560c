// ModelRunner: one rank. Owns the device, the weights, the KV cache and the step's memory; runs one
// plan at a time.
#pragma once

#include <memory>
#include <vector>

#include "nanovllm/params.h"

#include "engine/runner.h"
#include "layers/rotary_embedding.h"
#include "layers/sampler.h"

namespace nanovllm {

class Checkpoint;

class ModelRunner final : public Runner {
 public:
  /// Allocates everything that will ever be allocated. Weights are undefined until load().
  ModelRunner(std::unique_ptr<Backend> backend, std::unique_ptr<Communicator> comm,
              const ModelConfig& model, const EngineConfig& config);

  /// `checkpoint` null: random weights.
  void load(const Checkpoint* checkpoint, uint64_t seed, const LoadProgress& progress);

  void launch(const Plan& plan) override;
  /// The same for a step that another rank has built: `input` lies in `block`. Both are copied.
  void launch(const StepInput& input, const std::byte* block);
  StepResult wait() override;

  const MemoryPlan& memory() const override { return plan_; }
  std::string device_name() const override { return backend_->name(); }
  double build_seconds() const override { return build_seconds_; }
  Backend& backend() { return *backend_; }

 private:
  void launch_built();
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
