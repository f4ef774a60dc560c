// RotaryEmbedding: the table of cosines and sines that every attention layer shares (Su et al.,
// arXiv 2104.09864), with the scalings that models are stretched to longer contexts by.
#pragma once

#include <vector>

#include "io/model_config.h"
#include "ops/backend.h"

namespace nanovllm {

/// The angle per position of each of the dim / 2 rotated pairs, fastest first, as
/// transformers/modeling_rope_utils.py computes it. `dim` is the rotated part of a head.
std::vector<float> inverse_frequencies(const RopeParameters& rope, int64_t dim);

class RotaryEmbedding {
 public:
  /// Covers the positions below `max_position`. Throws Error(model) where the scaling has no exact
  /// table: dynamic beyond the context that the model was trained with.
  RotaryEmbedding(Backend& ops, const RopeParameters& rope, int64_t head_dim, int64_t max_position);
  /// f32 [max_position, rotary_dim]: cosines, then sines, rotary_dim / 2 of each. On the device.
  Tensor cos_sin() const { return cos_sin_; }
  static size_t bytes(const RopeParameters& rope, int64_t head_dim, int64_t max_position);

 private:
  Buffer buffer_;
  Tensor cos_sin_;
};

}  // namespace nanovllm
