// Where quantised rows and their scales (docs/contract.md has the definition) lie for products,
// whoever makes them: numbers [m, k]; a scale for each row, or [k / 128, m] of groups of 128.
#pragma once

#include "ops/cuda/ptx/e4m3.cuh"
#include "ops/cuda/quantised/fp8_kernels.h"

namespace nanovllm {

constexpr int kGroupLanes = kRowGroup / Vec<__nv_bfloat16>::size;  // that have a group

/// As row_scale(), for integers.
__device__ inline float integer_scale(float most) {
  return most <= 0x1.fffffep127f ? __fdiv_rn(fmaxf(most, kLeastMagnitude), 127.0f)
                                 : __int_as_float(0x7fffffff);
}
/// x as an integer of 8 bits.
__device__ inline uint32_t integer_of(float x, float scale) {
  return static_cast<uint32_t>(__float2int_rn(__fdiv_rn(x, scale))) & 0xff;
}
__device__ inline uint2 integers_of(const Vec<__nv_bfloat16>& v, float scale) {
  uint32_t four[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) four[i / 4] |= integer_of(to_float(v.v[i]), scale) << (8 * (i % 4));
  return {four[0], four[1]};
}

/// Rows of E4M3 numbers or of integers.
template <WeightFormat::Numbers kind = WeightFormat::e4m3>
struct QuantisedRows {
  static constexpr bool is_int8 = kind == WeightFormat::int8;
  uint2* numbers;  // in eights
  float* scales;
  int columns;
  int scale_stride;  // from a group of columns to the next
  static __device__ float scale_of(float most) {
    return is_int8 ? integer_scale(most) : row_scale(most);
  }
  __device__ void put(int64_t row, int column, const Vec<__nv_bfloat16>& v, float scale) const {
    numbers[(row * columns + column) / 8] =
        is_int8 ? integers_of(v, scale) : quantise_eight(v, Divisor(scale));
  }
  /// The same with the scale of its group, whose other eights the lanes beside this one have.
  __device__ void put_of_group(int64_t row, int column, const Vec<__nv_bfloat16>& v,
                               bool inside = true) const {
    const float scale = row_scale(most_of_lanes<kGroupLanes>(most_of(v)));
    if (!inside) return;
    if (column % kRowGroup == 0) scales[int64_t{column / kRowGroup} * scale_stride + row] = scale;
    put(row, column, v, scale);
  }
};

template <WeightFormat::Numbers kind>
QuantisedRows<kind> rows_in(std::byte* numbers, std::byte* scales, int64_t rows, int64_t columns) {
  return {reinterpret_cast<uint2*>(numbers), reinterpret_cast<float*>(scales),
          static_cast<int>(columns), static_cast<int>(rows_with_room(rows))};
}

}  // namespace nanovllm
