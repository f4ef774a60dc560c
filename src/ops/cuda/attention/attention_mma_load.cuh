// The shared memory of a block of attention_mma.cuh, its rows, and how keys, values and queries get
// there.
#pragma once

#include "ops/cuda/attention/attention.cuh"
#include "ops/cuda/ptx/mbarrier.cuh"
#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

constexpr int kAttentionWarps = 4, kAttentionThreads = kAttentionWarps * kWarp;
constexpr int kWarpRows = 16, kTileRows = kWarpRows * kAttentionWarps;

/// Where rows of bf16 lie in shared memory, so that ldmatrix meets no bank twice: their 16-byte
/// units in another order, or an odd number of them.
template <int kHeadDim>
struct TileRows {
  static constexpr bool kSwizzled = kHeadDim % 64 == 0;
  static constexpr int kBytes = kHeadDim * 2 + (kSwizzled ? 0 : 16);
  __device__ static uint32_t place(int row, int unit) {
    return row * kBytes + (kSwizzled ? unit ^ row % 8 : unit) * 16;
  }
  /// The place so many units further on, an even number, from one of a row's first two.
  __device__ static uint32_t further(uint32_t place, int units) {
    return kSwizzled ? place ^ units * 16 : place + units * 16;
  }
};

/// The rows of a block: of each warp its queries, which it keeps in registers, and in their place
/// the result of the chunks before the present one. With heads of 256 elements neither finds room:
/// queries stay, and results are in registers.
template <int kHeadDim>
struct AttentionRows {
  static constexpr bool kKeepsQueries = kHeadDim <= 128;
  static constexpr int kStages = kHeadDim > 128 ? 1 : 2;  // of keys and values
  // An odd number of 16-byte units: ldmatrix meets no bank twice.
  static constexpr int kPitch = kHeadDim + 8,
                       kWarpBytes = kWarpRows * (kKeepsQueries ? kHeadDim * 4 : kPitch * 2);
  alignas(1024) unsigned char warps[kAttentionWarps][kWarpBytes];
  __device__ __nv_bfloat16* query(int row) {
    return reinterpret_cast<__nv_bfloat16*>(warps[row / kWarpRows]) + row % kWarpRows * kPitch;
  }
  /// The lane's part of a warp's results.
  __device__ float4* results(int warp) {
    return reinterpret_cast<float4*>(warps[warp]) + threadIdx.x % kWarp;
  }
};

template <int kHeadDim, class C>
struct AttentionTile : AttentionRows<kHeadDim> {
  using Rows = TileRows<kHeadDim>;
  using AttentionRows<kHeadDim>::kStages;
  alignas(1024) unsigned char k[kStages][kTileKeys * Rows::kBytes];
  alignas(1024) unsigned char v[kStages][kTileKeys * Rows::kBytes];
  __device__ static uint32_t place(int row, int unit) { return Rows::place(row, unit); }
};
/// Numbers become bf16 in the registers of each warp.
template <int kHeadDim>
struct AttentionTile<kHeadDim, E4m3> : AttentionRows<kHeadDim> {
  using AttentionRows<kHeadDim>::kStages;
  static constexpr int kCachePitch = (kHeadDim / 16 | 1) * 16;
  alignas(16) unsigned char k[kStages][kTileKeys * kCachePitch];
  alignas(16) unsigned char v[kStages][kTileKeys * kCachePitch];
  alignas(16) float k_scale[kStages][kTileKeys];
  alignas(16) float v_scale[kStages][kTileKeys];
  __device__ static uint32_t place(int row, int unit) { return row * kCachePitch + unit * 16; }
};

/// The rows of the cache that a block reads: of a sequence and a KV head, of which it needs the
/// keys low .. end - 1.
struct KeyRange {
  int sequence, kv_head, low, end;
};

/// The rows first .. first + 64 of the keys, or of the values, and their scales; zeros before `low`
/// and from `end` on: a masked key must be finite, whatever lies in its slot.
template <bool kValues, int kHeadDim, class C>
__device__ void load_rows(AttentionTile<kHeadDim, C>& tile, int stage,
                          const AttentionArguments<__nv_bfloat16>& a, const KeyRange& keys,
                          int first) {
  using Tile = AttentionTile<kHeadDim, C>;
  constexpr int kPart = 16 / sizeof(C), kParts = kHeadDim / kPart, kThreads = kAttentionThreads,
                kCopies = (kTileKeys * kParts + kThreads - 1) / kThreads;
  constexpr bool kEven = kTileKeys * kParts % kThreads == 0;
  const int thread = static_cast<int>(threadIdx.x), size = 1 << a.block_shift;
  const int* const table = a.block_tables + keys.sequence * a.table_stride;
  const int64_t block_stride = kValues ? a.v_block_stride : a.k_block_stride;
  const C* const cache = static_cast<const C*>(kValues ? a.v : a.k) +
                         keys.kv_head * (kValues ? a.v_head_stride : a.k_head_stride);
  unsigned char* const to = kValues ? tile.v[stage] : tile.k[stage];
  if constexpr (is_e4m3<C>) {
    // Four at a time; any numbers where none of four is needed.
    const int row = thread * 4, position = first + row;
    if (row < kTileKeys && position + 4 > keys.low && position < keys.end)
      copy_async((kValues ? tile.v_scale : tile.k_scale)[stage] + row,
                 row_scales(a, cache, keys.sequence, position, block_stride, kHeadDim), true);
  }
  const auto is_needed = [&](int row) { return keys.low <= first + row && first + row < keys.end; };
  if (size >= kTileKeys) {
    const C* from = cache + table[first >> a.block_shift] * block_stride +
                    (first & (size - 1)) * kHeadDim + thread * kPart;
    const auto copy = [&](auto&& needed) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i, from += kThreads * kPart) {
        const int at = thread + i * kThreads, row = at / kParts;
        if (kEven || row < kTileKeys)
          copy_async(to + Tile::place(row, at % kParts), from, needed(row));
      }
    };
    if (is_needed(0) && is_needed(kTileKeys - 1))
      copy([](int) { return true; });
    else
      copy(is_needed);
    return;
  }
  // Some look-ups before their copies, which would each wait for its own.
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int i = thread; i < kTileKeys * kParts; i += kAtOnce * kThreads) {
    int block[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int row = (i + j * kThreads) / kParts;
      block[j] = row < kTileKeys && is_needed(row) ? table[(first + row) >> a.block_shift] : -1;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = i + j * kThreads, row = at / kParts, unit = at % kParts;
      if (row >= kTileKeys) continue;
      const int64_t in_block = ((first + row) & (size - 1)) * kHeadDim + unit * kPart;
      copy_async(to + Tile::place(row, unit),
                 block[j] >= 0 ? cache + block[j] * block_stride + in_block : cache, block[j] >= 0);
    }
  }
}

template <int kHeadDim, class C>
__device__ void load_keys_and_values(AttentionTile<kHeadDim, C>& tile, int stage,
                                     const AttentionArguments<__nv_bfloat16>& a,
                                     const KeyRange& keys, int first) {
  load_rows<false>(tile, stage, a, keys, first);
  load_rows<true>(tile, stage, a, keys, first);
  commit_copies();
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
    *reinterpret_cast<uint4*>(tile.query(row) + c) = values;
  }
}

}  // namespace nanovllm
