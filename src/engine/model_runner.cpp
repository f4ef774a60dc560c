#include "engine/model_runner.h"

#include <chrono>
#include <cstring>
#include <functional>

#include "core/seconds.h"
#include "io/safetensors/checkpoint.h"
#include "layers/linear.h"
#include "weights/kv_cache.h"

namespace nanovllm {
namespace {

Shard shard_of(const Communicator& comm) { return {comm.rank(), comm.world_size()}; }

}  // namespace

ModelRunner::ModelRunner(std::unique_ptr<Backend> backend, std::unique_ptr<Communicator> comm,
                         const ModelConfig& model, const EngineConfig& config,
                         const std::optional<MemoryPlan>& plan)
    : backend_(std::move(backend)),
      comm_(std::move(comm)),
      model_config_(model),
      dtype_(compute_dtype(model, config)),
      plan_(plan ? *plan : plan_memory(*backend_, model, config, dtype_, shard_of(*comm_))),
      rope_(*backend_, model.rope, model.head_dim, plan_.limits.max_model_len),
      weights_(backend_->allocate(plan_.weights)),
      kv_(backend_->allocate(plan_.kv_cache())),
      workspace_(backend_->allocate(plan_.step_workspace)),
      input_device_(backend_->allocate(BatchBuilder(plan_.limits).max_bytes())),
      output_device_(backend_->allocate(output_block_bytes(plan_.limits))),
      masks_device_(backend_->allocate(plan_.limits.token_mask_bytes())),
      token_masks_(masks_device_.get(), DType::i32,
                   {plan_.limits.max_samples(), plan_.limits.token_mask_words}, backend_->device()),
      loader_(*backend_, dtype_, shard_of(*comm_), weights_.get(),
              model_config_.quantization.get()),
      model_(find_architecture(model.architecture).make(model, {loader_, rope_.cos_sin()})),
      arena_(workspace_.get(), plan_.step_workspace, backend_->device()),
      builder_(plan_.limits),
      masks_(plan_.limits),
      use_graphs_(!config.enforce_eager && backend_->has_graphs()),
      micro_batches_(config.decode_micro_batches),
      graphs_(*backend_, *comm_) {
  for (Slot& slot : slots_) {
    slot.input_host = backend_->allocate_host(BatchBuilder(plan_.limits).max_bytes());
    slot.output_host = backend_->allocate_host(output_block_bytes(plan_.limits));
    slot.masks_host = backend_->allocate_host(plan_.limits.token_mask_bytes());
    slot.done = backend_->make_fence();
  }
  if (use_graphs_) below_block_.resize(builder_.max_bytes());
  backend_->reserve(plan_.operands);
  // One layer's blocks lie together: [layer][k or v][block, kv_head, offset, head_dim].
  const int64_t kv_heads = kv_heads_per_rank(model.num_key_value_heads, comm_->world_size());
  std::byte* data = kv_.get();
  const auto next_pages = [&] {
    const Tensor t = kv_pages(data, plan_.cache_dtype,
                              {plan_.num_blocks, kv_heads, config.block_size, model.head_dim},
                              backend_->device());
    data += static_cast<size_t>(t.shape[0] * t.stride[0]) * size_of(t.dtype);
    return t;
  };
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer)
    kv_cache_.push_back({next_pages(), next_pages()});  // in this order
  slot_tokens_ =
      Tensor(data, DType::i32, {plan_.num_blocks, config.block_size}, backend_->device());
}

ModelRunner::~ModelRunner() {
  // Steps in flight still use the memory that goes now. A destructor has no caller for an error.
  try {
    backend_->synchronize();
  } catch (const std::exception&) {
  }
}

void ModelRunner::load(const Checkpoint* checkpoint, uint64_t seed, const LoadProgress& progress) {
  if (!checkpoint) return loader_.load_dummy(seed, progress);
  const int64_t kv_heads = model_config_.num_key_value_heads;
  kv_scales_ = load_kv_scales(*backend_, *checkpoint, model_config_.quantization.get(), kv_heads,
                              first_kv_head(kv_heads, shard_of(*comm_)), kv_cache_);
  loader_.load(*checkpoint, progress);
}

void ModelRunner::launch(const Plan& plan) {
  Slot& slot = next_slot();
  const auto begin = std::chrono::steady_clock::now();
  const auto shape = use_graphs_ ? decode_shape(plan, plan_.limits) : std::optional<StepShape>();
  builder_.build(plan, slot.input_host.get(), slot.input, shape);
  build_seconds_ += seconds_since(begin);
  launch_built(slot);
}

void ModelRunner::launch(const StepInput& input, const std::byte* block) {
  Slot& slot = next_slot();
  copy_step(input, block, slot.input, slot.input_host.get());
  launch_built(slot);
}

ModelRunner::Slot& ModelRunner::next_slot() {
  check(num_launched_ - num_waited_ < max_steps_in_flight(), "{} steps are in flight already",
        num_launched_ - num_waited_);
  return slots_[static_cast<size_t>(num_launched_++ % kSlots)];
}

void ModelRunner::launch_built(Slot& slot) {
  const auto words = static_cast<int64_t>(slot.input.bytes / sizeof(int32_t));
  backend_->copy(Tensor(input_device_.get(), DType::i32, {words}, backend_->device()),
                 Tensor(slot.input_host.get(), DType::i32, {words}));
  move_to(slot.input, slot.input_host.get(), input_device_.get(), backend_->device());
  place_output(slot);
  slot.is_issued = false;
  issue(slot, slot.input.num_token_masks > 0 ? StepPart::forward : StepPart::whole);
}

void ModelRunner::finish_launch(const Plan& plan) {
  Slot& slot = slots_[static_cast<size_t>((num_launched_ - 1) % kSlots)];
  const auto begin = std::chrono::steady_clock::now();
  masks_.fill(plan, slot.input, slot.masks_host.get());
  build_seconds_ += seconds_since(begin);
  finish_filled(slot);
}

void ModelRunner::finish_launch(const std::byte* masks) {
  Slot& slot = slots_[static_cast<size_t>((num_launched_ - 1) % kSlots)];
  std::memcpy(slot.masks_host.get(), masks, slot.input.token_mask_bytes(plan_.limits));
  finish_filled(slot);
}

void ModelRunner::finish_filled(Slot& slot) {
  const Tensor masks = token_masks_.rows(0, slot.input.num_token_masks);
  // The step before is done, and the forward pass of this one, which runs, has no use for masks.
  backend_->copy_ahead(masks,
                       Tensor(slot.masks_host.get(), DType::i32, {masks.shape[0], masks.shape[1]}));
  issue(slot, StepPart::sampling);
}

void ModelRunner::issue(Slot& slot, StepPart part) {
  const auto body = [this, &slot, part] { run_step(slot, part); };
  bool replayed = false;
  if (slot.input.is_decode)
    replayed = graphs_.run(slot.input, part, std::ref(body));  // a copy would allocate
  else
    body();
  if (part != StepPart::forward) {
    const int64_t out = slot.output_bytes.numel();
    if (out > 0)
      backend_->copy(Tensor(slot.output_host.get(), DType::i32, {out}), slot.output_bytes);
    if (slot.done) slot.done->record();
    slot.is_issued = true;
  }
  if (replayed) record_below(slot.input, part);
}

// The device is busy with this step and perhaps one before it. That is the time to record the shape
// that comes when sequences end: at its first occurrences, the device might wait for the host.
void ModelRunner::record_below(const StepInput& input, StepPart part) {
  const uint32_t features = input.sampler.params.features;
  const auto shape = shape_below(shape_of(input));
  if (!shape || !graphs_.misses(*shape, features, part)) return;
  // The sampling reads the result of a forward pass of that shape; its place is not known before.
  if (part == StepPart::sampling && !forwarded_.contains(*shape)) return;
  StepInput& below = below_.input;
  builder_.build({}, below_block_.data(), below, shape);
  below.sampler.params.features = features;
  move_to(below, below_block_.data(), input_device_.get(), backend_->device());
  place_output(below_);
  graphs_.record(below, part, [this, part] { run_step(below_, part); });
}

// The sampled tokens come first, at an address that never changes: the next step reads them there.
void ModelRunner::place_output(Slot& slot) {
  Arena arena(output_device_.get(), output_block_bytes(plan_.limits), backend_->device());
  slot.output = take_output(arena, slot.input.num_samples(), slot.input.num_rows(),
                            slot.input.sampler.num_logprobs);
  slot.output_bytes =
      Tensor(output_device_.get(), DType::i32,
             {static_cast<int64_t>(arena.mark() / sizeof(int32_t))}, backend_->device());
}

void ModelRunner::run_step(const Slot& slot, StepPart part) {
  const Step step{*backend_,         *comm_,      arena_,
                  slot.input.batch,  kv_cache_,   micro_batches_,
                  slot.input.halves, slot_tokens_};
  // A replayed forward pass leaves its result where the recorded one noted it.
  Forwarded& forwarded = forwarded_[slot.input.is_decode ? shape_of(slot.input) : StepShape{}];
  if (part != StepPart::sampling) {
    arena_.release(0);
    const Tensor sampled_before(output_device_.get(), DType::i32, {plan_.limits.max_samples()},
                                backend_->device());
    backend_->begin_step(step.batch);
    backend_->feed_tokens(step.batch.tokens, slot.input.token_source, sampled_before,
                          step.batch.slot_mapping, slot_tokens_);
    forwarded.hidden = model_->forward(step);
    forwarded.mark = arena_.mark();
  }
  if (part == StepPart::forward) return;
  arena_.release(forwarded.mark);
  SamplerInput sampling = slot.input.sampler;
  sampling.params.token_masks = token_masks_;
  sampler_.forward(step, model_->lm_head(), model_config_.vocab_size, forwarded.hidden, sampling,
                   slot.output, plan_.limits.max_logits_rows);
}

StepResult ModelRunner::wait() {
  check(num_waited_ < num_launched_, "no step is in flight");
  const Slot& slot = slots_[static_cast<size_t>(num_waited_++ % kSlots)];
  check(slot.is_issued, "the step waits for its token masks");
  if (slot.done) slot.done->wait();
  const auto show = [&]<class T>(std::span<const T>& on_host, const Tensor& t) {
    const std::byte* data = slot.output_host.get() + (t.data - output_device_.get());
    on_host = {reinterpret_cast<const T*>(data), static_cast<size_t>(t.numel())};
  };
  StepResult result;
  result.input = &slot.input;
  show(result.sampled, slot.output.token_ids);
  result.sampled = result.sampled.first(slot.input.sampling.size());  // without padding
  result.width = slot.input.sampler.num_logprobs + 1;
  if (result.width > 0) {
    show(result.ids, slot.output.ids);
    show(result.ranks, slot.output.ranks);
    show(result.logprobs, slot.output.logprobs);
  }
  return result;
}

}  // namespace nanovllm
