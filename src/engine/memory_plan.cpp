#include "engine/memory_plan.h"

#include <algorithm>
#include <optional>

#include "nanovllm/params.h"

#include "layers/linear.h"
#include "layers/rotary_embedding.h"
#include "ops/null_backend.h"
#include "weights/kv_cache.h"

namespace nanovllm {
namespace {

constexpr size_t kMostCpuCache = size_t{4} << 30;  // KV cache of all ranks, if none is asked for

size_t aligned(size_t bytes) {
  return (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

std::string size_text(size_t bytes) {
  const auto b = static_cast<double>(bytes);
  return bytes >= (size_t{1} << 30) ? fmt::format("{:9.2f} GiB", b / (1 << 30))
                                    : fmt::format("{:9.2f} MiB", b / (1 << 20));
}

StepLimits limits_of(Backend& ops, const ModelConfig& model, const EngineConfig& config) {
  StepLimits limits;
  const int64_t longest = model.longest_context();
  check(
      config.max_model_len <= longest || config.allow_long_max_model_len,
      ErrorKind::invalid_argument,
      "max_model_len {} is beyond the model's {} positions (config.json: max_position_embeddings); "
      "--allow-long-max-model-len takes it all the same",
      config.max_model_len, longest);
  limits.max_model_len = wanted_max_model_len(model, config);
  limits.max_num_seqs = config.max_num_seqs;
  limits.max_num_batched_tokens = config.max_num_batched_tokens > 0  ? config.max_num_batched_tokens
                                  : ops.device().kind == Device::cpu ? 512
                                                                     : 8192;
  limits.max_logits_rows = ops.max_logits_rows();
  limits.block_size = config.block_size;
  limits.token_mask_words = (model.vocab_size + 31) / 32;
  return limits;
}

OperandLimits operands_of(const ModelConfig& model, const StepLimits& limits, DType dtype,
                          Shard shard) {
  OperandLimits o{.dtype = dtype, .rows = limits.max_num_batched_tokens};
  o.hidden = model.hidden_size;
  o.vocab = model.vocab_size;
  o.head_dim = model.head_dim;
  // Rows of a product; a rank has a part of what lies between the stream's products.
  o.widest = std::max({model.hidden_size, shard.share(model.num_attention_heads) * model.head_dim,
                       shard.share(model.intermediate_size)});
  if (model.moe) {
    o.experts_per_token = model.moe->num_experts_per_tok;
    o.expert_inner = shard.share(model.moe->moe_intermediate_size);
    o.widest = std::max(o.widest, o.expert_inner);
  }
  return o;
}

/// A step of `tokens` rows, `logits_rows` of which need logits; its arrays are shapes alone.
Batch shape_only_batch(int64_t tokens, int64_t logits_rows, int64_t seqs, int64_t blocks) {
  const auto i32 = [](std::initializer_list<int64_t> shape) {
    return Tensor(nullptr, DType::i32, shape);
  };
  Batch batch{i32({tokens}), i32({tokens}),       i32({tokens}),     i32({seqs + 1}),
              i32({seqs}),   i32({seqs, blocks}), i32({logits_rows})};
  batch.max_seqlen_q = tokens;
  batch.max_context_len = tokens;
  return batch;
}

/// The same for as many decodes as one step may have.
Batch shape_only_decodes(const StepLimits& limits) {
  const int64_t rows = limits.max_samples();
  Batch batch = shape_only_batch(rows, rows, rows, limits.max_blocks_per_seq());
  batch.max_seqlen_q = 1;
  batch.num_decodes = rows;
  return batch;
}

/// Peak of the arena in the largest step. That is a step in which all rows need log probabilities
/// (they are gathered before the head), or one in which half of them do (the most for which the
/// last layer leaves the other rows out), or one that runs in micro-batches.
size_t measure_workspace(const Model& model, const ModelConfig& config, const StepLimits& limits,
                         Shard shard) {
  NullBackend ops;
  NullCommunicator comm(shard.rank, shard.world_size);
  Arena arena = Arena::measuring({});
  const std::vector<KvCache> caches(static_cast<size_t>(config.num_hidden_layers));
  const int64_t tokens = limits.max_num_batched_tokens;
  for (const int64_t rows : {tokens, tokens / 2}) {
    arena.release(0);
    const Batch batch =
        shape_only_batch(tokens, rows, limits.max_num_seqs, limits.max_blocks_per_seq());
    const Step step{ops, comm, arena, batch, caches};
    const HiddenStates hidden = model.forward(step);
    const int64_t samples = std::min(limits.max_samples(), rows);
    SamplerInput input;
    input.num_logprobs = 0;
    input.params.features = kSampleLogprobs;
    for (const auto& [tensor, dtype] : input.params.tensors())
      *tensor = Tensor(nullptr, dtype, {samples});
    input.prompt_targets = Tensor(nullptr, DType::i32, {rows - samples});
    Arena outside = Arena::measuring({});
    const SamplerOutput output = take_output(outside, samples, rows, input.num_logprobs);
    Sampler().forward(step, model.lm_head(), config.vocab_size, hidden, input, output,
                      limits.max_logits_rows);
  }
  arena.release(0);
  const Batch decodes = shape_only_decodes(limits);
  (void)model.forward({ops, comm, arena, decodes, caches, kMostMicroBatches});
  return arena.peak();
}

/// `what` names the `blocks` of KV cache that are wanted.
[[noreturn]] void not_enough(const Backend& ops, const MemoryPlan& plan,
                             const std::string& available, const std::string& what, int64_t blocks,
                             bool asked_for) {
  const size_t cache = static_cast<size_t>(blocks) * plan.bytes_per_block;
  const size_t fixed = plan.weights + plan.workspace;
  std::string text = fmt::format("not enough memory on {}\n", ops.name());
  const auto line = [&](const std::string& name, size_t bytes) {
    text += fmt::format("  {:<58}{}\n", name, size_text(bytes));
  };
  line("weights", plan.weights);
  line("workspace", plan.workspace);
  line("KV cache, " + what, cache);
  line("needed, at least", fixed + cache);
  line(available, plan.available);
  const int64_t fits = plan.available > fixed
                           ? static_cast<int64_t>((plan.available - fixed) / plan.bytes_per_block)
                           : 0;
  text += fits == 0 && plan.weights < plan.available
              ? "ways out: a smaller --max-model-len or --max-num-seqs; "
          : fits == 0 ? "ways out: a smaller model, or quantization int4; "
          : asked_for ? fmt::format("ways out: a KV cache of {} blocks or less; ", fits)
                      : fmt::format("ways out: --max-model-len {} or less; ",
                                    fits * plan.limits.block_size);
  if (ops.device().kind != Device::cpu) text += "a higher --gpu-memory-utilization, or ";
  text += "end other programs that use this memory; a smaller --max-num-batched-tokens";
  throw Error(ErrorKind::device, text);
}

/// The KV blocks that the options ask for, by number or by bytes; nothing where they leave it open.
std::optional<int64_t> blocks_asked_for(const EngineConfig& config, bool is_cpu, Shard shard,
                                        const MemoryPlan& plan) {
  if (config.num_gpu_blocks_override > 0) return config.num_gpu_blocks_override;
  if (!is_cpu || config.cpu_kvcache_bytes == 0) return std::nullopt;
  const size_t bytes_per_block = plan.bytes_per_block * static_cast<size_t>(shard.world_size);
  const auto blocks =
      static_cast<int64_t>(static_cast<size_t>(config.cpu_kvcache_bytes) / bytes_per_block);
  check(blocks >= 1, ErrorKind::invalid_argument,
        "cpu_kvcache_bytes is {}: one block of {} tokens has {} bytes", config.cpu_kvcache_bytes,
        plan.limits.block_size, bytes_per_block);
  check(config.max_model_len <= 0 || blocks >= plan.limits.max_blocks_per_seq(),
        ErrorKind::invalid_argument,
        "cpu_kvcache_bytes is {}: one sequence of max_model_len {} needs {}",
        config.cpu_kvcache_bytes, config.max_model_len,
        static_cast<size_t>(plan.limits.max_blocks_per_seq()) * bytes_per_block);
  return blocks;
}

void plan_kv_cache(Backend& ops, const EngineConfig& config, Shard shard, int ranks_on_host,
                   MemoryPlan& plan) {
  // A GPU is ours up to gpu_memory_utilization of all it has; host memory is shared with everybody:
  // what is free is there.
  const MemoryInfo memory = ops.memory();
  const bool is_cpu = ops.device().kind == Device::cpu;
  // Beside other engines and programs, what is free less a margin for the driver's own growth.
  const double share = is_cpu ? 1 : config.gpu_memory_utilization;
  const auto ours = static_cast<size_t>(static_cast<double>(memory.total) * share);
  const size_t margin = is_cpu ? 0 : memory.total / 50;
  plan.available = std::min(ours, memory.free - std::min(memory.free, margin));
  if (is_cpu) plan.available /= static_cast<size_t>(ranks_on_host);
  const std::string available =
      is_cpu ? std::string("available: free memory")
             : fmt::format("available: {:.0f} % of it all, or what is free", 100 * share);
  const size_t fixed = plan.weights + plan.workspace;
  const int64_t per_seq = plan.limits.max_blocks_per_seq();
  size_t cache = plan.available > fixed ? plan.available - fixed : 0;
  const auto asked = blocks_asked_for(config, is_cpu, shard, plan);
  if (asked &&
      (fixed > plan.available || static_cast<size_t>(*asked) > cache / plan.bytes_per_block))
    not_enough(ops, plan, available, fmt::format("{} blocks as asked for", *asked), *asked, true);
  if (is_cpu && !asked) {  // take what can be used, not all there is
    const size_t useful =
        static_cast<size_t>(per_seq * plan.limits.max_num_seqs) * plan.bytes_per_block;
    const size_t most = kMostCpuCache / static_cast<size_t>(shard.world_size);
    const size_t wanted = static_cast<size_t>(per_seq) * plan.bytes_per_block;
    check(config.max_model_len <= 0 || wanted <= most || wanted > cache,
          ErrorKind::invalid_argument,
          "max_model_len {} needs a KV cache of {} bytes, and a CPU's has {} at most unless it is "
          "given: --cpu-kvcache-bytes {}, or --max-model-len {} or less",
          config.max_model_len, wanted * static_cast<size_t>(shard.world_size), kMostCpuCache,
          wanted * static_cast<size_t>(shard.world_size),
          static_cast<int64_t>(most / plan.bytes_per_block) * plan.limits.block_size);
    cache = std::min({cache, useful, most});
  }
  plan.num_blocks = asked.value_or(static_cast<int64_t>(cache / plan.bytes_per_block));
  // Slots are 32-bit.
  plan.num_blocks = std::min<int64_t>(plan.num_blocks, INT32_MAX / plan.limits.block_size);
  const bool is_given = config.max_model_len > 0;
  if (plan.num_blocks >= per_seq || (is_given && config.num_gpu_blocks_override > 0)) return;
  // A default length bends to the cache; a length that was asked for and does not fit is an error.
  if (is_given || plan.num_blocks < 1)
    not_enough(ops, plan, available,
               fmt::format("one sequence of max_model_len {}", plan.limits.max_model_len), per_seq,
               false);
  plan.limits.max_model_len = plan.num_blocks * plan.limits.block_size;
}

}  // namespace

int64_t wanted_max_model_len(const ModelConfig& model, const EngineConfig& config) {
  const int64_t longest = model.longest_context();
  return config.max_model_len > 0    ? config.max_model_len
         : config.max_model_len == 0 ? std::min(kDefaultMaxModelLen, longest)
                                     : longest;
}

size_t output_block_bytes(const StepLimits& limits) {
  Arena arena = Arena::measuring({});
  (void)take_output(arena, limits.max_samples(), limits.max_num_batched_tokens, kMaxLogprobs);
  return arena.peak();
}

DType compute_dtype(const ModelConfig& model, const EngineConfig& config) {
  if (config.dtype == "f32" || config.dtype == "float32") return DType::f32;
  if (config.dtype == "bf16" || config.dtype == "bfloat16") return DType::bf16;
  check(config.dtype == "auto", ErrorKind::invalid_argument,
        "dtype {} is not known: use auto, bf16 or f32", config.dtype);
  return model.dtype.value_or(DType::bf16) == DType::f32 ? DType::f32 : DType::bf16;
}

MemoryPlan plan_memory(Backend& ops, const ModelConfig& model, const EngineConfig& config,
                       DType dtype, Shard shard, int ranks_on_host) {
  MemoryPlan plan;
  plan.limits = limits_of(ops, model, config);
  WeightLoader counter(ops, dtype, shard, nullptr, model.quantization.get());
  const auto shape = find_architecture(model.architecture).make(model, {counter, {}});
  plan.weights = counter.bytes();
  plan.num_parameters = counter.num_parameters();
  plan.num_quantised = counter.num_quantised();
  plan.num_row_quantising = counter.num_row_quantising();
  plan.operands = operands_of(model, plan.limits, dtype, shard);
  plan.operands.quantised_columns = counter.quantised_columns();
  plan.operands.quantised_expert_columns = counter.quantised_expert_columns();
  plan.step_workspace = measure_workspace(*shape, model, plan.limits, shard);
  plan.workspace =
      aligned(plan.step_workspace) + aligned(BatchBuilder(plan.limits).max_bytes()) +
      aligned(plan.limits.token_mask_bytes()) + output_block_bytes(plan.limits) +
      aligned(RotaryEmbedding::bytes(model.rope, model.head_dim, plan.limits.max_model_len)) +
      ops.scratch_bytes(plan.operands);
  const int64_t kv_heads = kv_heads_per_rank(model.num_key_value_heads, shard.world_size);
  plan.cache_dtype = kv_cache_dtype(ops, model.quantization.get(), config.kv_cache_dtype, dtype);
  const auto rows = static_cast<size_t>(2 * model.num_hidden_layers * kv_heads);
  plan.bytes_per_block = static_cast<size_t>(config.block_size) *
                         (rows * kv_row_bytes(plan.cache_dtype, model.head_dim) + sizeof(int32_t));
  plan.workspace += aligned(kv_scale_bytes(model.quantization.get(), plan.cache_dtype, rows));
  plan_kv_cache(ops, config, shard, ranks_on_host, plan);
  return plan;
}

namespace {

/// Why the model cannot be split among `world_size` ranks, or nothing: its layers refuse it.
std::optional<std::string> refusal(const ModelConfig& model, int world_size) {
  NullBackend ops;
  WeightLoader counter(ops, DType::f32, {0, world_size});
  try {
    find_architecture(model.architecture).make(model, {counter, {}});
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_argument) throw;
    return error.what();
  }
  return std::nullopt;
}

}  // namespace

void check_parallel_size(const ModelConfig& model, int world_size) {
  const auto why = refusal(model, world_size);
  if (!why) return;
  std::string sizes;
  for (int size = 1; size <= kMaxRanks; ++size)
    if (!refusal(model, size)) sizes += fmt::format("{}{}", sizes.empty() ? "" : ", ", size);
  fail(ErrorKind::invalid_argument, "{}; sizes that work: {}", *why, sizes);
}

int64_t count_parameters(const ModelConfig& model) {
  NullBackend ops;
  WeightLoader counter(ops, DType::f32, {});
  find_architecture(model.architecture).make(model, {counter, {}});
  return counter.num_parameters();
}

}  // namespace nanovllm
