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

/// Bytes of the scales that the checkpoint has for a cache of `rows` heads of keys and values in
/// all layers; 0 where its scheme has none.
size_t kv_scale_bytes(const QuantizationConfig* quantization, DType cache_dtype, size_t rows);

/// Gives caches of e4m3 the scales that the checkpoint has for their layers, if its scheme says
/// that it has: of a layer, or of each of `num_heads` heads, of which these caches have those from
/// `first` on. The scales lie in what is returned. Throws Error(model) naming the tensor.
Buffer load_kv_scales(Backend& device, const Checkpoint& checkpoint,
                      const QuantizationConfig* quantization, int64_t num_heads, int64_t first,
                      std::span<KvCache> layers);

/// A note for the user where a scheme of the checkpoint has no part in a cache of this dtype, or
/// what is special about it; empty: nothing.
std::string describe_kv_cache(const QuantizationConfig* quantization, DType cache_dtype);

}  // namespace nanovllm
