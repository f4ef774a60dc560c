// Products whose columns are attention's heads: Qwen3's norms of query and key heads, their
// rotation, and the store of keys and values into the cache, from the sums of wgmma, as
// many_tokens_kernel() computes them (rotary.cuh).
#pragma once

#include "ops/cuda/gemm/gemm_kernels.h"
#include "ops/cuda/rowwise/rotary.cuh"

namespace nanovllm {

struct HeadsInput {
  FusedArguments<__nv_bfloat16> heads;
  int block_shift;  // of the cache's blocks
};

/// Of the elements c .. c + 7 of a head, and those 64 behind them.
struct HeadAngles {
  Vec<float> cosine[2], sine[2];
  __device__ void load(const FusedArguments<__nv_bfloat16>& a, int position, int c) {
    const float* table = a.cos_sin + position * a.table_stride + c;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      cosine[i] = load_vec(table + 4 * i, 4, true);
      sine[i] = load_vec(table + kProductHead / 2 + 4 * i, 4, true);
    }
  }
};

/// The norm's weights of the elements c + 32 i .. c + 32 i + 7 of a head, if it is not a value.
struct HeadWeights {
  Words at[4];
  __device__ void load(const FusedArguments<__nv_bfloat16>& a, int head, int c) {
    const __nv_bfloat16* weights = head < a.q.count ? a.q_norm : a.k_norm;
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = Words::at(weights + c + 32 * i);
  }
};

/// The values that are read for a lane's two rows, eight rows apart, of any head.
struct HeadReads {
  int slot[2];
  HeadAngles angles[2][2];
  /// `row`: the first of them, of `rows`; `c`: the lane's first element.
  __device__ void load(const FusedArguments<__nv_bfloat16>& a, int row, int rows, int c) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = min(row + 8 * r, rows - 1), position = a.positions[token];
      slot[r] = a.slots[token];
#pragma unroll
      for (int q = 0; q < 2; ++q) angles[r][q].load(a, position, c + 32 * q);
    }
  }
};

/// Where a lane's part of a head's row goes: it has the vectors of eight elements at `c`, c + 32,
/// c + 64 and c + 96.
struct HeadRow {
  int head, slot, c;
  __nv_bfloat16* y;  // of a query: its element c
};

/// The rounded sums of `heads` heads in a lane, of two rows: pair[2 j + r] is columns 8 j + 2
/// (lane % 4) and the next of row r. Vectors q: four of each head.
template <int heads>
struct HeadPairs {
  uint32_t pair[32 * heads];
  float reciprocal;  // of the row in work: the norm's factor
  HeadAngles angles;

  __device__ void take(const float (&sum)[64 * heads]) {
#pragma unroll
    for (int i = 0; i < 32 * heads; ++i) pair[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
  }
  /// The vectors first .. first + 3 of row r become whole; with `norm`, the norm's factor.
  __device__ void begin_row(const FusedArguments<__nv_bfloat16>& a, int first, int r, bool norm) {
#pragma unroll
    for (int q = first; q < first + 4; ++q) {
      uint32_t unit[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) unit[i] = pair[2 * (4 * q + i) + r];
      transpose_quad(unit);
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[2 * (4 * q + i) + r] = unit[i];
    }
    if (!norm) return;
    float sum[4];  // in the order of TokenHeads, whose lanes have a vector each
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      sum[q] = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t x = pair[2 * (4 * (first + q) + i) + r];
        sum[q] = __fmaf_rn(low_of(x), low_of(x), sum[q]);
        sum[q] = __fmaf_rn(high_of(x), high_of(x), sum[q]);
      }
    }
    float all = __fadd_rn(__fadd_rn(sum[0], sum[2]), __fadd_rn(sum[1], sum[3]));
    all = __fadd_rn(all, __shfl_xor_sync(kFullMask, all, 2));
    all = __fadd_rn(all, __shfl_xor_sync(kFullMask, all, 1));
    reciprocal = __frsqrt_rn(__fadd_rn(__fmul_rn(all, 1.0f / kProductHead), a.eps));
  }
  /// The vectors of row r become those of a normalised head.
  __device__ void normalise_row(const HeadWeights& weights, int first, int r) {
#pragma unroll
    for (int q = 0; q < 4; ++q)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t& x = pair[2 * (4 * (first + q) + i) + r];
        x = times(weights.at[q].pair[i],
                  pack_bf16(low_of(x) * reciprocal, high_of(x) * reciprocal));
      }
  }
  /// Vector first + q of row r, with `angles`, and the one 64 elements behind it, which are turned
  /// together. q: 0 or 1.
  __device__ void store_vectors(const HeadsInput& input, const HeadRow& row, int first, int r,
                                int q) {
    const FusedArguments<__nv_bfloat16>& a = input.heads;
    const int c = row.c + 32 * q, key = row.head - a.q.count, value = key - a.k.count;
    __nv_bfloat16* out = row.y + 32 * q;
    if (key >= 0) {
      if (row.slot < 0) return;
      const Pages& pages = value < 0 ? a.k_pages : a.v_pages;
      const int in_block = row.slot & ((1 << input.block_shift) - 1);
      out = (value < 0 ? a.k_cache : a.v_cache) +
            (row.slot >> input.block_shift) * pages.block_stride +
            (value < 0 ? key : value) * pages.head_stride + in_block * kProductHead + c;
    }
    Words x, y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x.pair[i] = pair[2 * (4 * (first + q) + i) + r];
      y.pair[i] = pair[2 * (4 * (first + q) + 8 + i) + r];
    }
    if (value < 0) turn(x, y);
    store_whole(out, reinterpret_cast<const Vec<__nv_bfloat16>&>(x));
    store_whole(out + kProductHead / 2, reinterpret_cast<const Vec<__nv_bfloat16>&>(y));
  }
  /// All of a head, whose vectors are first .. first + 3. y: the lane's first element of its first
  /// row; `left`: rows from there on; `weights`: anything for values.
  __device__ void finish_rows(const HeadsInput& input, const HeadReads& reads,
                              const HeadWeights& weights, int first, int head, int c,
                              __nv_bfloat16* y, int64_t stride, int left) {
    const bool norm = head < input.heads.q.count + input.heads.k.count;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      begin_row(input.heads, first, r, norm);
      if (norm) normalise_row(weights, first, r);
      if (8 * r >= left) continue;
      const HeadRow row{head, reads.slot[r], c, y + 8 * r * stride};
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        angles = reads.angles[r][q];
        store_vectors(input, row, first, r, q);
      }
    }
  }

 private:
  /// Two products, rounded: what those of floats would be, which are exact.
  __device__ static uint32_t times(uint32_t x, uint32_t y) {
    const __nv_bfloat162 product = __hmul2_rn(reinterpret_cast<const __nv_bfloat162&>(x),
                                              reinterpret_cast<const __nv_bfloat162&>(y));
    return reinterpret_cast<const uint32_t&>(product);
  }
  /// x: eight elements of a head; y: those 64 behind them.
  __device__ void turn(Words& x, Words& y) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float *cosines = angles.cosine[i / 2].v + i % 2 * 2,
                  *sines = angles.sine[i / 2].v + i % 2 * 2;
      const Pair low = rotate(x.low(i), y.low(i), cosines[0], sines[0]),
                 high = rotate(x.high(i), y.high(i), cosines[1], sines[1]);
      x.pair[i] = pack_bf16(low.first, high.first);
      y.pair[i] = pack_bf16(low.second, high.second);
    }
  }
};

}  // namespace nanovllm
