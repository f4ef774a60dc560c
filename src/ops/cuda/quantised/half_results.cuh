// The results of products whose halves of k a block multiplies one after the other: y keeps those
// of the first, rounded, until the second's are there (WeightFormat::in_halves).
#pragma once

#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

/// A pair of columns of both halves, rounded each.
__device__ inline uint32_t pair_of_halves(uint32_t first, uint32_t second) {
  const float2 both = add_halves(first, low_of(second), high_of(second));
  return pack_bf16(both.x, both.y);
}
/// A column. `is_second_half`: y has the first one's.
template <class Y>
__device__ inline void store_half(Y* y, float sum, bool is_second_half) {
  const Y own = round_to<Y>(sum);
  *y = is_second_half ? round_to<Y>(to_float(*y) + to_float(own)) : own;
}

}  // namespace nanovllm
