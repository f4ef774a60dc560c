// bf16 attention on tensor cores. One block has 64 packed query rows of one KV head (query rows
// times the heads of its group, so that decode of 8 grouped heads fills 8 rows of a tile with one
// read of K and V) and walks keys in tiles of 64: S = Q K^T, online softmax, O += P V, in
// registers. K and V arrive by cp.async, one tile ahead where two fit.
//
// Reading K and V from shared memory takes warps longer than their products: 512 bytes for two
// of 16 x 8 x 16. So queries stay in registers, and the result of earlier chunks does not.
#pragma once

#include "ops/cuda/attention/attention_mma_rows.cuh"

namespace nanovllm {

/// A warp's scores of a tile: [8 keys][elements of mma's result].
using TileScores = float[kTileKeys / 8][4];

/// score += q k^T.
template <int kHeadDim>
__device__ __forceinline__ void score_keys(TileScores& score,
                                           const AttentionTile<kHeadDim, __nv_bfloat16>& tile,
                                           int stage,
                                           const Queries<kHeadDim, __nv_bfloat16>& queries) {
  using Rows = TileRows<kHeadDim>;
  const int lane = threadIdx.x % kWarp;
  const uint32_t keys =
      shared_address(tile.k[stage]) + Rows::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t q[4];
    queries.get(q, step);
    const uint32_t place = Rows::further(keys, 2 * step);
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; j += 2) {
      uint32_t k[4];
      load_matrices(k, place + j * 8 * Rows::kBytes);
      mma_m16n8k16(score[j], q, k[0], k[1]);
      mma_m16n8k16(score[j + 1], q, k[2], k[3]);
    }
  }
}

template <int kHeadDim>
__device__ __forceinline__ void score_keys(TileScores& score,
                                           const AttentionTile<kHeadDim, E4m3>& tile, int stage,
                                           const Queries<kHeadDim, E4m3>& queries) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t q[4];
    queries.get(q, step);
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; j += 4) {
      uint32_t k[4];
      load_matrices(k, shared_address(tile.k[stage]) + tile.place(8 * j + lane, step));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t even, odd;
        widen_e4m3(k[i], even, odd);
        mma_m16n8k16(score[j + i], q, even, odd);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kTileKeys / 8; ++j) {
    const float2 scale =
        *reinterpret_cast<const float2*>(&tile.k_scale[stage][8 * j + lane % 4 * 2]);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      score[j][e] = __fmul_rn(score[j][e], e % 2 == 0 ? scale.x : scale.y);
  }
}

/// Scores of keys that a row does not see become -inf: row r sees the keys lowest[r] .. limit[r] -
/// 1 of the tile.
__device__ __forceinline__ void mask_keys(TileScores& score, const int (&lowest)[2],
                                          const int (&limit)[2]) {
  const bool sees_all = max(lowest[0], lowest[1]) <= 0 && min(limit[0], limit[1]) >= kTileKeys;
  if (__all_sync(kFullMask, sees_all)) return;
#pragma unroll
  for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = 8 * j + threadIdx.x % 4 * 2 + e % 2;
      if (key < lowest[e / 2] || key >= limit[e / 2]) score[j][e] = kMinusInfinity;
    }
}

/// The scores become weights, and are added to the rows' sums; the rows' results of before become
/// what they are worth now.
template <int kHeadDim>
__device__ __forceinline__ void weigh_keys(RowState<kHeadDim>& state, TileScores& score,
                                           float scale_log2) {
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float maximum = kMinusInfinity;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) maximum = fmaxf(maximum, score[j][2 * r + e]);
    state.base[r] = next_base(state.base[r], quad_max(maximum), scale_log2, factor[r]);
    const float base = finite_or_zero(state.base[r]);
    float group[4];
#pragma unroll
    for (int g = 0; g < 4; ++g) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = score[2 * g + e / 2][2 * r + e % 2];
        s = weight_of(s, base, scale_log2);
      }
      group[g] = group_sum(score[2 * g][2 * r], score[2 * g][2 * r + 1], score[2 * g + 1][2 * r],
                           score[2 * g + 1][2 * r + 1]);
    }
    state.sum[r] =
        __fmaf_rn(state.sum[r], factor[r], tile_sum(group[0], group[1], group[2], group[3]));
  }
  if (__any_sync(kFullMask, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.out[j][e] = __fmul_rn(state.out[j][e], factor[e / 2]);
  }
}

/// out += weights v.
template <int kHeadDim>
__device__ __forceinline__ void add_values(RowState<kHeadDim>& state, const TileScores& weights,
                                           const AttentionTile<kHeadDim, __nv_bfloat16>& tile,
                                           int stage) {
  using Rows = TileRows<kHeadDim>;
  const int lane = threadIdx.x % kWarp;
  const uint32_t values = shared_address(tile.v[stage]) + Rows::place(lane % 16, lane / 16);
#pragma unroll
  for (int kk = 0; kk < kTileKeys / 16; ++kk) {
    const float(&low)[4] = weights[2 * kk], (&high)[4] = weights[2 * kk + 1];
    const uint32_t p[4] = {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]),
                           pack_bf16(high[0], high[1]), pack_bf16(high[2], high[3])};
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 2) {
      uint32_t v[4];
      load_matrices_transposed(v, Rows::further(values, j) + kk * 16 * Rows::kBytes);
      mma_m16n8k16(state.out[j], p, v[0], v[1]);
      mma_m16n8k16(state.out[j + 1], p, v[2], v[3]);
    }
  }
}

/// Afterwards a lane has the elements 16 i + 4 t, + 2 (of mma's first product), + 1 and + 3.
template <int kHeadDim>
__device__ __forceinline__ void add_values(RowState<kHeadDim>& state, const TileScores& weights,
                                           const AttentionTile<kHeadDim, E4m3>& tile, int stage) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int first = 0; first < kTileKeys; first += 32) {
    uint32_t p[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = first / 8 + i;
      const float2 scale =
          *reinterpret_cast<const float2*>(&tile.v_scale[stage][8 * j + lane % 4 * 2]);
      const float(&w)[4] = weights[j];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        p[i / 2][i % 2 * 2 + r] =
            pack_bf16(scaled_weight(w[2 * r], scale.x), scaled_weight(w[2 * r + 1], scale.y));
    }
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 2) {
      uint32_t v[4], even[4], odd[4];
      load_matrices_transposed(v,
                               shared_address(tile.v[stage]) + tile.place(first + lane, 0) + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) widen_e4m3(v[i], even[i], odd[i]);
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        mma_m16n8k16(state.out[j], p[g], even[2 * g], even[2 * g + 1]);
        mma_m16n8k16(state.out[j + 1], p[g], odd[2 * g], odd[2 * g + 1]);
      }
    }
  }
}

/// The first element that a lane has of a row.
template <class C>
__device__ int first_element() {
  return threadIdx.x % 4 * (is_e4m3<C> ? 4 : 2);
}
/// Calls put(distance from the lane's first element, first, second) for the neighbouring elements
/// that a lane has of its row r.
template <class C, int kHeadDim, class Put>
__device__ __forceinline__ void for_each_pair(const float (&values)[kHeadDim / 8][4], int r,
                                              Put&& put) {
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j)
    if constexpr (is_e4m3<C>)
      put(8 * j - j % 2 * 6, values[j - j % 2][2 * r + j % 2],
          values[j - j % 2 + 1][2 * r + j % 2]);
    else
      put(8 * j, values[j][2 * r], values[j][2 * r + 1]);
}

/// Adds one tile of keys. Row r sees those with an index in its tile from lowest[r] to limit[r]
/// - 1.
template <int kHeadDim, class C>
__device__ __forceinline__ void add_tile(RowState<kHeadDim>& state,
                                         const AttentionTile<kHeadDim, C>& tile, int stage,
                                         const Queries<kHeadDim, C>& queries,
                                         const int (&lowest)[2], const int (&limit)[2],
                                         float scale_log2) {
  TileScores score = {};
  score_keys(score, tile, stage, queries);
  mask_keys(score, lowest, limit);
  weigh_keys(state, score, scale_log2);
  add_values(state, score, tile, stage);
}

/// This lane's part of row `row`, its index `r`, as the chunk's partial result.
template <class C, int kHeadDim>
__device__ void store_partial(const RowState<kHeadDim>& state,
                              const AttentionArguments<__nv_bfloat16>& a, const RowTile& mine,
                              int row, int r, int chunk) {
  const int lane = threadIdx.x % kWarp;
  const int64_t slot = (mine.token(row) * a.num_heads + mine.head(row)) * a.max_chunks + chunk;
  if (lane % 4 == 0) a.partial_sum[slot] = {state.base[r], state.sum[r]};
  float* out = a.partial_out + slot * kHeadDim + first_element<C>();
  for_each_pair<C, kHeadDim>(state.out, r, [&](int i, float x, float y) {
    *reinterpret_cast<float2*>(out + i) = {x, y};
  });
}

/// The same part of the final result.
template <class C, int kHeadDim>
__device__ void store_output(const RowState<kHeadDim>& state,
                             const AttentionArguments<__nv_bfloat16>& a, const RowTile& mine,
                             int row, int r) {
  __nv_bfloat16* out = a.out + mine.token(row) * a.out_token_stride +
                       mine.head(row) * a.out_head_stride + first_element<C>();
  for_each_pair<C, kHeadDim>(state.out, r, [&](int i, float x, float y) {
    *reinterpret_cast<uint32_t*>(out + i) =
        pack_bf16(finish(x, state.merged_sum[r]), finish(y, state.merged_sum[r]));
  });
}

/// This lane's parts of its rows that see keys from `begin` on.
template <bool kSplit, class C, int kHeadDim>
__device__ __forceinline__ void store_rows(const RowState<kHeadDim>& state,
                                           const AttentionArguments<__nv_bfloat16>& a,
                                           const RowTile& mine, const int (&row)[2],
                                           const int (&position)[2], int begin, int chunk) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (position[r] < 0 || (kSplit && position[r] < begin)) continue;
    if constexpr (kSplit)
      store_partial<C>(state, a, mine, row[r], r, chunk);
    else
      store_output<C>(state, a, mine, row[r], r);
  }
}

/// kSplit: a block does one chunk and leaves partial results; else it does all chunks of its rows
/// and writes the output, the longest rows first. Grid: row tiles (times chunks) of a sequence, KV
/// heads, sequences.
template <int kHeadDim, bool kSplit, class C>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_mma_kernel(const AttentionArguments<__nv_bfloat16> a) {
  using Tile = AttentionTile<kHeadDim, C>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Tile& tile = *reinterpret_cast<Tile*>(shared);
  const int s = blockIdx.z, kv_head = blockIdx.y, chunk = kSplit ? blockIdx.x % a.max_chunks : 0;
  const RowTile mine(a, s, kv_head,
                     kSplit ? blockIdx.x / a.max_chunks : gridDim.x - 1 - blockIdx.x);
  if (mine.rows <= 0) return;
  // The keys that some row of the tile sees: low .. key_end.
  const int low = first_key(mine.position(0), a.window),
            key_end = mine.position(min(kTileRows, mine.rows) - 1) + 1;
  const int begin = max(chunk * kChunk, low / kTileKeys * kTileKeys);
  const int end = kSplit ? min((chunk + 1) * kChunk, key_end) : key_end;
  if (begin >= end) return;
  const KeyRange keys{s, kv_head, low, end};
  load_keys_and_values(tile, 0, a, keys, begin);
  load_queries(tile, a, mine);

  // The rows of a warp vary with the block: decode fills one warp's rows, and not always
  // those of the same scheduler.
  const int warp = (threadIdx.x / kWarp + blockIdx.x + blockIdx.y) % kAttentionWarps,
            warp_row = warp * kWarpRows;
  const int lane_row = warp_row + static_cast<int>(threadIdx.x % kWarp) / 4;
  const int row[2] = {lane_row, lane_row + 8};
  const int position[2] = {mine.position(row[0]), mine.position(row[1])};
  const int lowest[2] = {first_key(position[0], a.window), first_key(position[1], a.window)};
  // Keys before and from here on are masked for all rows of the warp.
  const int warp_low = first_key(mine.position(warp_row), a.window),
            warp_end =
                warp_row < mine.rows ? mine.position(min(warp_row + 15, mine.rows - 1)) + 1 : 0;
  RowState<kHeadDim> state;
  state.start();
  Queries<kHeadDim, C> queries(tile, warp_row);
  Results<kHeadDim> results(tile.results(warp));
  int stage = 0;
  for (int first = begin; first < end; first += kTileKeys) {
    const int next = first + kTileKeys;
    wait_copies<0>();
    // The tile of all threads is there, q the first time, and all have read the tile before.
    __syncthreads();
    if (first == begin) queries.keep();
    if (Tile::kStages > 1 && next < end) load_keys_and_values(tile, stage ^ 1, a, keys, next);
    if (next > warp_low && first < warp_end) {
      const int from[2] = {lowest[0] - first, lowest[1] - first},
                to[2] = {position[0] + 1 - first, position[1] + 1 - first};
      add_tile(state, tile, stage, queries, from, to, a.scale_log2);
    }
    const bool chunk_ends = next % kChunk == 0 || next >= end;
    if (!kSplit && chunk_ends && first / kChunk * kChunk < warp_end) {
      state.finish_chunk();
      state.merge_chunk(results, a.scale_log2);
      if (next < warp_end) {
        state.keep_merged(results);
        state.start_chunk();
      }
    }
    if (Tile::kStages > 1) {
      stage ^= 1;
    } else if (next < end) {
      __syncthreads();  // all have read the tile
      load_keys_and_values(tile, 0, a, keys, next);
    }
  }
  if (warp_end == 0) return;
  if (kSplit) state.finish_chunk();
  store_rows<kSplit, C>(state, a, mine, row, position, begin, chunk);
}

/// Merges the chunks of a split row in order. Grid: tokens, heads; a thread has one element.
template <int kHeadDim>
__global__ void attention_merge_kernel(const AttentionArguments<__nv_bfloat16> a) {
  const int token = blockIdx.x, head = blockIdx.y,
            s = sequence_of(a.cu_seqlens_q, a.num_seqs, token);
  if (s < 0 || token < a.cu_seqlens_q[s]) return;
  const int position = a.context_lens[s] - (a.cu_seqlens_q[s + 1] - token);
  if (position < 0) return;  // padding
  const int64_t first = (int64_t{token} * a.num_heads + head) * a.max_chunks;
  float value = 0.0f, base = kMinusInfinity, sum = 0.0f;
  for (int chunk = first_key(position, a.window) / kChunk; chunk <= position / kChunk; ++chunk) {
    const float2 partial = a.partial_sum[first + chunk];
    const Merge merge(base, sum, partial.x, partial.y, a.scale_log2);
    value = merge(value, a.partial_out[(first + chunk) * kHeadDim + threadIdx.x]);
    base = merge.base;
    sum = merge.sum;
  }
  a.out[token * a.out_token_stride + head * a.out_head_stride + threadIdx.x] =
      __float2bfloat16_rn(finish(value, sum));
}

}  // namespace nanovllm
