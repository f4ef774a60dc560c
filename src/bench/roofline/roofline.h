// The physical floor of each benchmark: the bytes that must be read and the arithmetic that must be
// done, at the machine's measured rates, without gaps. Every weight is read once per forward pass
// (of a mixture of experts those that its tokens choose, if they choose evenly), every cached key
// and value once per decoded token; activations are free.
#pragma once

#include <cstdint>
#include <span>

#include "io/model_config.h"

namespace nanovllm::cli {

/// A machine's rates: bytes read per second, and matrix-product FLOP/s in the model's dtype.
struct Rates {
  double bytes_per_second = 0;
  double flops = 0;
};

class Roofline {
 public:
  /// `bytes_per_value` of weights and KV cache: 2 for bf16. `ranks` share all bytes and FLOPs.
  Roofline(const ModelConfig& config, int bytes_per_value, Rates rates, int ranks = 1);

  int64_t num_parameters() const {
    return layer_parameters_ + expert_parameters_ + head_parameters_ * (tied_ ? 1 : 2);
  }
  double kv_bytes_per_token() const { return kv_bytes_; }

  /// Seconds of one decode step of `batch` sequences whose contexts sum to `context` tokens.
  double decode_step(int64_t batch, int64_t context) const;
  /// Seconds of the forward passes over whole prompts, one logits row each.
  double prefill(std::span<const int64_t> prompt_lens) const;
  /// Seconds of a whole workload: all sequences admitted at once, every prompt prefilled (which
  /// gives its first token), then one decode step after another, each sequence leaving with its
  /// last token.
  double offline(std::span<const int64_t> prompt_lens, std::span<const int64_t> output_lens) const;

 private:
  /// Layer parameters that a forward pass of `tokens` reads, and that one token is multiplied by.
  double layers_read(double tokens) const;
  double layers_active() const;

  double rate_bytes_, rate_flops_;  // of all ranks together
  double bytes_per_value_;
  int64_t layers_, attention_width_;  // attention_width_: query heads x head_dim
  int64_t layer_parameters_;          // of all layers, norms included, experts not
  int64_t expert_parameters_ = 0;     // of all experts of all layers
  double chosen_share_ = 0;           // of them, by one token
  int64_t head_parameters_;           // vocabulary x hidden
  bool tied_;
  double kv_bytes_;  // of one token
};

}  // namespace nanovllm::cli
