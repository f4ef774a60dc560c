// bf16 attention on tensor cores. One block has 64 packed query rows of one KV head (query rows
// times the heads of its group, so that decode of 8 grouped heads fills 8 rows of a tile with one
// read of K and V) and walks keys in tiles of 64: S = Q K^T, online softmax, O += P V, all in
// registers; K and V tiles arrive by cp.async, one tile ahead where two fit.
#pragma once

#include "ops/cuda/attention.cuh"
#include "ops/cuda/mma.cuh"

namespace nanovllm {

constexpr int kTileRows = 64;
constexpr int kAttentionThreads = 128;  // four warps of 16 rows

template <int kHeadDim>
struct AttentionTile {
  // An odd number of 16-byte units: ldmatrix meets no bank twice.
  static constexpr int kPitch = kHeadDim + 8;
  static constexpr int kStages = kHeadDim > 128 ? 1 : 2;
  __nv_bfloat16 q[kTileRows][kPitch];
  __nv_bfloat16 k[kStages][kTileKeys][kPitch], v[kStages][kTileKeys][kPitch];
};

/// A warp's 16 rows: their scores, their running softmax within a chunk, and the result of the
/// chunks before it. Every lane has two of the rows (lane / 4 and 8 below it), index 0 and 1 here.
template <int kHeadDim>
struct RowState {
  float out[kHeadDim / 8][4], merged[kHeadDim / 8][4];
  float maximum[2], sum[2], merged_maximum[2], merged_sum[2];

  __device__ void start_chunk() {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[j][e] = 0.0f;
    maximum[0] = maximum[1] = kMinusInfinity;
    sum[0] = sum[1] = 0.0f;
  }
  __device__ void start() {
    start_chunk();
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) merged[j][e] = 0.0f;
    merged_maximum[0] = merged_maximum[1] = kMinusInfinity;
    merged_sum[0] = merged_sum[1] = 0.0f;
  }
  /// The sum over the row's four lanes: the chunk's sum is complete with it.
  __device__ void finish_chunk() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kFullMask, sum[r], 1);
      sum[r] += __shfl_xor_sync(kFullMask, sum[r], 2);
    }
  }
  __device__ void merge_chunk(float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Merge merge(merged_maximum[r], merged_sum[r], maximum[r], sum[r], scale_log2);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          merged[j][2 * r + e] = merge(merged[j][2 * r + e], out[j][2 * r + e]);
      merged_maximum[r] = merge.maximum;
      merged_sum[r] = merge.sum;
    }
  }
};

/// Adds one tile of keys. `limit[r]`: the tile's keys at this index and past it are masked for row
/// r.
template <int kHeadDim>
__device__ void add_tile(RowState<kHeadDim>& state, const AttentionTile<kHeadDim>& tile, int stage,
                         int warp_row, const int (&limit)[2], float scale_log2) {
  const int lane = threadIdx.x % kWarp;
  float score[kTileKeys / 8][4] = {};
#pragma unroll
  for (int kk = 0; kk < kHeadDim; kk += 16) {
    uint32_t q[4];
    load_matrices(q, &tile.q[warp_row + lane % 16][kk + lane / 16 * 8]);
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; j += 2) {
      uint32_t k[4];
      load_matrices(k, &tile.k[stage][8 * j + lane / 16 * 8 + lane % 8][kk + lane / 8 % 2 * 8]);
      mma_m16n8k16(score[j], q, k[0], k[1]);
      mma_m16n8k16(score[j + 1], q, k[2], k[3]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float maximum = state.maximum[r];
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = score[j][2 * r + e];
        if (8 * j + lane % 4 * 2 + e >= limit[r]) s = kMinusInfinity;
        maximum = fmaxf(maximum, s);
      }
    maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, 2));
    const float base = finite_or_zero(maximum),
                factor = rescaling(state.maximum[r], base, scale_log2);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = score[j][2 * r + e];
        s = weight_of(s, base, scale_log2);
        sum = __fadd_rn(sum, s);
      }
    state.maximum[r] = maximum;
    state.sum[r] = __fmaf_rn(state.sum[r], factor, sum);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        state.out[j][2 * r + e] = __fmul_rn(state.out[j][2 * r + e], factor);
  }
#pragma unroll
  for (int kk = 0; kk < kTileKeys / 16; ++kk) {
    const float(&low)[4] = score[2 * kk], (&high)[4] = score[2 * kk + 1];
    const uint32_t p[4] = {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]),
                           pack_bf16(high[0], high[1]), pack_bf16(high[2], high[3])};
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 2) {
      uint32_t v[4];
      load_matrices_transposed(v, &tile.v[stage][16 * kk + lane % 16][8 * j + lane / 16 * 8]);
      mma_m16n8k16(state.out[j], p, v[0], v[1]);
      mma_m16n8k16(state.out[j + 1], p, v[2], v[3]);
    }
  }
}

/// The keys first .. first + 64 of the sequence, zeros from `end` on: a masked key must be finite,
/// whatever lies in its slot.
template <int kHeadDim>
__device__ void load_keys(AttentionTile<kHeadDim>& tile, int stage,
                          const AttentionArguments<__nv_bfloat16>& a, int s, int kv_head, int first,
                          int end) {
  constexpr int kParts = kHeadDim / 8;
  for (int i = threadIdx.x; i < kTileKeys * kParts; i += kAttentionThreads) {
    const int row = i / kParts, c = i % kParts * 8, position = first + row;
    const bool valid = position < end;
    const __nv_bfloat16 *k = a.k, *v = a.v;
    if (valid) {
      k += key_offset(a, s, position, a.k_block_stride, kHeadDim) + kv_head * a.k_head_stride + c;
      v += key_offset(a, s, position, a.v_block_stride, kHeadDim) + kv_head * a.v_head_stride + c;
    }
    copy_async(&tile.k[stage][row][c], k, valid);
    copy_async(&tile.v[stage][row][c], v, valid);
  }
}

/// Which rows a block has: 64 of a sequence's packed rows, query by query, the heads of the group
/// within. Row numbers below count from the tile's first row.
struct RowTile {
  int first_token, first_position, first_row, group, first_head, rows;

  __device__ RowTile(const AttentionArguments<__nv_bfloat16>& a, int s, int kv_head, int tile)
      : first_token(a.cu_seqlens_q[s]), first_row(tile * kTileRows), group(a.group) {
    const int query_len = a.cu_seqlens_q[s + 1] - first_token;
    first_position = a.context_lens[s] - query_len;
    first_head = kv_head * group;
    rows = query_len * group - first_row;  // from the tile's first row to the sequence's last
  }
  __device__ int64_t token(int row) const { return first_token + (first_row + row) / group; }
  __device__ int head(int row) const { return first_head + (first_row + row) % group; }
  /// -1 past the end of the sequence: such a row sees no key.
  __device__ int position(int row) const {
    return row < rows ? first_position + (first_row + row) / group : -1;
  }
};

template <int kHeadDim>
__device__ void load_queries(AttentionTile<kHeadDim>& tile,
                             const AttentionArguments<__nv_bfloat16>& a, const RowTile& mine) {
  constexpr int kParts = kHeadDim / 8;
  for (int i = threadIdx.x; i < kTileRows * kParts; i += kAttentionThreads) {
    const int row = i / kParts, c = i % kParts * 8;
    uint4 values{};
    if (row < mine.rows)
      values = *reinterpret_cast<const uint4*>(a.q + mine.token(row) * a.q_token_stride +
                                               mine.head(row) * a.q_head_stride + c);
    *reinterpret_cast<uint4*>(&tile.q[row][c]) = values;
  }
}

/// This lane's part of row `row`, its index `r`, as the chunk's partial result.
template <int kHeadDim>
__device__ void store_partial(const RowState<kHeadDim>& state,
                              const AttentionArguments<__nv_bfloat16>& a, const RowTile& mine,
                              int row, int r, int chunk) {
  const int lane = threadIdx.x % kWarp;
  const int64_t slot = (mine.token(row) * a.num_heads + mine.head(row)) * a.max_chunks + chunk;
  if (lane % 4 == 0) a.partial_sum[slot] = {state.maximum[r], state.sum[r]};
  float* out = a.partial_out + slot * kHeadDim + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j)
    *reinterpret_cast<float2*>(out + 8 * j) = {state.out[j][2 * r], state.out[j][2 * r + 1]};
}

/// The same part of the final result.
template <int kHeadDim>
__device__ void store_output(const RowState<kHeadDim>& state,
                             const AttentionArguments<__nv_bfloat16>& a, const RowTile& mine,
                             int row, int r) {
  __nv_bfloat16* out = a.out + mine.token(row) * a.out_token_stride +
                       mine.head(row) * a.out_head_stride + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j)
    *reinterpret_cast<uint32_t*>(out + 8 * j) =
        pack_bf16(finish(state.merged[j][2 * r], state.merged_sum[r]),
                  finish(state.merged[j][2 * r + 1], state.merged_sum[r]));
}

/// kSplit: a block does one chunk and leaves partial results; else it does all chunks of its rows
/// and writes the output, the longest rows first. Grid: row tiles (times chunks) of a sequence, KV
/// heads, sequences.
template <int kHeadDim, bool kSplit>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_mma_kernel(const AttentionArguments<__nv_bfloat16> a) {
  using Tile = AttentionTile<kHeadDim>;
  extern __shared__ uint4 shared[];
  Tile& tile = *reinterpret_cast<Tile*>(shared);
  const int s = blockIdx.z, kv_head = blockIdx.y, chunk = kSplit ? blockIdx.x % a.max_chunks : 0;
  const RowTile mine(a, s, kv_head,
                     kSplit ? blockIdx.x / a.max_chunks : gridDim.x - 1 - blockIdx.x);
  if (mine.rows <= 0) return;
  const int begin = chunk * kChunk, key_end = mine.position(min(kTileRows, mine.rows) - 1) + 1;
  const int end = kSplit ? min(begin + kChunk, key_end) : key_end;
  if (begin >= end) return;
  load_keys(tile, 0, a, s, kv_head, begin, end);
  commit_copies();
  load_queries(tile, a, mine);

  // Which warp has which rows varies with the block: decode fills one warp's rows, and not always
  // those of the same scheduler.
  const int warp_row = (threadIdx.x / kWarp + blockIdx.x + blockIdx.y) % 4 * 16;
  const int lane_row = warp_row + static_cast<int>(threadIdx.x % kWarp) / 4;
  const int row[2] = {lane_row, lane_row + 8};
  const int position[2] = {mine.position(row[0]), mine.position(row[1])};
  // Keys from here on are masked for all rows of the warp.
  const int warp_end =
      warp_row < mine.rows ? mine.position(min(warp_row + 15, mine.rows - 1)) + 1 : 0;
  RowState<kHeadDim> state;
  state.start();
  for (int first = begin, index = 0; first < end; first += kTileKeys, ++index) {
    const int stage = index % Tile::kStages, next = first + kTileKeys;
    if (Tile::kStages > 1 && next < end)
      load_keys(tile, (index + 1) % Tile::kStages, a, s, kv_head, next, end);
    commit_copies();
    wait_copies<Tile::kStages - 1>();
    __syncthreads();  // the tile of all threads is there, and q the first time
    if (first < warp_end) {
      const int limit[2] = {position[0] + 1 - first, position[1] + 1 - first};
      add_tile(state, tile, stage, warp_row, limit, a.scale_log2);
    }
    const bool chunk_ends = next % kChunk == 0 || next >= end;
    if (!kSplit && chunk_ends && first / kChunk * kChunk < warp_end) {
      state.finish_chunk();
      state.merge_chunk(a.scale_log2);
      state.start_chunk();
    }
    __syncthreads();  // all have read the tile: its stage may be filled again
    if (Tile::kStages == 1 && next < end) load_keys(tile, 0, a, s, kv_head, next, end);
  }
  if (warp_end == 0) return;
  if (kSplit) state.finish_chunk();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (kSplit ? position[r] < begin : position[r] < 0) continue;
    if constexpr (kSplit)
      store_partial(state, a, mine, row[r], r, chunk);
    else
      store_output(state, a, mine, row[r], r);
  }
}

/// Merges the chunks of a split row in order. Grid: tokens, heads; a thread has one element.
template <int kHeadDim>
__global__ void attention_merge_kernel(const AttentionArguments<__nv_bfloat16> a) {
  const int token = blockIdx.x, head = blockIdx.y,
            s = sequence_of(a.cu_seqlens_q, a.num_seqs, token);
  if (s < 0) return;
  const int position = a.context_lens[s] - (a.cu_seqlens_q[s + 1] - token);
  const int64_t first = (int64_t{token} * a.num_heads + head) * a.max_chunks;
  float value = 0.0f, maximum = kMinusInfinity, sum = 0.0f;
  for (int chunk = 0; chunk <= position / kChunk; ++chunk) {
    const float2 partial = a.partial_sum[first + chunk];
    const Merge merge(maximum, sum, partial.x, partial.y, a.scale_log2);
    value = merge(value, a.partial_out[(first + chunk) * kHeadDim + threadIdx.x]);
    maximum = merge.maximum;
    sum = merge.sum;
  }
  a.out[token * a.out_token_stride + head * a.out_head_stride + threadIdx.x] =
      __float2bfloat16_rn(finish(value, sum));
}

}  // namespace nanovllm
