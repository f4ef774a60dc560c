// The ends of a large product's sums (gemm_large.cuh).
#pragma once

#include "ops/cuda/gemm/choose.h"
#include "ops/cuda/gemm/gated.cuh"
#include "ops/cuda/ptx/device.cuh"

namespace nanovllm {

struct LargeShape {
  int rows, columns;  // of y
  int64_t stride;     // of y's rows
  int steps, chain;   // of 64 along k; of one chain, all or half of them: kLargeParts at least
  int pairs, row_pairs,
      groups;  // tiles of a cluster: all, those above each other, those of a group
  int up;      // w's row where those of `up` begin, if gated
};

/// The operands of an end besides the product's.
template <GemmEnd end>
struct LargeInput {};

/// The rounded sums of a tile that was finished before: pair[2 j + r] is columns 8 j + 2 (lane % 4)
/// and the next of row lane / 4 + 8 r of the warp's 16.
template <GemmEnd end>
struct LargeResult {
  static constexpr bool gated = end == GemmEnd::gate;
  uint32_t pair[64];
  __nv_bfloat16* to = nullptr;  // the lane's first vector of its first row; null: nothing is held
  int rows, columns;            // of y, left from there

  __device__ void take(const float (&sum)[128]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) pair[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
  }
  /// The same where what is held is the first half's.
  __device__ void add(const float (&sum)[128]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const float2 both = add_halves(pair[i], sum[2 * i], sum[2 * i + 1]);
      pair[i] = pack_bf16(both.x, both.y);
    }
  }
  /// Where they go: the lane's first row and, of vectors, its first column.
  __device__ void place(__nv_bfloat16* y, const LargeShape& shape, const LargeInput<end>&, int row,
                        int column) {
    to = y + row * shape.stride + column;
    rows = shape.rows - row;
    columns = shape.columns - column;
  }
  __device__ void store(const LargeShape& shape, int q, int r) {
    uint32_t unit[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) unit[i] = pair[2 * (4 * q + i) + r];
    transpose_quad(unit);
    if (to && 8 * r < rows && 32 * q < columns)
      *reinterpret_cast<uint4*>(to + 8 * r * shape.stride + 32 * q) = {unit[0], unit[1], unit[2],
                                                                       unit[3]};
  }
  /// Part `i` of kLargeParts, in order.
  __device__ void store_part(const LargeShape& shape, const LargeInput<end>&, int i) {
    if (!to) return;
    if constexpr (gated) {
      if (i % 2 == 0)
        activate(i / 4, i / 2 % 2);
      else
        store(shape, i / 4, i / 2 % 2);
    } else {
      store(shape, i / 2, i % 2);
    }
  }
  /// All parts of the last tile.
  __device__ void store_all(const LargeShape& shape, const LargeInput<end>& input) {
#pragma unroll
    for (int i = 0; i < kLargeParts; ++i) store_part(shape, input, i);
  }
  /// Gates of vector q of row r become results. By a whole warp.
  __device__ void activate(int q, int r) {
    uint32_t* gate = pair + 8 * q + r;
    const uint32_t* up = gate + 32;
    const uint4 result =
        silu_times_vector({gate[0], gate[2], gate[4], gate[6]}, {up[0], up[2], up[4], up[6]}, true);
    gate[0] = result.x;
    gate[2] = result.y;
    gate[4] = result.z;
    gate[6] = result.w;
  }
};

}  // namespace nanovllm
