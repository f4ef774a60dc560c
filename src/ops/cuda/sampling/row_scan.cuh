// The one pass over rows of logits that sampling and log probabilities begin with.
//
// A row is cut into tiles of 512 tokens, a tile into chunks of 64: a function of the vocabulary
// alone. A warp holds one tile in registers at a time and shares nothing with other warps, so a row
// may be divided among as many warps as the batch leaves room for. What a scan keeps of a row is
// either free of order (maxima, counts) or kept per tile and added up later in the order of tiles.
#pragma once

#include "ops/cuda/sampling/select.cuh"

namespace nanovllm {

constexpr int kTileVectors = 4;  // of four tokens, per lane
constexpr int kTile = kTileVectors * 4 * kWarp;
constexpr int kChunksPerTile = 8;
constexpr int kScanChunk = kTile / kChunksPerTile;
constexpr int kScanWarps = 8;  // warps of a block
constexpr int kScanBlocksPerSm = 4;
constexpr uint32_t kMinusInfinityOrder = 0x007fffffu;  // order_of(-inf)

/// The knowledge that all blocks share of a row of logits while they scan it, as order_of(): the
/// largest logit and a score that a token has; zeros before.
struct alignas(8) KnownRow {
  uint32_t most, score;
};
constexpr int64_t kMostKnownRows = 512;
constexpr size_t kKnownBytes = kMostKnownRows * sizeof(KnownRow);  // the end of a scan's memory

/// A scan's division and what it leaves, per row.
struct RowScan {
  int rows, tiles, warps;     // tiles and warps of one row
  uint64_t (*keys)[2];        // [rows, warps]: what each warp found
  float *chunk_max, *weight;  // [rows, tiles * kChunksPerTile], [rows, tiles]

  __device__ uint64_t (*keys_of(int row) const)[2] { return keys + int64_t{row} * warps; }
  __device__ float* chunk_max_of(int row) const {
    return chunk_max + int64_t{row} * tiles * kChunksPerTile;
  }
  __device__ float* weight_of(int row) const { return weight + int64_t{row} * tiles; }
};

/// The division of rows of `vocab` tokens: as many rows of `rows` as fit into `bytes` at `memory`,
/// in as many warps as the GPU takes at once, all with nearly the same work.
inline RowScan plan_scan(int64_t rows, int64_t vocab, int num_sms, std::byte* memory,
                         size_t bytes) {
  constexpr int64_t kWarpsPerSm = kScanBlocksPerSm * kScanWarps;
  const int64_t tiles = ceil_div(vocab, int64_t{kTile});
  bytes -= kKnownBytes;
  const int64_t row_bytes =
      tiles * static_cast<int64_t>(sizeof(uint64_t[2]) + (kChunksPerTile + 1) * sizeof(float));
  rows = std::min(rows, static_cast<int64_t>(bytes) / row_bytes);
  const int64_t share =
      std::clamp<int64_t>(num_sms * kWarpsPerSm / std::max<int64_t>(rows, 1), 1, tiles);
  RowScan scan{};
  scan.rows = static_cast<int>(rows);
  scan.tiles = static_cast<int>(tiles);
  scan.warps = static_cast<int>(ceil_div(tiles, ceil_div(tiles, share)));
  scan.keys = reinterpret_cast<uint64_t(*)[2]>(memory);
  scan.chunk_max = reinterpret_cast<float*>(scan.keys + rows * tiles);
  scan.weight = scan.chunk_max + rows * tiles * kChunksPerTile;
  return scan;
}

/// 16 bytes that nobody needs soon again: they pass by the L1 cache.
__device__ inline Vec<float> load_once(const float* p) {
  Vec<float> x;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
               : "l"(p));
  return x;
}

/// One lane's tokens of a tile; -inf past the end of the row.
struct Tile {
  Vec<float> v[kTileVectors];

  static __device__ int id(int tile, int vector) {
    return tile * kTile + (vector * kWarp + static_cast<int>(threadIdx.x) % kWarp) * 4;
  }
  __device__ Tile(const LogitRow& row, int tile) {
    if (row.wide && (tile + 1) * kTile <= row.vocab) {
#pragma unroll
      for (int i = 0; i < kTileVectors; ++i) v[i] = load_once(row.data + id(tile, i));
      return;
    }
#pragma unroll
    for (int i = 0; i < kTileVectors; ++i) {
      const int first = id(tile, i);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        v[i].v[j] = first + j < row.vocab ? row.data[first + j] : -__builtin_huge_valf();
    }
  }
  /// NaN if one is among them.
  __device__ float maximum() const;
  /// The lowest id in the warp's tile of a logit equal to x; 0 if there is none (x is NaN).
  __device__ int first_id(float x, int tile) const {
    uint32_t found = ~0u;
#pragma unroll
    for (int i = kTileVectors - 1; i >= 0; --i)
#pragma unroll
      for (int j = 3; j >= 0; --j)
        if (v[i].v[j] == x) found = static_cast<uint32_t>(id(tile, i) + j);
    found = __reduce_min_sync(kFullMask, found);
    return found == ~0u ? 0 : static_cast<int>(found);
  }
  /// Adds body(logit) over the tile, in a fixed order; the sum in every lane.
  template <class Body>
  __device__ float sum(Body&& body) const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kTileVectors; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) total += body(v[i].v[j]);
    return warp_sum(total);
  }
};

__device__ inline float max_or_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
__device__ inline float max_of(const Vec<float>& x) {
  return max_or_nan(max_or_nan(x.v[0], x.v[1]), max_or_nan(x.v[2], x.v[3]));
}
__device__ inline float Tile::maximum() const {
  float most = max_of(v[0]);
#pragma unroll
  for (int i = 1; i < kTileVectors; ++i) most = max_or_nan(most, max_of(v[i]));
  return most;
}

/// Stores the maxima of the tile's chunks, each the tokens of four neighbouring lanes.
__device__ inline void keep_chunks(const RowScan& scan, int row, int tile, float lane_maximum) {
  constexpr int kLanes = kWarp / kChunksPerTile;
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2)
    lane_maximum = max_or_nan(lane_maximum, __shfl_xor_sync(kFullMask, lane_maximum, offset));
  const int lane = threadIdx.x % kWarp;
  if (lane % kLanes == 0)
    scan.chunk_max_of(row)[tile * kChunksPerTile + lane / kLanes] = lane_maximum;
}

}  // namespace nanovllm
