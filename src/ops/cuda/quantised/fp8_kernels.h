// The tiles of gemm_fp8.cuh, and where a weight's scales lie. No CUDA.
#pragma once

#include <numeric>

#include "core/weight.h"
#include "ops/cuda/gemm/gemm_kernels.h"

namespace nanovllm {

constexpr int kFp8Block = 128;  // columns of k that are summed by the tensor cores alone
constexpr int kFp8Height = 64;  // rows of w, at most, that a group of four warps multiplies
constexpr int kFp8Aligned = 4;  // scales, with the first of which a copy begins
constexpr int kFp8Unit = 8;     // rows of w that stay together, and share scales of blocks
constexpr int kFp8Barriers = kSkinnyBarrierBytes + 2 * 8;  // bytes: the ring's, HalfSums's

/// A kernel's tile. `columns` 0: 64 rows of w, or fewer, by `rows` rows of x for a group of four
/// warps. Else groups of 64 rows of x by `columns` rows of w, or half of them. `depth` blocks of k
/// in a stage; `cluster` neighbours share their rows of x.
struct Fp8Tile {
  int rows, depth = 1, columns = 0, cluster = 1;
  bool gated = false;
  bool blocks = false;    // scales of blocks of k; else of whole rows
  bool grouped = false;   // rows of x are places, which meet the weights of their experts
  bool integers = false;  // of 8 bits, for E4M3 numbers
  bool in_pairs = false;  // each block of a cluster of two has a half of k (half_sums.cuh)
  /// The same size, of integers.
  constexpr Fp8Tile of_integers(bool is_gated, bool is_grouped = false) const {
    return {rows, depth, columns, cluster, is_gated, false, is_grouped, true};
  }
  /// Whether the rows of x are wgmma's first operand.
  constexpr bool has_rows_first() const { return columns > 0; }
  constexpr int groups() const { return has_rows_first() ? rows / kFp8Height : 1; }
  constexpr int most_columns() const { return has_rows_first() ? columns : kFp8Height; }  // of w
  constexpr int sums() const { return (has_rows_first() ? columns : rows) / 2; }  // of a lane
  /// Whether its blocks may have so many rows of w. With rows first no scale of a block ends
  /// inside.
  constexpr bool takes(int height) const {
    return has_rows_first() ? height == columns || (columns == kFp8Height && 2 * height == columns)
                            : height <= kFp8Height;
  }
  constexpr int parts() const { return gated ? 2 : 1; }
  /// Eights of rows of w, of a part, that share a scale: tiles begin at multiples of them.
  constexpr int even_units() const { return std::gcd(columns / parts(), kFp8Height) / kFp8Unit; }
  /// Whether pieces of 16 bytes leave its registers where half of its columns are gates.
  constexpr bool can_be_gated() const { return columns % 64 == 0; }
  /// Whether results may go to the ranks that sum them.
  constexpr bool can_send() const { return has_rows_first() && !gated && !grouped; }
  /// Whether it may be in halves of k.
  constexpr bool takes_halves() const { return blocks && !gated && !grouped; }
  constexpr int cluster_size() const { return in_pairs ? 2 : cluster; }
  constexpr int consumers() const { return groups() * kGroupThreads; }
  constexpr int threads() const { return consumers() + kGroupThreads; }
  constexpr int pitch() const { return kFp8Height / parts() * 2 + 16; }  // bytes of a result's row
  constexpr int result_bytes() const { return has_rows_first() ? 0 : rows * pitch(); }
  /// Of the other block's sums.
  constexpr int half_bytes() const { return in_pairs ? consumers() * sums() / 2 * 4 : 0; }
  /// Of a block of k: some before the tile's, in each part.
  constexpr int weight_scales() const {
    return blocks ? most_columns() / kFp8Unit + parts() * kFp8Aligned : 0;
  }
  constexpr int weight_scale_bytes() const {
    return (depth * weight_scales() * 4 + 127) / 128 * 128;
  }
  /// Of a block of k: some before an expert's first.
  constexpr int row_scales() const { return rows + (grouped ? kFp8Aligned : 0); }
  constexpr int row_scale_bytes() const {
    return blocks ? (depth * row_scales() * 4 + 127) / 128 * 128 : 0;
  }
  /// Of a stage that has `height` rows of w, and `block_rows` of x.
  constexpr int stage_bytes(int height, int block_rows) const {
    return (depth * (height + block_rows) * kFp8Block + weight_scale_bytes() + row_scale_bytes() +
            1023) /
           1024 * 1024;
  }
  /// The barriers, the ring on a boundary of 1024, and results; wgmma reads whole tiles, whatever
  /// there is behind what was copied.
  constexpr int shared_bytes(int height, int block_rows, int stages) const {
    const int beyond = std::max(most_columns() - height, rows - block_rows) * kFp8Block;
    return kFp8Barriers + 1024 + stages * stage_bytes(height, block_rows) + half_bytes() +
           std::max(result_bytes(), beyond);
  }
};

/// Rows of w of a tile: all, or fewer, so that more SMs have one.
inline constexpr int kFp8Heights[] = {256, 128, 96, 64, 48, 32};
constexpr Fp8Tile in_pairs(Fp8Tile tile) {
  tile.in_pairs = true;
  return tile;
}
inline constexpr Fp8Tile kFp8Tiles[] = {{8, 4},
                                        {16, 4},
                                        {64, 2, 64},
                                        {128, 1, 64},
                                        {128, 1, 128, 2},
                                        {128, 1, 128},
                                        {64, 1, 96},
                                        {64, 1, 128},
                                        {128, 1, 96},
                                        {32, 4},
                                        in_pairs({8, 4}),
                                        in_pairs({16, 4}),
                                        in_pairs({32, 4}),
                                        in_pairs({64, 2, 64}),
                                        in_pairs({128, 1, 64}),
                                        in_pairs({64, 1, 96}),
                                        in_pairs({64, 1, 128}),
                                        in_pairs({128, 1, 96}),
                                        in_pairs({128, 1, 128})};
/// Of integers, whose sums need no second set of registers.
inline constexpr Fp8Tile kInt8Tiles[] = {
    {8, 4}, {16, 4}, {64, 2, 64}, {128, 1, 64}, {128, 1, 128}, {128, 1, 256}, {128, 1, 256, 2}};
/// Of experts, by their tokens. The columns of `down` are few: two blocks in a stage waste less.
inline constexpr Fp8Tile kFp8ExpertTiles[] = {{8, 2}, {16, 2}, {32, 2}, {64, 2, 64}, {128, 1, 128}};

/// The rows of x that a block copies where `row_blocks` cover all rows.
inline int64_t copied_fp8_rows(const Fp8Tile& tile, int64_t rows, int64_t row_blocks) {
  return tile.cluster > 1 ? tile.rows : copied_rows(tile.rows, ceil_div(rows, row_blocks));
}

/// The rows that quantised rows have room for: in eights, as they are copied.
constexpr int64_t rows_with_room(int64_t rows) { return ceil_div(rows, 8) * 8; }

/// A weight [n, k]: its numbers, then a scale for each of its rows or, for blocks, for each
/// kFp8Unit of them, [k / 128, units], with room for a whole number of kFp8Aligned.
struct Fp8Layout {
  int64_t n, k;
  bool blocks;
  constexpr Fp8Layout(WeightFormat format, int64_t rows, int64_t columns)
      : n(rows), k(columns), blocks(format.rows == WeightFormat::Rows::group) {}
  constexpr int64_t units() const {
    return ceil_div(n, int64_t{kFp8Unit * kFp8Aligned}) * kFp8Aligned;
  }
  constexpr int64_t scales() const { return n * k; }  // bytes before them
  constexpr int64_t num_scales() const { return blocks ? k / kFp8Block * units() : n; }
  constexpr int64_t bytes() const { return scales() + num_scales() * 4; }
};

}  // namespace nanovllm
