// Rows of bf16 become numbers of 8 bits and scales (docs/contract.md has the definition) for
// gemm_w8a8.cuh: numbers [m, k]; a scale for each row, or [k / 128, m] of groups of 128.
#pragma once

#include "ops/cuda/quantised/quantised_rows.cuh"

namespace nanovllm {

struct RowsToBytes {
  const __nv_bfloat16* x;
  int64_t stride;  // of x's rows
  uint2* numbers;  // in eights
  float* scales;
  int columns;
  int scale_stride;  // from a group of columns to the next
  float fixed;       // what all rows have
  bool is_wide;      // rows of x begin on 16 bytes
};

/// As row_scale(), for integers.
__device__ inline float integer_scale(float most) {
  return most <= 0x1.fffffep127f ? __fdiv_rn(fmaxf(most, kLeastMagnitude), 127.0f)
                                 : __int_as_float(0x7fffffff);
}
__device__ inline uint2 integers_of(const Vec<__nv_bfloat16>& v, float scale) {
  uint32_t four[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    four[i / 4] |=
        (static_cast<uint32_t>(__float2int_rn(__fdiv_rn(to_float(v.v[i]), scale))) & 0xff)
        << (8 * (i % 4));
  return {four[0], four[1]};
}

constexpr int kByteThreads = 512;

/// A block takes a row.
template <WeightFormat::Numbers numbers, WeightFormat::Rows rows>
__global__ void __launch_bounds__(kByteThreads) quantise_bytes_kernel(const RowsToBytes to) {
  using Rows = WeightFormat::Rows;
  constexpr bool is_int8 = numbers == WeightFormat::int8;
  __shared__ float warps[kByteThreads / kWarp];
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const int eights = to.columns / 8, warp = threadIdx.x / kWarp;
  const __nv_bfloat16* const from = to.x + row * to.stride;
  const auto eight = [&](int i) { return load_vec(from + 8 * i, i < eights ? 8 : 0, to.is_wide); };
  float scale = to.fixed;
  if constexpr (rows == Rows::token) {
    float most = 0.0f;
    for (int i = threadIdx.x; i < eights; i += kByteThreads)
      most = most_of(most, most_of(eight(i)));
    most = most_of_lanes<kWarp>(most);
    if (threadIdx.x % kWarp == 0) warps[warp] = most;
    __syncthreads();
#pragma unroll
    for (const float w : warps) most = most_of(most, w);
    scale = is_int8 ? integer_scale(most) : row_scale(most);
  }
  for (int first = warp * kWarp; first < eights; first += kByteThreads) {
    const int i = first + static_cast<int>(threadIdx.x) % kWarp;
    Vec<__nv_bfloat16> v = eight(i);
    if constexpr (rows == Rows::group) {
      scale = row_scale(most_of_lanes<kGroupLanes>(most_of(v)));
      if (i < eights && i % kGroupLanes == 0)
        to.scales[int64_t{i / kGroupLanes} * to.scale_stride + row] = scale;
    } else if constexpr (rows == Rows::tensor) {  // infinity is a fault, not the most that there is
#pragma unroll
      for (__nv_bfloat16& x : v.v)
        if (isinf(to_float(x))) x = __float2bfloat16_rn(__int_as_float(0x7fffffff));
    }
    if (i < eights)
      to.numbers[row * eights + i] = is_int8 ? integers_of(v, scale) : quantise_eight(v, scale);
  }
  if (rows != Rows::group && threadIdx.x == 0) to.scales[row] = scale;
}

}  // namespace nanovllm
