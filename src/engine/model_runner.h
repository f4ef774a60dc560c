// ModelRunner: one rank. Owns the device, the weights, the KV cache and the steps' memory.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "nanovllm/params.h"

#include "engine/runner.h"
#include "engine/step_graphs.h"
#include "engine/token_masks.h"
#include "layers/rotary_embedding.h"
#include "layers/sampler.h"

namespace nanovllm {

class Checkpoint;

class ModelRunner final : public Runner {
 public:
  /// Allocates everything that will ever be allocated. Weights are undefined until load(). `plan`:
  /// what ranks have agreed upon; by default, this rank's own.
  ModelRunner(std::unique_ptr<Backend> backend, std::unique_ptr<Communicator> comm,
              const ModelConfig& model, const EngineConfig& config,
              const std::optional<MemoryPlan>& plan = {});
  ~ModelRunner() override;

  /// `checkpoint` null: random weights.
  void load(const Checkpoint* checkpoint, uint64_t seed, const LoadProgress& progress);

  int max_steps_in_flight() const override { return backend_->is_asynchronous() ? kSlots : 1; }
  /// Whether steps of decodes are padded to few sizes, for graphs.
  bool uses_graphs() const { return use_graphs_; }
  void launch(const Plan& plan) override;
  /// The same for a step that another rank has built: `input` lies in `block`. Both are copied.
  void launch(const StepInput& input, const std::byte* block);
  void finish_launch(const Plan& plan) override;
  /// The same with masks that another rank has filled; they are copied.
  void finish_launch(const std::byte* masks);
  StepResult wait() override;

  const MemoryPlan& memory() const override { return plan_; }
  std::string device_name() const override { return backend_->name(); }
  double build_seconds() const override { return build_seconds_; }
  Backend& backend() { return *backend_; }
  Communicator& communicator() { return *comm_; }

 private:
  static constexpr int kSlots = 2;
  /// A step in flight: its side of the memory on the host, and where its results are on the device.
  /// The device's side is one for all: steps run one after another.
  struct Slot {
    Buffer input_host, output_host, masks_host;
    StepInput input;
    SamplerOutput output;         // on the device
    Tensor output_bytes;          // the part of the output block that comes back
    std::unique_ptr<Fence> done;  // null: done when launched
    bool is_issued = false;       // its sampling, too, not only its forward pass
  };

  /// A forward pass's result in the arena, and the memory taken there.
  struct Forwarded {
    HiddenStates hidden;
    size_t mark = 0;
  };

  Slot& next_slot();
  void launch_built(Slot& slot);
  void finish_filled(Slot& slot);
  void issue(Slot& slot, StepPart part);
  void record_below(const StepInput& input, StepPart part);
  void place_output(Slot& slot);
  void run_step(const Slot& slot, StepPart part);

  // In order of construction; destroyed in reverse: what lives on the device goes before the
  // device.
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Communicator> comm_;
  const ModelConfig model_config_;
  const DType dtype_;
  const MemoryPlan plan_;
  RotaryEmbedding rope_;
  Buffer weights_, kv_, kv_scales_, workspace_, input_device_, output_device_, masks_device_;
  const Tensor token_masks_;
  WeightLoader loader_;
  std::unique_ptr<Model> model_;
  std::vector<KvCache> kv_cache_;
  Tensor slot_tokens_;  // of Step
  Arena arena_;
  BatchBuilder builder_;
  TokenMasks masks_;
  Sampler sampler_;
  const bool use_graphs_;
  const int micro_batches_;
  std::map<StepShape, Forwarded> forwarded_;  // of steps that are not padded: {}
  StepGraphs graphs_;
  std::array<Slot, kSlots> slots_;
  Slot below_;  // a step that is recorded, but not run
  std::vector<std::byte> below_block_;
  int64_t num_launched_ = 0, num_waited_ = 0;  // steps
  double build_seconds_ = 0;
};

}  // namespace nanovllm
