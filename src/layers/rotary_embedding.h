// RotaryEmbedding: the table of cosines and sines that every attention layer shares (Su et al.,
// arXiv 2104.09864).
#pragma once

#include <vector>

#include "io/model_config.h"
#include "ops/backend.h"

namespace nanovllm {

class RotaryEmbedding {
 public:
  /// Covers the positions 0 .. max_position. Throws Error(model) for a RoPE type that is not known,
  /// by name.
  RotaryEmbedding(Backend& ops, const RopeParameters& rope, int64_t head_dim, int64_t max_position);
  /// f32 [max_position, rotary_dim]: cosines, then sines, rotary_dim / 2 of each. On the device.
  Tensor cos_sin() const { return cos_sin_; }
  static size_t bytes(const RopeParameters& rope, int64_t head_dim, int64_t max_position);

 private:
  Buffer buffer_;
  Tensor cos_sin_;
};

}  // namespace nanovllm
