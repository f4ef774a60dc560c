#include "engine/model_runner.h"

#include <chrono>

#include "io/checkpoint.h"
#include "layers/linear.h"

namespace nanovllm {
namespace {

Shard shard_of(const Communicator& comm) { return {comm.rank(), comm.world_size()}; }

}  // namespace

ModelRunner::ModelRunner(std::unique_ptr<Backend> backend, std::unique_ptr<Communicator> comm,
                         const ModelConfig& model, const EngineConfig& config)
    : backend_(std::move(backend)),
      comm_(std::move(comm)),
      model_config_(model),
      dtype_(compute_dtype(model, config)),
      plan_(plan_memory(*backend_, model, config, dtype_, shard_of(*comm_))),
      rope_(*backend_, model.rope, model.head_dim, plan_.limits.max_model_len),
      weights_(backend_->allocate(plan_.weights)),
      kv_(backend_->allocate(plan_.kv_cache())),
      workspace_(backend_->allocate(plan_.step_workspace)),
      input_host_(backend_->allocate_host(BatchBuilder(plan_.limits).max_bytes())),
      input_device_(backend_->allocate(BatchBuilder(plan_.limits).max_bytes())),
      output_host_(backend_->allocate_host(output_block_bytes(plan_.limits))),
      output_device_(backend_->allocate(output_block_bytes(plan_.limits))),
      loader_(*backend_, dtype_, shard_of(*comm_), weights_.get()),
      model_(find_architecture(model).make(model, {loader_, rope_.cos_sin()})),
      arena_(workspace_.get(), plan_.step_workspace, backend_->device()),
      builder_(plan_.limits) {
  // One layer's blocks lie together: [layer][k or v][block, kv_head, offset, head_dim].
  const int64_t kv_heads = kv_heads_per_rank(model.num_key_value_heads, comm_->world_size());
  const size_t half = plan_.kv_cache() / static_cast<size_t>(2 * model.num_hidden_layers);
  std::byte* data = kv_.get();
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer, data += 2 * half) {
    const auto view = [&](std::byte* bytes) {
      return Tensor(bytes, dtype_, {plan_.num_blocks, kv_heads, config.block_size, model.head_dim},
                    backend_->device());
    };
    kv_cache_.push_back({view(data), view(data + half)});
  }
}

void ModelRunner::load(const Checkpoint* checkpoint, uint64_t seed, const LoadProgress& progress) {
  if (checkpoint)
    loader_.load(*checkpoint, progress);
  else
    loader_.load_dummy(seed, progress);
}

void ModelRunner::launch(const Plan& plan) {
  const auto begin = std::chrono::steady_clock::now();
  builder_.build(plan, input_host_.get(), input_);
  build_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  launch_built();
}

void ModelRunner::launch(const StepInput& input, const std::byte* block) {
  copy_step(input, block, input_, input_host_.get());
  launch_built();
}

void ModelRunner::launch_built() {
  const auto bytes = static_cast<int64_t>(input_.bytes / sizeof(int32_t));
  backend_->copy(Tensor(input_device_.get(), DType::i32, {bytes}, backend_->device()),
                 Tensor(input_host_.get(), DType::i32, {bytes}));
  move_to(input_, input_host_.get(), input_device_.get(), backend_->device());
  run_step();
  const auto out = static_cast<int64_t>(output_bytes_.bytes() / sizeof(int32_t));
  if (out > 0) backend_->copy(Tensor(output_host_.get(), DType::i32, {out}), output_bytes_);
}

void ModelRunner::run_step() {
  arena_.release(0);
  const Step step{*backend_, *comm_, arena_, input_.batch, kv_cache_};
  Arena output(output_device_.get(), output_block_bytes(plan_.limits), backend_->device());
  const int64_t rows = input_.num_rows(), width = input_.sampler.num_logprobs + 1;
  output_.token_ids = output.take(DType::i32, {input_.num_samples()});
  if (width > 0) {
    output_.ids = output.take(DType::i32, {rows, width});
    output_.logprobs = output.take(DType::f32, {rows, width});
    output_.ranks = output.take(DType::i32, {rows});
  }
  output_bytes_ =
      Tensor(output_device_.get(), DType::i32,
             {static_cast<int64_t>(output.mark() / sizeof(int32_t))}, backend_->device());
  const Tensor hidden = model_->forward(step);
  sampler_.forward(step, model_->lm_head(), model_config_.vocab_size, hidden, input_.sampler,
                   output_, plan_.limits.max_logits_rows);
}

StepResult ModelRunner::wait() {
  backend_->synchronize();
  const auto on_host = [&]<class T>(const Tensor& t, T*) {
    return std::span<const T>(
        reinterpret_cast<const T*>(output_host_.get() + (t.data - output_device_.get())),
        static_cast<size_t>(t.numel()));
  };
  StepResult result;
  result.input = &input_;
  result.sampled = on_host(output_.token_ids, static_cast<int32_t*>(nullptr));
  result.width = input_.sampler.num_logprobs + 1;
  if (result.width > 0) {
    result.ids = on_host(output_.ids, static_cast<int32_t*>(nullptr));
    result.ranks = on_host(output_.ranks, static_cast<int32_t*>(nullptr));
    result.logprobs = on_host(output_.logprobs, static_cast<float*>(nullptr));
  }
  return result;
}

}  // namespace nanovllm
