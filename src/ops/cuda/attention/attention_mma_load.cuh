// The shared memory of a block of attention_mma.cuh, its rows, and how keys, values and queries get
// there.
#pragma once

#include "ops/cuda/attention/attention.cuh"
#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

constexpr int kTileRows = 64;
constexpr int kAttentionThreads = 128;  // four warps of 16 rows

template <int kHeadDim, class C>
struct AttentionTile {
  // An odd number of 16-byte units: ldmatrix meets no bank twice.
  static constexpr int kPitch = kHeadDim + 8;
  static constexpr int kStages = kHeadDim > 128 ? 1 : 2;
  __nv_bfloat16 q[kTileRows][kPitch];
  __nv_bfloat16 k[kStages][kTileKeys][kPitch], v[kStages][kTileKeys][kPitch];
};
/// Numbers become bf16 in the registers of each warp.
template <int kHeadDim>
struct AttentionTile<kHeadDim, E4m3> {
  static constexpr int kPitch = kHeadDim + 8, kCachePitch = (kHeadDim / 16 | 1) * 16;
  static constexpr int kStages = kHeadDim > 128 ? 1 : 2;
  alignas(16) __nv_bfloat16 q[kTileRows][kPitch];
  E4m3 k[kStages][kTileKeys][kCachePitch], v[kStages][kTileKeys][kCachePitch];
  float k_scale[kStages][kTileKeys], v_scale[kStages][kTileKeys];
};

/// The scales of the keys first .. first + 64 and of their values, four at a time; any numbers
/// where none of four is one of low .. end - 1.
template <int kHeadDim>
__device__ void load_scales(AttentionTile<kHeadDim, E4m3>& tile, int stage,
                            const AttentionArguments<__nv_bfloat16>& a, int s, int kv_head,
                            int first, int low, int end) {
  const int row = static_cast<int>(threadIdx.x) % (kTileKeys / 4) * 4, position = first + row;
  const bool is_key = threadIdx.x < kTileKeys / 4;
  if (threadIdx.x >= kTileKeys / 2 || position + 4 <= low || position >= end) return;
  const E4m3* cache = static_cast<const E4m3*>(is_key ? a.k : a.v) +
                      kv_head * (is_key ? a.k_head_stride : a.v_head_stride);
  copy_async(
      is_key ? &tile.k_scale[stage][row] : &tile.v_scale[stage][row],
      row_scales(a, cache, s, position, is_key ? a.k_block_stride : a.v_block_stride, kHeadDim),
      true);
}

/// The keys first .. first + 64 of the sequence, zeros before `low` and from `end` on: a masked key
/// must be finite, whatever lies in its slot.
template <int kHeadDim, class C>
__device__ void load_keys(AttentionTile<kHeadDim, C>& tile, int stage,
                          const AttentionArguments<__nv_bfloat16>& a, int s, int kv_head, int first,
                          int low, int end) {
  constexpr int kPart = 16 / sizeof(C), kParts = kHeadDim / kPart,
                kCopies = (kTileKeys * kParts + kAttentionThreads - 1) / kAttentionThreads;
  const auto row_of = [](int i) { return (threadIdx.x + i * kAttentionThreads) / kParts; };
  // All look-ups before all copies, which would each wait for its own.
  int block[kCopies];
  const int* const table = a.block_tables + s * a.table_stride;
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int position = first + row_of(i);
    block[i] = low <= position && position < end ? table[position >> a.block_shift] : -1;
  }
  if constexpr (is_e4m3<C>) load_scales(tile, stage, a, s, kv_head, first, low, end);
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int row = row_of(i), c = (threadIdx.x + i * kAttentionThreads) % kParts * kPart;
    if (kTileKeys * kParts % kAttentionThreads != 0 && row >= kTileKeys) continue;
    const bool valid = block[i] >= 0;
    const C *k = static_cast<const C*>(a.k), *v = static_cast<const C*>(a.v);
    if (valid) {
      const int64_t in_block = ((first + row) & ((1 << a.block_shift) - 1)) * kHeadDim + c;
      k += block[i] * a.k_block_stride + kv_head * a.k_head_stride + in_block;
      v += block[i] * a.v_block_stride + kv_head * a.v_head_stride + in_block;
    }
    copy_async(&tile.k[stage][row][c], k, valid);
    copy_async(&tile.v[stage][row][c], v, valid);
  }
}

/// The rows of a block: 64 of a sequence's packed rows, query by query, the heads of the group
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

template <int kHeadDim, class C>
__device__ void load_queries(AttentionTile<kHeadDim, C>& tile,
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

}  // namespace nanovllm
