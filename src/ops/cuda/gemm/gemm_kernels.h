// The tiles of the kernels of products, and what these take of an SM. No CUDA: which of them serves
// is chosen on the host (choose.h).
#pragma once

#include <algorithm>

#include "core/weight.h"
#include "ops/cuda/core/layout.h"

namespace nanovllm {

// A stage of a ring holds slices of 64 along k, of bf16.
constexpr int kSliceWidth = 64, kSliceRowBytes = 128;
constexpr int kMostStages = 32;
constexpr int kMostDepth = 2;       // slices of a stage of mid's and wide's kernels
constexpr int kGroupThreads = 128;  // of a group of four warps, which multiply together

/// The rows of x that a block of `tile_rows` copies of `rows` in all: no more than there are, in
/// eights.
inline int copied_rows(int64_t tile_rows, int64_t rows) {
  return static_cast<int>(std::min(tile_rows, ceil_div(rows, 8) * 8));
}

// -- gemm_skinny.cuh --

constexpr int kSkinnyThreads = 160, kSkinnyConsumers = 128;
inline constexpr int kSkinnyColumns[] = {8, 16, 24, 32, 48, 64};  // of a tile

constexpr int skinny_stage_bytes(int columns, int block_rows, int depth) {
  return depth * (columns + block_rows) * kSliceRowBytes;
}
/// Of a tile of a weight in halves of k: both halves' are the rows of A.
constexpr int kMostHalvedRows = 32;
/// Shared memory: the barriers, then the ring on a boundary of 1024; A reads 64 rows, whatever
/// there are.
constexpr int kSkinnyBarrierBytes = 2 * kMostStages * 8;
constexpr int skinny_shared_bytes(int columns, int block_rows, int depth, int stages) {
  return kSkinnyBarrierBytes + 1024 + stages * skinny_stage_bytes(columns, block_rows, depth) +
         (64 - block_rows) * kSliceRowBytes;
}

// -- gemm_packed.cuh --

constexpr int kPackedRows = 8, kPackedColumns = 128;  // of a record (packed.h)
/// Groups of a record that have scales in it: 1, 2, 4; 0: whole rows have.
constexpr int packed_groups(WeightFormat format, int64_t k) {
  return format.group == k               ? 0
         : format.group < kPackedColumns ? static_cast<int>(kPackedColumns / format.group)
                                         : 1;
}
constexpr int packed_record_bytes(WeightFormat format, int64_t k) {
  return kPackedRows * (kPackedColumns * format.bits() / 8 + packed_groups(format, k) * 4);
}
constexpr int kMostPackedGroups = 3;  // of four warps, of a block
constexpr int kMostPackedTile = 128;  // rows of x
/// Groups take turns where one has all of a tile's rows of the weight, by stages of so many chunks.
/// `tiles`: of a block.
constexpr int kTurnChunks = 2, kMostTurnRows = 32;  // of x
constexpr bool takes_turns(WeightFormat format, int64_t k, int groups, int64_t rows,
                           int64_t tiles) {
  return format.bits() == 4 && k % (kTurnChunks * kPackedColumns) == 0 && groups == 1 &&
         rows <= kMostTurnRows && tiles == 1;
}
/// The stages of such a ring, of which `room` would fit. A stage's barrier does not tell a round
/// from the next but one, so nobody may wait for a stage whose round before is not over. A group,
/// and a copier, knows that its own turn before, three or four turns ahead, has ended, and all
/// before that: so no fewer than three.
constexpr int kPackedCopiers = 4, kMostTurnStages = kMostStages / 2;
constexpr int turn_stages(int64_t room) {
  return static_cast<int>(std::clamp<int64_t>(room, kMostPackedGroups, kMostTurnStages));
}

// -- gemm_mma.cuh --

constexpr int kMostPackedWarps = 12;                  // that multiply, of a block
constexpr int kMostPackedCopiers = 4;                 // that copy x: one, for up to eight rows
constexpr int kMostEightsOfOne = 2;                   // of a tile whose warps have 8 rows of w
inline constexpr int kMmaStages[] = {8, 4, 3};        // of a warp's ring: as many as fit
inline constexpr int kPackedEights[] = {1, 2, 4, 8};  // of rows of x, of a tile
constexpr int kPlainRowBytes = kPackedColumns * 2;    // of a plain weight's record
/// Of eight rows of a weight by 128 columns.
constexpr int mma_record_bytes(WeightFormat format, int64_t k) {
  return format.is_quantised() ? packed_record_bytes(format, k) : kPackedRows * kPlainRowBytes;
}

/// A panel of x: 1,024 columns of eight rows, 512 of 16 and so on, and what keeps neighbouring rows
/// in different banks.
constexpr int mma_panel_columns(int eights) { return 1024 / eights; }
constexpr int mma_panel_pitch(int eights) { return mma_panel_columns(eights) * 2 + 16; }
constexpr int kMostPanels = 4, kPackedBarrierBytes = 2 * kMostPanels * 8;

/// A block's shared memory: the barriers, panels of x for `rows` rows in tiles of `eights`, and a
/// ring for each warp, of stages with a record for each of its eights of w's rows, as far as `most`
/// bytes allow.
struct MmaRings {
  int panels, panel_bytes, stage_bytes, first,
      stages = 0;  // first: of the rings; stages 0: no room
  size_t bytes;
  MmaRings(int warps, int units, int eights, int64_t rows, int record_bytes, size_t most)
      : panel_bytes(mma_panel_pitch(eights) *
                    static_cast<int>(eights == 1 ? std::min<int64_t>(rows, 8) : 8 * eights)),
        stage_bytes(units * record_bytes) {
    const int all = static_cast<int>(most) - kPackedBarrierBytes;
    // A third for x: there are as many panels as more of them help.
    panels = std::clamp(all / 3 / panel_bytes, 2, kMostPanels);
    first = (kPackedBarrierBytes + panels * panel_bytes + 255) / 256 * 256;
    const int room = static_cast<int>(most) - first;
    for (const int count : kMmaStages)
      if (stages == 0 && count * warps * stage_bytes <= room) stages = count;
    bytes = static_cast<size_t>(first + stages * warps * stage_bytes);
  }
};

// -- gemm_mid.cuh --

constexpr int kPair = 2;  // blocks of a cluster
/// The ring's barriers, of weights a set of their own, and HalfSums's.
constexpr int kMidBarrierBytes = 3 * kMostStages * 8 + 2 * 8;
constexpr int kProductHead = 128;  // elements of a head that a product's end finishes

/// A kernel's tile: `columns` of w by 64 rows for each of `tiles` in each of `groups` of four
/// warps, `depth` slices of k in a stage. Gated: half of the columns are the gate's, half those of
/// up.
struct MidTile {
  int columns, groups, tiles, depth;
  bool gated = false;
  constexpr int outputs() const { return gated ? columns / 2 : columns; }
  constexpr int consumers() const { return groups * kGroupThreads; }
  /// Where sums take most registers, a whole group of warps copies: it leaves them its own.
  constexpr bool is_large() const { return tiles > 1; }
  constexpr int threads() const { return consumers() + (is_large() ? kGroupThreads : 2 * kWarp); }
  constexpr int block_rows(int tile_rows) const { return groups * tiles * tile_rows; }
  constexpr int weight_bytes() const { return depth * columns * kSliceRowBytes; }
  constexpr int stage_bytes(int rows) const {
    return weight_bytes() + depth * rows * kSliceRowBytes;
  }
  /// As skinny_shared_bytes(), of a block that copies `rows`.
  constexpr int shared_bytes(int tile_rows, int rows, int stages) const {
    return kMidBarrierBytes + 1024 + stages * stage_bytes(rows) +
           (block_rows(tile_rows) - rows + 64 - tile_rows) * kSliceRowBytes;
  }
};

/// The bytes that a ring takes of an SM's shared memory: nearly all, or half where two blocks share
/// an SM, one of which stores its tile while the other multiplies.
constexpr int kMidWholeRing = 222 * 1024, kMidHalfRing = 104 * 1024;

/// A kernel, and whether two blocks above each other share their weights. Measured on an H200:
/// copies of less than 8 KB cost more than sharing saves, and so do two groups that wait for two
/// others. Some are not for up to 256 rows, but for micro-batches, where a product has fewer SMs,
/// and for more rows.
struct MidKernel {
  MidTile tile;
  bool shares;
  int ring = kMidWholeRing;
  DType out = DType::bf16;
  bool for_many = false;
  bool in_pairs = false;  // each block of a cluster of two has a half of k (half_sums.cuh)
  /// Whether its tile is heads, which its end finishes.
  constexpr bool makes_heads() const {
    return tile.columns == kProductHead && tile.tiles == 1 && !tile.gated && !in_pairs;
  }
  /// Whether its end can send results to other ranks.
  constexpr bool can_send() const {
    return out == DType::bf16 && tile.tiles == 1 && !tile.gated && !for_many && !in_pairs;
  }
};
inline constexpr MidKernel kMidKernels[] = {
    {{32, 1, 1, 2}, false},
    {{48, 1, 1, 2}, false},
    {{64, 1, 1, 2}, true},
    {{96, 1, 1, 2}, true},
    {{128, 1, 1, 1}, false},
    {{144, 1, 1, 1}, false},
    {{64, 2, 1, 1}, false},
    {{96, 2, 1, 1}, false},
    {{96, 1, 1, 1}, false, kMidHalfRing, DType::f32},
    {{192, 2, 1, 1}, false, kMidWholeRing, DType::f32},
    {{192, 3, 1, 1}, false, kMidWholeRing, DType::f32},
    {{192, 2, 2, 1}, false, kMidWholeRing, DType::f32},
    {{96, 1, 1, 1, true}, true},
    {{96, 2, 1, 1, true}, true},
    {{96, 3, 1, 1, true}, false},
    {{192, 1, 1, 1, true}, false},
    {{192, 2, 1, 1, true}, false},
    {{192, 3, 1, 1, true}, false},
    {{192, 2, 2, 1, true}, false},
    {{128, 2, 1, 1}, false, kMidWholeRing, DType::bf16, true},
    {{128, 3, 1, 1}, false, kMidWholeRing, DType::bf16, true},
    {{32, 2, 1, 2}, false, kMidWholeRing, DType::bf16, true},
    {{128, 2, 1, 1, true}, false, kMidWholeRing, DType::bf16, true},
    {{32, 1, 1, 2}, false, kMidWholeRing, DType::bf16, false, true},
    {{48, 1, 1, 2}, false, kMidWholeRing, DType::bf16, false, true},
    {{64, 1, 1, 2}, false, kMidWholeRing, DType::bf16, false, true},
    {{96, 1, 1, 2}, false, kMidWholeRing, DType::bf16, false, true},
};

// -- gemm_wide.cuh --

constexpr int kWideColumns = 64;                   // of w, that a group multiplies
constexpr int kWideUnit = 8;                       // rows of w that stay together
constexpr int kWidePitch = kWideColumns * 2 + 16;  // bytes of a row of results on its way
constexpr int kWideBarrierBytes = 4 * kMostStages * 8;

/// A kernel's tile: 64 rows of w for each of `groups` of four warps, by `rows` rows of x; `depth`
/// slices of k in a stage.
struct WideTile {
  int rows, groups, depth;
  bool gated = false;
  constexpr int columns() const { return groups * kWideColumns; }
  constexpr int outputs() const { return gated ? columns() / 2 : columns(); }
  constexpr int consumers() const { return groups * kGroupThreads; }
  /// Two warps copy. Where sums leave no registers for more than twelve warps, a thread of the
  /// first does it between its products.
  constexpr bool copies_itself() const { return groups == 3 && rows > 192; }
  constexpr int copiers() const { return copies_itself() ? 0 : 2; }
  constexpr int threads() const { return consumers() + copiers() * kWarp; }
  constexpr int weight_bytes() const { return depth * columns() * kSliceRowBytes; }
  constexpr int row_bytes() const { return depth * rows * kSliceRowBytes; }
  /// Of a group's results on their way.
  constexpr int result_bytes() const { return rows * kWidePitch; }
  constexpr int shared_bytes(int stages, int row_stages) const {
    const int rings = stages * weight_bytes() + row_stages * row_bytes(),
              results = groups * result_bytes();
    return kWideBarrierBytes + 1024 + (rings > results ? rings : results);
  }
};

/// A kernel, and the stages of rows in its ring; 0: as many as of weights. Measured on an H200.
struct WideKernel {
  WideTile tile;
  int row_stages = 0;
};
inline constexpr WideKernel kWideKernels[] = {
    {{80, 1, 2}, 4},     {{96, 1, 2}, 4},     {{112, 1, 2}, 4},    {{128, 1, 2}, 4},
    {{80, 3, 1, true}},  {{96, 3, 1, true}},  {{112, 3, 1, true}}, {{128, 3, 1, true}},
    {{144, 3, 1, true}}, {{160, 3, 1, true}}, {{176, 3, 1, true}}, {{192, 3, 1, true}},
    {{208, 3, 1, true}}, {{224, 3, 1, true}}, {{240, 3, 1, true}}, {{256, 3, 1, true}},
};

// -- gemm_large.cuh --

constexpr int kLargeRows = 128, kLargeColumns = 256, kLargeDepth = 64;
constexpr int kLargeBlocks = 2;  // of a cluster
constexpr int kLargeParts = 16;  // in which a tile's results are stored

// -- moe_stream.cuh --

/// The product that adds a token's experts up: a block makes 16 columns of one token; a warp has
/// one of its experts after the other.
struct SumCut {
  static constexpr int kWarps = 8, kThreads = kWarps * kWarp, kColumns = 16;
  static constexpr int kDepth = 4, kStages = 2;  // of a warp's ring
  static constexpr int kStageBytes = kDepth * kColumns * kSliceRowBytes;
  static constexpr size_t shared_bytes(int64_t k, int64_t per_token) {
    return 1024 +
           static_cast<size_t>(kWarps * (kStages * kStageBytes + k * 2) + per_token * kColumns * 4);
  }
};

// -- moe_packed.cuh --

constexpr int kPackedExpertRows = 64;  // divides the rows of a weight
/// Tokens of a tile, and the shared memory that many take.
constexpr int kPackedTokens[] = {8, 16, 32, 128};
constexpr int kMostAnyPackedTokens = 32;  // where scales or zero points are not the usual ones
constexpr size_t kManyPackedBytes = 160 * 1024;

}  // namespace nanovllm
