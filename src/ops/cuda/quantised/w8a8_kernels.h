// The tiles of gemm_w8a8.cuh. No CUDA.
#pragma once

#include "core/weight.h"
#include "ops/cuda/gemm/gemm_kernels.h"

namespace nanovllm {

constexpr int kByteBlock = 128;           // columns of k, of a row in shared memory
constexpr int kMostByteStages = 6;        // of a ring
constexpr int kMostBytesOfRow = 1 << 17;  // sums of as many products of integers have 32 bits

/// A kernel's tile: `columns` rows of w by `rows` rows of x, divided among `warps` along w by
/// `row_warps` along x; `depth` blocks of k in a stage, and as many of at most `stages` as fit.
struct W8a8Tile {
  int columns, rows, warps, row_warps, depth, stages;
  constexpr int threads() const { return warps * row_warps * kWarp; }
  constexpr int units() const { return columns / (16 * warps); }   // of 16 rows of w, of a warp
  constexpr int eights() const { return rows / (8 * row_warps); }  // of rows of x, of a warp
  constexpr int block_bytes() const { return (columns + rows) * kByteBlock; }
  constexpr int stage_bytes() const { return depth * block_bytes(); }
  /// Whether E4M3's sums of a block have registers beside the others.
  constexpr bool takes_e4m3() const { return units() * eights() <= 16; }
};

inline constexpr W8a8Tile kW8a8Tiles[] = {
    {32, 8, 2, 1, 2, 6},  {32, 16, 2, 1, 2, 6},  {32, 32, 2, 2, 2, 6},   {32, 64, 2, 2, 2, 4},
    {64, 64, 2, 2, 1, 4}, {128, 64, 4, 2, 1, 4}, {128, 128, 2, 4, 1, 3}, {128, 256, 2, 4, 1, 4},
};

/// f<numbers, whether scales are of blocks>() of a weight's format.
template <class F>
void with_w8a8_kind(WeightFormat format, F&& f) {
  using enum WeightFormat::Numbers;
  if (format.numbers == int8) return f.template operator()<int8, false>();
  if (format.rows == WeightFormat::Rows::group) return f.template operator()<e4m3, true>();
  f.template operator()<e4m3, false>();
}

/// The stages of its ring, 0 where two have no room.
inline int w8a8_stages(const W8a8Tile& tile, size_t shared_bytes) {
  const int room = static_cast<int>(shared_bytes) / tile.stage_bytes();
  return room < 2 ? 0 : std::min(room, tile.stages);
}

}  // namespace nanovllm
