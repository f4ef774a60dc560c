// The end of a large product whose columns are attention's heads (gemm_large.cuh, gemm_heads.cuh).
#pragma once

#include "ops/cuda/gemm/gemm_heads.cuh"
#include "ops/cuda/gemm/gemm_large_ends.cuh"

namespace nanovllm {

template <>
struct LargeInput<GemmEnd::heads> : HeadsInput {};

/// The parts of a tile: two heads, in each the two rows of a lane, in each four parts.
template <>
struct LargeResult<GemmEnd::heads> : HeadPairs<2> {
  using Input = LargeInput<GemmEnd::heads>;
  __nv_bfloat16* to = nullptr;  // as the other ends have it
  int row, column;
  int slot, position;  // of the row whose parts come next

  __device__ void place(__nv_bfloat16* y, const LargeShape& shape, const Input& input,
                        int first_row, int first_column) {
    to = y + first_row * shape.stride + first_column;
    row = first_row;
    column = first_column;
    load_place(shape, input.heads, 0);
  }
  /// Part `i` of kLargeParts, in order: four of about the same work for each row of a head, or the
  /// tensor cores would wait for the longest. What a part reads was asked for in the one before.
  __device__ void store_part(const LargeShape& shape, const Input& input, int i) {
    if (!to) return;
    const FusedArguments<__nv_bfloat16>& a = input.heads;
    const int first = i / 8 * 4, r = i / 4 % 2, head = column / kProductHead + i / 8,
              turned = a.q.count + a.k.count, c = column % kProductHead;
    if (head >= turned + a.v.count) return;
    const bool mine = row + 8 * r < shape.rows;
    const HeadRow target{head, slot, c, to + 8 * r * shape.stride + 32 * first};
    HeadWeights weights;
    switch (i % 4) {
      case 0:
        begin_row(a, first, r, head < turned);
        break;
      case 1:
        weights.load(a, head, c);
        if (head < turned) normalise_row(weights, first, r);
        angles.load(a, position, c);
        break;
      case 2:
        if (mine) store_vectors(input, target, first, r, 0);
        angles.load(a, position, c + 32);
        break;
      default:
        if (mine) store_vectors(input, target, first, r, 1);
        if (i + 1 < kLargeParts) load_place(shape, a, 1 - r);
    }
  }
  /// All parts of the last tile: beside nothing, so that all reads are begun before one is awaited.
  __device__ void store_all(const LargeShape& shape, const Input& input) {
    if (!to) return;
    const FusedArguments<__nv_bfloat16>& a = input.heads;
    const int c = column % kProductHead;
    HeadReads reads;
    reads.load(a, row, shape.rows, c);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = column / kProductHead + i;
      if (head >= a.q.count + a.k.count + a.v.count) return;
      HeadWeights weights;
      weights.load(a, head, c);
      finish_rows(input, reads, weights, 4 * i, head, c, to + i * kProductHead, shape.stride,
                  shape.rows - row);
    }
  }

 private:
  __device__ void load_place(const LargeShape& shape, const FusedArguments<__nv_bfloat16>& a,
                             int r) {
    const int token = min(row + 8 * r, shape.rows - 1);
    slot = a.slots[token];
    position = a.positions[token];
  }
};

}  // namespace nanovllm
