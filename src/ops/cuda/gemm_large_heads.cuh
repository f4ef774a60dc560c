// The end of a large product whose columns are attention's heads (gemm_large.cuh): Qwen3's norms of
// query and key heads, their rotation, and the store of keys and values into the cache, as
// many_tokens_kernel() computes them (rotary.cuh).
#pragma once

#include "ops/cuda/gemm_large_ends.cuh"
#include "ops/cuda/rotary.cuh"

namespace nanovllm {

constexpr int kLargeHead = 128;  // a head's elements: a tile has two heads

template <>
struct LargeInput<LargeEnd::heads> {
  FusedArguments<__nv_bfloat16> heads;
  int block_shift;  // of the cache's blocks
};

/// The parts of a tile: two heads, in each the two rows of a lane, in each four parts. Of a head's
/// row a lane has four vectors of eight elements, 32 elements apart.
template <>
struct LargeResult<LargeEnd::heads> {
  /// Of the eight elements of a vector.
  struct Angles {
    Vec<float> cosine[2], sine[2];
  };
  using Input = LargeInput<LargeEnd::heads>;
  uint32_t pair[64];            // as the other ends have them
  __nv_bfloat16* to = nullptr;  // likewise
  int row, column;
  int slot, position;  // of the row whose parts come next
  float reciprocal;    // of that row: the norm's factor
  Angles angles;       // of the next vector's elements

  __device__ void take(const float (&sum)[128]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) pair[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
  }
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
    const int first = i / 8 * 4, r = i / 4 % 2, head = column / kLargeHead + i / 8,
              turned = a.q.count + a.k.count;
    if (head >= turned + a.v.count) return;
    const bool mine = row + 8 * r < shape.rows;
    switch (i % 4) {
      case 0:
        begin_row(a, first, r, head < turned);
        break;
      case 1:
        if (head < turned) normalise_row(a, first, r, head);
        angles = load_angles(a, first);
        break;
      case 2:
        if (mine) store_vectors(shape, input, first, r, head);
        angles = load_angles(a, first + 1);
        break;
      default:
        if (mine) store_vectors(shape, input, first + 1, r, head);
        if (i + 1 < kLargeParts) load_place(shape, a, 1 - r);
    }
  }
  /// All parts of the last tile: beside nothing, so that all reads are begun before one is awaited.
  __device__ void store_all(const LargeShape& shape, const Input& input) {
    if (!to) return;
    const FusedArguments<__nv_bfloat16>& a = input.heads;
    const int turned = a.q.count + a.k.count;
    int slots[2];
    Angles all[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      load_place(shape, a, r);
      slots[r] = slot;
#pragma unroll
      for (int q = 0; q < 2; ++q) all[r][q] = load_angles(a, q);
    }
#pragma unroll
    for (int first = 0; first < 8; first += 4) {
      const int head = column / kLargeHead + first / 4;
      if (head >= turned + a.v.count) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        begin_row(a, first, r, head < turned);
        if (head < turned) normalise_row(a, first, r, head);
        slot = slots[r];
        if (row + 8 * r >= shape.rows) continue;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          angles = all[r][q];
          store_vectors(shape, input, first + q, r, head);
        }
      }
    }
  }

 private:
  __device__ void load_place(const LargeShape& shape, const FusedArguments<__nv_bfloat16>& a,
                             int r) {
    const int token = min(row + 8 * r, shape.rows - 1);
    slot = a.slots[token];
    position = a.positions[token];
  }
  __device__ Angles load_angles(const FusedArguments<__nv_bfloat16>& a, int q) const {
    const float* table = a.cos_sin + position * a.table_stride + column % kLargeHead + q % 4 * 32;
    Angles of;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of.cosine[i] = load_vec(table + 4 * i, 4, true);
      of.sine[i] = load_vec(table + kLargeHead / 2 + 4 * i, 4, true);
    }
    return of;
  }
  /// Vectors become whole; with `norm`, the norm's factor.
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
    reciprocal = __frsqrt_rn(__fadd_rn(__fmul_rn(all, 1.0f / kLargeHead), a.eps));
  }
  /// The vectors of the lane's row r become those of a normalised head.
  __device__ void normalise_row(const FusedArguments<__nv_bfloat16>& a, int first, int r,
                                int head) {
    const __nv_bfloat16* weights = head < a.q.count ? a.q_norm : a.k_norm;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const Words weight = Words::at(weights + column % kLargeHead + q * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t& x = pair[2 * (4 * (first + q) + i) + r];
        x = times(weight.pair[i], pack_bf16(low_of(x) * reciprocal, high_of(x) * reciprocal));
      }
    }
  }
  /// Two products, rounded: what those of floats would be, which are exact.
  __device__ static uint32_t times(uint32_t x, uint32_t y) {
    const __nv_bfloat162 product = __hmul2_rn(reinterpret_cast<const __nv_bfloat162&>(x),
                                              reinterpret_cast<const __nv_bfloat162&>(y));
    return reinterpret_cast<const uint32_t&>(product);
  }
  /// Vector q of the lane's row r and the one 64 elements behind it, which are turned together.
  __device__ void store_vectors(const LargeShape& shape, const Input& input, int q, int r,
                                int head) {
    const FusedArguments<__nv_bfloat16>& a = input.heads;
    constexpr int kHalf = kLargeHead / 2;
    const int c = column % kLargeHead + q % 4 * 32, key = head - a.q.count, value = key - a.k.count;
    __nv_bfloat16* out = to + 8 * r * shape.stride + 32 * q;
    if (key >= 0) {
      if (slot < 0) return;
      const Pages& pages = value < 0 ? a.k_pages : a.v_pages;
      const int in_block = slot & ((1 << input.block_shift) - 1);
      out = (value < 0 ? a.k_cache : a.v_cache) + (slot >> input.block_shift) * pages.block_stride +
            (value < 0 ? key : value) * pages.head_stride + in_block * kLargeHead + c;
    }
    Words x, y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x.pair[i] = pair[2 * (4 * q + i) + r];
      y.pair[i] = pair[2 * (4 * q + 8 + i) + r];
    }
    if (value < 0) turn(x, y);
    store_whole(out, reinterpret_cast<const Vec<__nv_bfloat16>&>(x));
    store_whole(out + kHalf, reinterpret_cast<const Vec<__nv_bfloat16>&>(y));
  }
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
