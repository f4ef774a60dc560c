// Rows of bf16 become E4M3 numbers and scales (docs/contract.md has the definition), as
// gemm_fp8.cuh reads them: numbers [m, k]; a scale for each row, or [k / 128, m] of groups of 128.
#pragma once

#include "ops/cuda/ptx/e4m3.cuh"

namespace nanovllm {

struct QuantisedRows {
  const __nv_bfloat16* x;
  int64_t stride;  // of x's rows
  uint2* numbers;  // in eights
  float* scales;
  int rows, columns;
  int scale_stride;  // from a group of columns to the next
  float fixed;       // what all rows have
  bool is_wide;      // rows of x begin on 16 bytes
  // Where rows are places of pairs: whose they are, by place; or how many in a row are one's.
  const int* source = nullptr;
  int sharing = 1;
  __device__ const __nv_bfloat16* from(int row) const {
    const int at = source ? source[row] : sharing > 1 ? row / sharing : row;
    return x + at * stride;
  }
};

constexpr int kRowsTogether = 8;  // of a block of quantise_groups_kernel(), a warp each

/// A scale for each 128 columns, or `fixed`. A block takes 256 columns of eight rows.
template <bool has_fixed>
__global__ void __launch_bounds__(kRowsTogether* kWarp)
    quantise_groups_kernel(const QuantisedRows to) {
  let_next_start();
  wait_for_previous();
  const int row = static_cast<int>(blockIdx.y * kRowsTogether + threadIdx.x / kWarp),
            lane = threadIdx.x % kWarp,
            column = static_cast<int>(blockIdx.x * kWarp + lane) * Vec<__nv_bfloat16>::size;
  if (row >= to.rows) return;
  const bool inside = column < to.columns;
  Vec<__nv_bfloat16> v = load_vec(to.from(row) + column, inside ? 8 : 0, to.is_wide);
  float scale = to.fixed;
  if constexpr (has_fixed) {  // infinity is a fault, not the most that there is
#pragma unroll
    for (__nv_bfloat16& x : v.v)
      if (isinf(to_float(x))) x = __float2bfloat16_rn(__int_as_float(0x7fffffff));
  } else {
    scale = row_scale(most_of_lanes<16>(most_of(v)));
    if (inside && lane % 16 == 0)
      to.scales[int64_t{column / kRowGroup} * to.scale_stride + row] = scale;
  }
  if (inside) to.numbers[(int64_t{row} * to.columns + column) / 8] = quantise_eight(v, scale);
  if (has_fixed && column == 0) to.scales[row] = scale;
}

constexpr int kTokenThreads = 256;

/// A scale for each row. A block takes a row.
__global__ void __launch_bounds__(kTokenThreads) quantise_tokens_kernel(const QuantisedRows to) {
  __shared__ float warps[kTokenThreads / kWarp];
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const int eights = to.columns / 8;
  const __nv_bfloat16* const from = to.from(static_cast<int>(row));
  const auto eight = [&](int i) { return load_vec(from + 8 * i, 8, to.is_wide); };
  float most = 0.0f;
  for (int i = threadIdx.x; i < eights; i += kTokenThreads) most = most_of(most, most_of(eight(i)));
  most = most_of_lanes<kWarp>(most);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = most;
  __syncthreads();
#pragma unroll
  for (const float w : warps) most = most_of(most, w);
  const float scale = row_scale(most);
  for (int i = threadIdx.x; i < eights; i += kTokenThreads)
    to.numbers[row * eights + i] = quantise_eight(eight(i), scale);
  if (threadIdx.x == 0) to.scales[row] = scale;
}

}  // namespace nanovllm
