// Rows of bf16 become quantised ones where no kernel before has made them so.
#pragma once

#include "ops/cuda/quantised/quantised_rows.cuh"

namespace nanovllm {

template <WeightFormat::Numbers kind>
struct RowsToQuantise {
  const __nv_bfloat16* x;
  int64_t stride;  // of x's rows
  QuantisedRows<kind> to;
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
    quantise_groups_kernel(const RowsToQuantise<WeightFormat::e4m3> rows) {
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

/// A scale for each row, which a block takes or, of eight rows, a warp. A thread holds up to kHeld
/// eights; more are read twice.
template <WeightFormat::Numbers kind, int kThreads, int kHeld>
__global__ void __launch_bounds__(kThreads == kWarp ? kRowsTogether * kWarp : kThreads)
    quantise_tokens_kernel(const RowsToQuantise<kind> rows) {
  constexpr bool is_warps = kThreads == kWarp;
  constexpr int kStep = 8 * kThreads;
  const int thread = threadIdx.x % kThreads;
  let_next_start();
  wait_for_previous();
  const int row =
      static_cast<int>(is_warps ? blockIdx.x * kRowsTogether + threadIdx.x / kWarp : blockIdx.x);
  if (is_warps && row >= rows.rows) return;
  const __nv_bfloat16* const from = rows.from(row);
  const int first = 8 * thread, columns = rows.to.columns;
  Vec<__nv_bfloat16> held[kHeld];
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    held[i] = load_vec(from + first + i * kStep, first + i * kStep < columns ? 8 : 0, rows.is_wide);
#pragma unroll
  for (const Vec<__nv_bfloat16>& v : held) most = most_of(most, most_of(v));
  const auto for_others = [&](const auto& f) {
    for (int c = first + kHeld * kStep; c < columns; c += kStep)
      f(c, load_vec(from + c, 8, rows.is_wide));
  };
  for_others([&](int, const Vec<__nv_bfloat16>& v) { most = most_of(most, most_of(v)); });
  __syncwarp();
  most = most_of_lanes<kWarp>(most);
  if constexpr (!is_warps) {
    __shared__ float warps[kThreads / kWarp];
    if (thread % kWarp == 0) warps[thread / kWarp] = most;
    __syncthreads();
#pragma unroll
    for (const float w : warps) most = most_of(most, w);
  }
  const float scale = rows.to.scale_of(most);
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (first + i * kStep < columns) rows.to.put(row, first + i * kStep, held[i], scale);
  for_others([&](int c, const Vec<__nv_bfloat16>& v) { rows.to.put(row, c, v, scale); });
  if (thread == 0) rows.to.scales[row] = scale;
}

}  // namespace nanovllm
