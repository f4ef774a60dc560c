// Quantising the plain weights of a checkpoint: which of them, and to which numbers. The engine
// does it while it loads (QuantizedWeight), `nanovllm quantize` writes what it gives.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "core/weight.h"
#include "io/json.h"
#include "io/model_config.h"

namespace nanovllm {

/// Rounds the numbers that share a scale: int4, int8 or E4M3. `out` gets one byte each: int4 from 0
/// on (its zero point is 8), or the bits of an int8 or E4M3. Returns the scale, a bf16 number,
/// or one that is not finite, and rounds nothing, where a number is not finite. docs/contract.md
/// says which numbers these are.
float quantise(std::span<const float> numbers, WeightFormat::Numbers to, uint8_t* out);

/// The quantization_config of `model` with the weights that `format` ("fp8", "int8", "int4",
/// "w4a8") is for quantised: those of attention, MLPs and experts. Throws Error(invalid_argument):
/// sizes that no group fits.
Json quantization_json(const ModelConfig& model, const std::string& format);

/// Makes `model` what the options of these names ask for. Throws Error(invalid_argument): no such
/// `quantization`, or one that is not the checkpoint's.
void choose_quantization(ModelConfig& model, const std::string& quantization, bool dequantize);

constexpr int64_t kMaxShardBytes = 5'000'000'000;  // transformers' default for years

/// Writes the model of the directory `from` to `to`, quantised, in compressed-tensors' format. `to`
/// must not exist, and does not until all is written. `progress` may throw: nothing stays. Throws
/// Error: model (`from`), invalid_argument (`format`, `to`: it exists, or cannot be written). Files
/// of weights are of at most `max_shard_bytes`, but for a single weight that is larger.
void write_quantised(const std::string& from, const std::string& to, const std::string& format,
                     const FindConfigDefaults& defaults,
                     const std::function<void(int64_t done, int64_t total)>& progress,
                     int64_t max_shard_bytes = kMaxShardBytes);

}  // namespace nanovllm
