// How an engine keeps keys and values: what its option asks for, and what the checkpoint says of
// them (kv_cache_scheme).
#pragma once

#include <span>
#include <string>

#include "ops/backend.h"

namespace nanovllm {

class Checkpoint;
class QuantizationConfig;

/// The dtype of the KV cache of a model that computes in `dtype`. `asked` is
/// EngineConfig::kv_cache_dtype; `quantization` is config.json's, or null. Throws
/// Error(invalid_argument) where the device has no such cache.
DType kv_cache_dtype(const Backend& device, const QuantizationConfig* quantization,
                     const std::string& asked, DType dtype);

/// Gives caches of e4m3 the scales that the checkpoint has for their layers, if its scheme says
/// that it has. Throws Error(model) naming the tensor.
void load_kv_scales(const Checkpoint& checkpoint, const QuantizationConfig* quantization,
                    std::span<KvCache> layers);

/// A note for the user where a scheme of the checkpoint has no part in a cache of this dtype, or
/// what is special about it; empty: nothing.
std::string describe_kv_cache(const QuantizationConfig* quantization, DType cache_dtype);

}  // namespace nanovllm
