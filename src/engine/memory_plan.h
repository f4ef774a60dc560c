// MemoryPlan: what an engine needs, in closed form. No warm-up run: the model's constructors are
// run over a counting loader and its forward pass over a NullBackend with a measuring arena, which
// gives the exact figures without touching the device.
#pragma once

#include "engine/batch_builder.h"
#include "io/model_config.h"
#include "models/model.h"
#include "ops/backend.h"

namespace nanovllm {

struct EngineConfig;

/// Bytes on one rank, and the sizes that they allow.
struct MemoryPlan {
  size_t weights = 0;         // this rank's parameters, in the backend's layout
  size_t step_workspace = 0;  // the arena: activations and logits of the largest step
  // The arena, the input and output blocks, token masks, the rotary table, the KV cache's static
  // scales, the backend's own scratch.
  size_t workspace = 0;
  DType cache_dtype = DType::bf16;  // of keys and values
  size_t bytes_per_block = 0;       // keys and values of all layers, and the slots' tokens
  size_t available = 0;             // for all of it together, on this rank
  int64_t num_blocks = 0;
  int64_t num_parameters = 0;
  int64_t num_quantised = 0;       // parameters that stay quantised in memory
  int64_t num_row_quantising = 0;  // of these, those that quantise the rows that they meet
  StepLimits limits;               // with the defaults filled in
  OperandLimits operands;          // of the largest steps

  /// Bytes of the KV cache.
  size_t kv_cache() const { return static_cast<size_t>(num_blocks) * bytes_per_block; }
};

/// Bytes of a block that any step's results fit into.
size_t output_block_bytes(const StepLimits& limits);

/// One rank's plan. Ranks on CPUs of one host (`ranks_on_host`) share its memory evenly. Throws
/// Error(device), with a table of what was needed and what there was, if not even the smallest
/// useful cache fits, and Error(invalid_argument) if the model cannot be split like that.
MemoryPlan plan_memory(Backend& ops, const ModelConfig& model, const EngineConfig& config,
                       DType dtype, Shard shard, int ranks_on_host = 1);

/// Throws Error(invalid_argument) with the numbers, and the sizes that work, if `world_size` ranks
/// cannot share this model.
void check_parallel_size(const ModelConfig& model, int world_size);
/// Elements of the whole model, as one rank alone would hold it.
int64_t count_parameters(const ModelConfig& model);

/// max_model_len where the options leave it open and the model has no less.
constexpr int64_t kDefaultMaxModelLen = 4096;
/// max_model_len as the options have it, before the KV cache bends one that they leave open.
int64_t wanted_max_model_len(const ModelConfig& model, const EngineConfig& config);
/// The dtype that the model computes in: config.dtype, or the checkpoint's (f16 runs as bf16).
DType compute_dtype(const ModelConfig& model, const EngineConfig& config);

}  // namespace nanovllm
