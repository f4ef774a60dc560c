// The physical floor of each benchmark: the bytes that must be read and the arithmetic that must be
// done, at the machine's measured rates, without gaps. Every weight is read once per forward pass
// (of a mixture of experts those that its tokens choose, if they choose evenly), every cached key
// and value once per decoded token; activations are free. Weights have the bytes of their format,
// scales included, whether the device can keep them so or not.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/weight.h"
#include "io/model_config.h"

namespace nanovllm::cli {

/// A machine's rates: bytes read per second, and FLOP/s of matrix products.
struct Rates {
  double bytes_per_second = 0;
  double flops = 0;            ///< in the model's dtype
  double quantised_flops = 0;  ///< where both sides are numbers of 8 bits; 0: the same
};

/// The weights that a forward pass reads, in the formats that the configuration has them in.
struct WeightReads {
  struct Part {
    int64_t parameters = 0;
    int64_t quantising_rows = 0;  ///< of these, those whose rows of activations are quantised
    double bytes = 0;
  };
  Part layers;   ///< of all layers, norms and biases included, experts not
  Part experts;  ///< of all experts of all layers
  Part head;
  int64_t embeddings = 0;  ///< parameters that only the rows of its tokens are read of
};

/// Bytes of a weight, scales and zero points included. One scale of a block of 128 rows is counted
/// once, where backends keep it several times.
double bytes_of(const Weight& weight);
/// Counts them by the model's own constructors; `dtype` is that of plain weights.
WeightReads count_reads(const ModelConfig& config, DType dtype);

/// The dtype that EngineInfo names: "f32", "bf16" or "fp8_e4m3".
DType dtype_named(std::string_view name);

class Roofline {
 public:
  /// `ranks` share all bytes and FLOPs.
  Roofline(const ModelConfig& config, const WeightReads& weights, DType cache_dtype, Rates rates,
           int ranks = 1);

  double kv_bytes_per_token() const { return kv_bytes_; }

  /// Seconds of one decode step of `batch` sequences whose contexts sum to `context` tokens.
  double decode_step(int64_t batch, int64_t context) const;
  /// Bytes that such a step reads.
  double decode_bytes(int64_t batch, int64_t context) const;
  /// Seconds of the forward passes over whole prompts, one logits row each.
  double prefill(std::span<const int64_t> prompt_lens) const;
  /// Seconds of a whole workload: all sequences admitted at once, every prompt prefilled (which
  /// gives its first token), then one decode step after another, each sequence leaving with its
  /// last token.
  double offline(std::span<const int64_t> prompt_lens, std::span<const int64_t> output_lens) const;

 private:
  /// Of the layers: bytes that a forward pass of `tokens` reads, and seconds of one token's
  /// products.
  double layer_bytes(double tokens) const;
  double layer_seconds() const;
  double seconds_of(const WeightReads::Part& part) const;

  double rate_bytes_, rate_flops_, rate_quantised_;  // of all ranks together
  WeightReads weights_;
  int64_t layers_, attention_width_;  // attention_width_: query heads x head_dim
  double chosen_share_ = 0;           // of the experts' parameters, by one token
  double kv_bytes_;                   // of one token
};

}  // namespace nanovllm::cli
