// How a warp's results leave its registers: rounded, in pieces of a row.
#pragma once

#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

/// The rounded sums that a warp has of 16 rows by `columns` columns, as wgmma leaves them, in
/// pieces of eight or four neighbours: f(8 or 0 for the row lane / 4 of those eight, the first
/// column, the piece).
template <int columns, class F>
__device__ void for_pieces(const float (&sum)[columns / 2], F&& f) {
  constexpr int kBlocks = columns / 8, kAtOnce = kBlocks % 4 == 0 ? 4 : 2;
  static_assert(kBlocks % kAtOnce == 0);
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < kBlocks; j += kAtOnce) {
      uint32_t v[kAtOnce];
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) {
        const int i = 4 * (j + b) + 2 * half;
        v[b] = pack_bf16(sum[i], sum[i + 1]);
      }
      transpose_quad(v);
      if constexpr (kAtOnce == 4)
        f(8 * half, 8 * (j + t), uint4{v[0], v[1], v[2], v[3]});
      else
        f(8 * half, 8 * (j + t % 2) + t / 2 * 4, uint2{v[0], v[1]});
    }
}

}  // namespace nanovllm
