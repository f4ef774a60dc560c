// Rows of bf16 become quantised ones where no kernel before has made them so.
#pragma once

#include "ops/cuda/quantised/quantised_rows.cuh"

namespace nanovllm {

struct RowsToQuantise {
  const __nv_bfloat16* x;
  int64_t stride;  // of x's rows
  QuantisedRows to;
  int rows;
  float fixed;   // the scale that all rows have
  bool is_wide;  // rows of x begin on 16 bytes
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
    quantise_groups_kernel(const RowsToQuantise rows) {
  let_next_start();
  wait_for_previous();
  const int row = static_cast<int>(blockIdx.y * kRowsTogether + threadIdx.x / kWarp),
            lane = threadIdx.x % kWarp,
            column = static_cast<int>(blockIdx.x * kWarp + lane) * Vec<__nv_bfloat16>::size;
  if (row >= rows.rows) return;
  const bool inside = column < rows.to.columns;
  Vec<__nv_bfloat16> v = load_vec(rows.from(row) + column, inside ? 8 : 0, rows.is_wide);
  if constexpr (has_fixed) {  // infinity is a fault, not the most that there is
#pragma unroll
    for (__nv_bfloat16& x : v.v)
      if (isinf(to_float(x))) x = __float2bfloat16_rn(__int_as_float(0x7fffffff));
    if (inside) rows.to.put(row, column, v, rows.fixed);
    if (column == 0) rows.to.scales[row] = rows.fixed;
  } else {
    rows.to.put_of_group(row, column, v, inside);
  }
}

constexpr int kTokenThreads = 256;

/// A scale for each row. A block takes a row.
__global__ void __launch_bounds__(kTokenThreads) quantise_tokens_kernel(const RowsToQuantise rows) {
  __shared__ float warps[kTokenThreads / kWarp];
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const __nv_bfloat16* const from = rows.from(static_cast<int>(row));
  const auto for_eights = [&](const auto& f) {
    for (int c = 8 * static_cast<int>(threadIdx.x); c < rows.to.columns; c += 8 * kTokenThreads)
      f(c, load_vec(from + c, 8, rows.is_wide));
  };
  float most = 0.0f;
  for_eights([&](int, const Vec<__nv_bfloat16>& v) { most = most_of(most, most_of(v)); });
  most = most_of_lanes<kWarp>(most);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = most;
  __syncthreads();
#pragma unroll
  for (const float w : warps) most = most_of(most, w);
  const float scale = row_scale(most);
  for_eights([&](int c, const Vec<__nv_bfloat16>& v) { rows.to.put(row, c, v, scale); });
  if (threadIdx.x == 0) rows.to.scales[row] = scale;
}

}  // namespace nanovllm
