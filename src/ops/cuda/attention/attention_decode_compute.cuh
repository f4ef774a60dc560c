// The warps of the decode kernel that compute: one unit, from the ring to its result.
#pragma once

#include "ops/cuda/attention/attention_decode_work.cuh"

namespace nanovllm {

__device__ inline void sync_computing() { sync_threads<1, kDecodeWarps * kWarp>(); }

/// A warp's state of the pair (sequence, KV head) it is at: the result of the chunks so far for
/// its part of the head's elements. A lane has rows lane / 4 and, with two of them, 8 below.
template <int kHeadDim, int kRows>
struct PairState {
  /// Sixteen elements at a time, dealt out to the warps in turn.
  static constexpr int kParts = (kHeadDim / 16 + kDecodeWarps - 1) / kDecodeWarps;
  using Part = float[2][4];  // two products of 8 elements
  Part merged[kParts];
  float base[kRows], sum[kRows];

  __device__ void start() {
#pragma unroll
    for (int i = 0; i < kParts; ++i)
#pragma unroll
      for (int e = 0; e < 8; ++e) merged[i][e / 4][e % 4] = 0.0f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      base[r] = kMinusInfinity;
      sum[r] = 0.0f;
    }
  }
};

/// One chunk's own result, in the same lanes.
template <int kHeadDim, int kRows>
struct ChunkState {
  static constexpr int kParts = PairState<kHeadDim, kRows>::kParts;
  typename PairState<kHeadDim, kRows>::Part out[kParts];
  float base[kRows], sum[kRows];

  __device__ void rescale(const float (&factor)[kRows]) {
    bool changes = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) changes |= factor[r] != 1.0f;
    if (!__any_sync(kFullMask, changes)) return;
#pragma unroll
    for (int i = 0; i < kParts; ++i)
#pragma unroll
      for (int e = 0; e < 4 * kRows; ++e) {
        float& value = out[i][e / (2 * kRows)][e % (2 * kRows)];
        value = __fmul_rn(value, factor[e % (2 * kRows) / 2]);
      }
  }
  __device__ void merge_into(PairState<kHeadDim, kRows>& pair, float scale_log2) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Merge merge(pair.base[r], pair.sum[r], base[r], sum[r], scale_log2);
#pragma unroll
      for (int i = 0; i < kParts; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e)
            pair.merged[i][j][e] = merge(pair.merged[i][j][e], out[i][j][e]);
      pair.base[r] = merge.base;
      pair.sum[r] = merge.sum;
    }
  }
};

/// The scores of the warp's 32 keys, those from `row` of a tile, with all queries.
template <int kHeadDim, int kRows>
__device__ void multiply_keys(float (&score)[4][4],
                              const __nv_bfloat16 (*query)[query_pitch(kHeadDim)],
                              const DecodeTile<kHeadDim, __nv_bfloat16>& tile, int row) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 16) {
    uint32_t q[4] = {};
    if constexpr (kRows == 2)
      load_matrices(q, &query[lane % 16][k + lane / 16 * 8]);
    else
      load_two_matrices(q[0], q[2], &query[lane % 8][k + lane / 8 % 2 * 8]);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      uint32_t b[4];
      load_matrices(b, tile.part(row + 8 * j + lane / 16 * 8 + lane % 8, k, lane / 8 % 2));
      mma_m16n8k16(score[j], q, b[0], b[1]);
      mma_m16n8k16(score[j + 1], q, b[2], b[3]);
    }
  }
}
template <int kHeadDim, int kRows>
__device__ void multiply_keys(float (&score)[4][4],
                              const __nv_bfloat16 (*query)[query_pitch(kHeadDim)],
                              const DecodeTile<kHeadDim, E4m3>& tile, int row) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 16) {
    uint32_t q[4] = {}, b[4];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      in_widened_order(*reinterpret_cast<const uint2*>(&query[lane / 4 + 8 * r][k + lane % 4 * 4]),
                       q[r], q[2 + r]);
    load_matrices(b, reinterpret_cast<const __nv_bfloat16*>(tile.part(row + lane, k)));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t even, odd;
      widen_e4m3(b[j], even, odd);
      mma_m16n8k16(score[j], q, even, odd);
    }
  }
}

/// Scores of the warp's 32 keys (those from 32 * warp of the chunk) that are not seen become -inf.
__device__ inline void mask_keys(float (&score)[4][4], const UnitKeys& unit, int warp) {
  const int lane = threadIdx.x % kWarp;
  if (unit.begin <= 32 * warp && 32 * warp + 32 <= unit.end) return;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = 32 * warp + 8 * j + lane % 4 * 2 + e % 2;
      if (key < unit.begin || key >= unit.end) score[j][e] = kMinusInfinity;
    }
}

/// The scales of a lane's keys, and of their values, where they are E4M3.
template <class C>
struct LaneScales {
  template <class Exchange>
  __device__ void take(float (&)[4][4], const Exchange&, int, int) {}
  __device__ float weigh(float weight, int, int) const { return weight; }
};
template <>
struct LaneScales<E4m3> {
  float2 value[4] = {};
  /// Multiplies the scores of the 32 keys from `row` of a stage.
  __device__ void take(float (&score)[4][4], const StageScales<E4m3>& scales, int stage, int row) {
    const int first = row + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 key = *reinterpret_cast<const float2*>(&scales.k_scale[stage][first + 8 * j]);
      value[j] = *reinterpret_cast<const float2*>(&scales.v_scale[stage][first + 8 * j]);
#pragma unroll
      for (int e = 0; e < 4; ++e) score[j][e] = __fmul_rn(score[j][e], e % 2 == 0 ? key.x : key.y);
    }
  }
  /// The weight of key 8 j + e of the lane for its value.
  __device__ float weigh(float weight, int j, int e) const {
    return scaled_weight(weight, e == 0 ? value[j].x : value[j].y);
  }
};

/// Leaves the weights of the warp's keys and their sums to the others.
template <int kHeadDim, int kRows, class C>
__device__ void share_weights(DecodeExchange<kHeadDim, kRows, C>& exchange, float (&score)[4][4],
                              const LaneScales<C>& scales, const float (&base)[kRows], int warp,
                              float scale_log2) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float group[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = score[2 * g + e / 2][2 * r + e % 2];
        s = weight_of(s, base[r], scale_log2);
      }
      const float(&low)[4] = score[2 * g], (&high)[4] = score[2 * g + 1];
      group[g] = group_sum(low[2 * r], low[2 * r + 1], high[2 * r], high[2 * r + 1]);
      uint32_t* weights = exchange.weights[2 * warp + g][lane];
      const auto pack = [&](const float(&w)[4], int j) {
        return pack_bf16(scales.weigh(w[2 * r], j, 0), scales.weigh(w[2 * r + 1], j, 1));
      };
      weights[r] = pack(low, 2 * g);
      weights[kRows + r] = pack(high, 2 * g + 1);
    }
    exchange.sum[warp][r][lane] = __fadd_rn(group[0], group[1]);
  }
}

/// Zeros for values of keys that are not seen, whatever lies there: of keys first, first + 1 (in
/// the lower and the upper half of v[0] and v[2]) and 8 behind them (v[1] and v[3]).
__device__ inline void clear_unseen(uint32_t (&v)[4], const UnitKeys& unit, int first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first + 8 * half;
    const uint32_t mask = (unit.begin <= key && key < unit.end ? 0xffffu : 0u) |
                          (unit.begin <= key + 1 && key + 1 < unit.end ? 0xffff0000u : 0u);
    v[half] &= mask;
    v[2 + half] &= mask;
  }
}

/// Adds a tile's weighted values, of the elements that are this warp's.
template <int kHeadDim, int kRows>
__device__ void add_values(ChunkState<kHeadDim, kRows>& chunk,
                           const DecodeTile<kHeadDim, __nv_bfloat16>& tile,
                           const DecodeExchange<kHeadDim, kRows, __nv_bfloat16>& exchange,
                           const UnitKeys& unit, int index, int warp) {
  const int lane = threadIdx.x % kWarp, first = index * kTileKeys;
  const auto add = [&](auto is_whole) {
#pragma unroll
    for (int g = 0; g < kTileKeys / 16; ++g) {
      const int key = first + 16 * g;
      if (!is_whole && (key + 16 <= unit.begin || unit.end <= key)) continue;
      uint32_t p[4] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        p[r] = exchange.weights[key / 16][lane][r];
        p[2 + r] = exchange.weights[key / 16][lane][kRows + r];
      }
#pragma unroll
      for (int i = 0; i < chunk.kParts; ++i) {
        const int part = warp + i * kDecodeWarps;
        if (part >= kHeadDim / 16) break;
        uint32_t v[4];
        load_matrices_transposed(v, tile.part(16 * g + lane % 16, 16 * part, lane / 16));
        if (!is_whole) clear_unseen(v, unit, key + lane % 4 * 2);
        mma_m16n8k16(chunk.out[i][0], p, v[0], v[1]);
        mma_m16n8k16(chunk.out[i][1], p, v[2], v[3]);
      }
    }
  };
  if (unit.begin <= first && first + kTileKeys <= unit.end)
    add(std::true_type{});  // no branches: loads overlap
  else
    add(std::false_type{});
}

/// Afterwards a lane has the elements 4 t, + 2 (of the first product), + 1 and + 3 of each part.
/// Values that no row sees are any numbers, and their weights are zero.
template <int kHeadDim, int kRows>
__device__ void add_values(ChunkState<kHeadDim, kRows>& chunk,
                           const DecodeTile<kHeadDim, E4m3>& tile,
                           const DecodeExchange<kHeadDim, kRows, E4m3>& exchange, const UnitKeys&,
                           int index, int warp) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int first = 0; first < kTileKeys; first += 32) {
    const int key = index * kTileKeys + first;
    uint32_t p[2][4] = {};
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        p[g][r] = exchange.weights[key / 16 + g][lane][r];
        p[g][2 + r] = exchange.weights[key / 16 + g][lane][kRows + r];
      }
#pragma unroll
    for (int i = 0; i < chunk.kParts; ++i) {
      const int part = warp + i * kDecodeWarps;
      if (part >= kHeadDim / 16) break;
      uint32_t v[4], even[4], odd[4];
      load_matrices_transposed(
          v, reinterpret_cast<const __nv_bfloat16*>(tile.part(first + lane, 16 * part)));
#pragma unroll
      for (int m = 0; m < 4; ++m) widen_e4m3(v[m], even[m], odd[m]);
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        mma_m16n8k16(chunk.out[i][0], p[g], even[2 * g], even[2 * g + 1]);
        mma_m16n8k16(chunk.out[i][1], p[g], odd[2 * g], odd[2 * g + 1]);
      }
    }
  }
}

/// Sums so far are multiplied with this before the tile is added, row by row.
template <int kRows>
using TileFactors = float[kChunkTiles][kRows];

/// Scores the warp's keys of a unit whose first stage is at `place`, gives their stage back, and
/// tells the others their maximum.
template <int kHeadDim, int kRows, class C>
__device__ void score_unit(float (&score)[4][4], LaneScales<C>& scales, int query,
                           const UnitKeys& unit, RingCursor place, int stages,
                           const DecodeTile<kHeadDim, C>* ring,
                           DecodeExchange<kHeadDim, kRows, C>& exchange) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int tile = warp / kTileWarps - unit.first_tile;
  const bool in_unit =
      0 <= tile && tile<unit.tiles, seen = 32 * warp + 32> unit.begin && 32 * warp < unit.end;
#pragma unroll
  for (int e = 0; e < 16; ++e) score[e / 4][e % 4] = seen ? 0.0f : kMinusInfinity;
  if (in_unit) {
    const RingCursor mine = place.plus(tile, stages);
    wait_barrier(&exchange.full[mine.stage], mine.parity);
    if (seen) {
      const int row = warp % kTileWarps * 32;
      multiply_keys<kHeadDim, kRows>(score, exchange.query[query], ring[mine.stage], row);
      scales.take(score, exchange, mine.stage, row);
      mask_keys(score, unit, warp);
    }
    __syncwarp();
    if (lane < kDecodeWarps / kTileWarps) arrive(&exchange.empty[mine.stage]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float maximum = kMinusInfinity;
#pragma unroll
    for (int e = 0; e < 8; ++e) maximum = fmaxf(maximum, score[e / 2][2 * r + e % 2]);
    maximum = quad_max(maximum);
    if (lane % 4 == 0) exchange.maximum[lane / 4 + 8 * r][warp] = maximum;
  }
}

/// From all warps' maxima: the bases and factors of the chunk's tiles, and from those the weights
/// of the warp's keys.
template <int kHeadDim, int kRows, class C>
__device__ void weigh_unit(float (&score)[4][4], const LaneScales<C>& scales,
                           ChunkState<kHeadDim, kRows>& chunk, TileFactors<kRows>& factor,
                           DecodeExchange<kHeadDim, kRows, C>& exchange, float scale_log2) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float mine[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    chunk.base[r] = kMinusInfinity;
    const float* maxima = exchange.maximum[lane / 4 + 8 * r];
#pragma unroll
    for (int t = 0; t < kChunkTiles; ++t) {
      chunk.base[r] = next_base(chunk.base[r], fmaxf(maxima[2 * t], maxima[2 * t + 1]), scale_log2,
                                factor[t][r]);
      if (t == warp / kTileWarps) mine[r] = finite_or_zero(chunk.base[r]);
    }
  }
  share_weights(exchange, score, scales, mine, warp, scale_log2);
}

/// The chunk's sums, and its output for the warp's elements; its first values are at `place`.
template <int kHeadDim, int kRows, class C>
__device__ void sum_unit(ChunkState<kHeadDim, kRows>& chunk, const TileFactors<kRows>& factor,
                         const UnitKeys& unit, RingCursor place, int stages,
                         const DecodeTile<kHeadDim, C>* ring,
                         DecodeExchange<kHeadDim, kRows, C>& exchange) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int t = 0; t < kChunkTiles; ++t)
      chunk.sum[r] =
          __fmaf_rn(chunk.sum[r], factor[t][r],
                    __fadd_rn(exchange.sum[2 * t][r][lane], exchange.sum[2 * t + 1][r][lane]));
    chunk.sum[r] = quad_sum(chunk.sum[r]);
  }
#pragma unroll
  for (int t = 0; t < kChunkTiles; ++t) {
    if (t < unit.first_tile || t >= unit.first_tile + unit.tiles) continue;
    wait_barrier(&exchange.full[place.stage], place.parity);
    chunk.rescale(factor[t]);
    add_values(chunk, ring[place.stage], exchange, unit, t, warp);
    __syncwarp();
    if (lane == 0) arrive(&exchange.empty[place.stage]);
    place = place.plus(1, stages);
  }
}

/// One unit, whose first stage is at `place`. `query`: where its queries are.
template <int kHeadDim, int kRows, class C>
__device__ ChunkState<kHeadDim, kRows> compute_unit(int query, bool is_last_of_pair,
                                                    const UnitKeys& unit, RingCursor place,
                                                    int stages, const DecodeTile<kHeadDim, C>* ring,
                                                    DecodeExchange<kHeadDim, kRows, C>& exchange,
                                                    float scale_log2) {
  float score[4][4];
  LaneScales<C> scales;
  score_unit(score, scales, query, unit, place, stages, ring, exchange);
  sync_computing();  // maxima are there, and old weights no longer needed
  if (is_last_of_pair && threadIdx.x < kDecodeWarps) arrive(&exchange.query_empty[query]);
  ChunkState<kHeadDim, kRows> chunk{};
  TileFactors<kRows> factor;
  weigh_unit(score, scales, chunk, factor, exchange, scale_log2);
  sync_computing();  // weights and their sums are there
  sum_unit(chunk, factor, unit, place.plus(unit.tiles, stages), stages, ring, exchange);
  return chunk;
}

}  // namespace nanovllm
