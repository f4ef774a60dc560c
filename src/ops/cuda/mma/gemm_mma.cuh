// y[m, n] = x[m, k] w[n, k]^T for few rows, on GPUs without wgmma: of a packed weight (packed.cuh),
// up to some hundred, or of a plain one.
//
// Floor: the stored bytes over the memory's bandwidth; k / 16 dependent tensor core steps of about
// 33 cycles; of a packed weight 2.5 instructions for each number of 4 bits, 4 for one of 8. A warp
// multiplies 16 rows of the weight, a half of them gates where those are wanted, or 8, where that
// gives more warps a part. It brings them by cp.async through a ring of its own, on from one tile
// to the next: no warp waits for another's weights. Other warps copy x, of which all read the same,
// in panels of some columns.
#pragma once

#include "ops/cuda/gemm/gated.cuh"
#include "ops/cuda/mma/plain_mma.cuh"
#include "ops/cuda/ptx/mbarrier.cuh"

namespace nanovllm::gemm_mma {

struct Shape {
  int rows;                    // of y
  int64_t x_stride, y_stride;  // of rows
  int row_blocks, block_rows;  // that cover all rows; of x that a tile has
  int warps, copiers;          // of a block: that multiply; that copy x
  int units, up;               // eights of y's columns; of w's rows from a gate to its up, or 0
  int items;                   // tiles of y
  int record_bytes, groups;    // of eight rows of w by 128 columns (PackedLayout)
  int64_t w_stride;            // of a plain weight's rows, in bytes
  int chunks;                  // of 128 columns, along k
  int half;                    // of a packed weight in halves: those of one; else 0
  int stages;                  // of a warp's ring: one of kMmaStages
  int panels, panel_bytes;     // of the ring of x
  int rings;                   // where the warps' rings begin, in bytes
};

/// The first row of x in the tile of `item`.
__device__ inline int first_row(const Shape& shape, int item) {
  return item % shape.row_blocks * shape.block_rows;
}
/// A warp's first eight of y's columns in it; past the end the last is done again, and not stored.
template <int kUnits>
__device__ int first_unit(const Shape& shape, int item, int warp) {
  const int tile = item / shape.row_blocks * shape.warps + warp;
  return shape.up > 0 ? tile : kUnits * tile;
}
/// One of the eights of w's rows that a warp has there.
template <int kUnits>
__device__ int unit_of(const Shape& shape, int item, int warp, int i) {
  const int first = first_unit<kUnits>(shape, item, warp), last = shape.units - 1;
  return shape.up > 0 ? min(first, last) + i * shape.up : min(first + i, last);
}

/// A warp's copies: the records of all its tiles, chunk by chunk, through its ring.
template <class Tile>
struct Supply {
  static constexpr int kUnits = Tile::kUnits, kRound = kWarp * 16;
  static constexpr int kRounds = Tile::kNumberBytes / kRound;
  const Shape& shape;
  const unsigned char *w, *from[kUnits];  // the lane's first bytes of each record
  const unsigned char* scales;            // the lane's, of one of them
  int item, warp, lane, left = 0;         // chunks of the tile
  uint32_t to_scales;                     // their place in a stage
  bool has_scales;

  __device__ Supply(const Shape& of, const unsigned char* weight, int of_block)
      : shape(of),
        w(weight),
        item(static_cast<int>(blockIdx.x)),
        warp(of_block),
        lane(static_cast<int>(threadIdx.x) % kWarp),
        to_scales(static_cast<uint32_t>(of_unit() * of.record_bytes + Tile::kNumberBytes +
                                        lane % 16 * 16)),
        has_scales(!Tile::kPlain && lane % 16 < 2 * of.groups && lane / 16 < kUnits) {
    begin();
  }
  /// Half of the lanes bring either record's scales.
  __device__ int of_unit() const { return min(lane / 16, kUnits - 1); }
  __device__ const unsigned char* first_record(int i) const {
    const int64_t unit = unit_of<kUnits>(shape, item, warp, i);
    return w + unit * (Tile::kPlain ? kPackedRows * shape.w_stride
                                    : int64_t{shape.chunks} * shape.record_bytes);
  }
  __device__ void begin() {
    if (item >= shape.items) return;
    left = shape.chunks;
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      from[i] = first_record(i) +
                (Tile::kPlain ? lane / 16 * shape.w_stride + lane % 16 * 16 : int64_t{lane} * 16);
    scales = first_record(of_unit()) + Tile::kNumberBytes + lane % 16 * 16;
  }
  /// The next records, if any are left, go to a stage. A group of copies in any case.
  __device__ void issue(unsigned char* stage) {
    const bool more = left > 0;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      unsigned char* const record = stage + i * shape.record_bytes;
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
        if constexpr (Tile::kPlain)
          copy_async(record + plain_place(lane / 16 + 2 * r, lane % 16),
                     from[i] + 2 * r * shape.w_stride, more);
        else
          copy_async(record + lane * 16 + r * kRound, from[i] + r * kRound, more);
      from[i] += Tile::kPlain ? kPlainRowBytes : shape.record_bytes;
    }
    if (has_scales) copy_async(stage + to_scales, scales, more);
    scales += shape.record_bytes;
    commit_copies();
    if (--left == 0) item += static_cast<int>(gridDim.x), begin();
  }
};

/// Waits until the oldest copies of a full ring are there, which has as many stages as some
/// kMmaStages from i on.
template <size_t i = 0>
__device__ void wait_stage(int stages) {
  constexpr int kStages = kMmaStages[i];
  if constexpr (i + 1 < std::size(kMmaStages))
    if (stages != kStages) return wait_stage<i + 1>(stages);
  wait_copies<kStages - 1>();
  __syncwarp();
}

/// x in shared memory: panels of kColumns columns, in a ring.
template <int kTiles>
struct Panels {
  static constexpr int kColumns = mma_panel_columns(kTiles), kPitch = mma_panel_pitch(kTiles);
  unsigned char* data;
  uint64_t *full, *empty;
};

/// The other warps' part, `thread` of them: all panels of all tiles.
template <int kTiles>
__device__ void copy_panels(const __nv_bfloat16* x, const Shape& shape,
                            const Panels<kTiles>& panels, int thread) {
  constexpr int kPieces = Panels<kTiles>::kColumns / 8;  // of a row, 16 bytes each
  const int threads = shape.copiers * kWarp, columns = shape.chunks * kPackedColumns,
            row_step = max(threads / kPieces, 1), piece_step = min(threads, kPieces),
            row0 = thread / kPieces, piece0 = thread % kPieces;
  wait_for_previous();
  let_next_start();
  RingCursor at;
  for (int item = static_cast<int>(blockIdx.x); item < shape.items;
       item += static_cast<int>(gridDim.x)) {
    const int first = first_row(shape, item), rows = min(shape.block_rows, shape.rows - first);
    for (int column = 0; column < columns; column += Panels<kTiles>::kColumns) {
      wait_barrier(panels.empty + at.stage, at.parity ^ 1);
      const int left = columns - column;
      for (int c = piece0 * 8; c < min(left, Panels<kTiles>::kColumns); c += piece_step * 8) {
        unsigned char* to =
            panels.data + at.stage * shape.panel_bytes + row0 * Panels<kTiles>::kPitch + c * 2;
        const __nv_bfloat16* from = x + (first + row0) * shape.x_stride + column + c;
#pragma unroll 4
        for (int row = row0; row < rows; row += row_step) {
          copy_async(to, from, true);
          to += row_step * Panels<kTiles>::kPitch;
          from += row_step * shape.x_stride;
        }
      }
      arrive_after_copies(panels.full + at.stage);
      at.next(shape.panels);
    }
  }
}

template <int kUnits, int kTiles, int kSums>
__device__ void store_tile(__nv_bfloat16* y, const Shape& shape, const float (&sum)[kSums][4],
                           int item, int warp) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, first = first_row(shape, item),
            rows = min(first + shape.block_rows, shape.rows),
            unit = first_unit<kUnits>(shape, item, warp);
  y += int64_t{unit} * kPackedRows;
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
    const auto& c = sum[j];
    if constexpr (kUnits == 1) {
#pragma unroll
      for (int half = 0; half < min(kTiles, 2); ++half)
        if (const int row = first + 16 * j + 8 * half + lane / 4; row < rows && unit < shape.units)
          *reinterpret_cast<uint32_t*>(y + row * shape.y_stride + lane % 4 * 2) =
              pack_bf16(c[2 * half], c[2 * half + 1]);
    } else {
      const int row = first + 8 * j + lane % 4 * 2;
      if (shape.up > 0) {
        const uint32_t gate = pack_bf16(c[0], c[1]), up = pack_bf16(c[2], c[3]);
        store_two(y, shape.y_stride, silu_times_straight(low_of(gate), low_of(up)),
                  silu_times_straight(high_of(gate), high_of(up)), row, rows, unit < shape.units);
      } else {
        store_two(y, shape.y_stride, c[0], c[1], row, rows, unit < shape.units);
        store_two(y + kPackedRows, shape.y_stride, c[2], c[3], row, rows, unit + 1 < shape.units);
      }
    }
  }
}

/// A warp's part: it multiplies the eights of w's rows that are its own, for each tile.
template <class Tile>
__device__ void multiply_tiles(__nv_bfloat16* y, const unsigned char* w, const uint32_t* row_scales,
                               const Shape& shape, const Panels<Tile::kTiles>& panels,
                               unsigned char* ring, int warp) {
  constexpr int kUnits = Tile::kUnits, kChunks = Panels<Tile::kTiles>::kColumns / kPackedColumns;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, stage_bytes = kUnits * shape.record_bytes,
            ring_bytes = shape.stages * stage_bytes;
  Supply<Tile> supply(shape, w, warp);
  for (int at = 0; at < ring_bytes; at += stage_bytes) supply.issue(ring + at);
  wait_for_previous();
  const uint32_t x = shared_address(panels.data) + Tile::row_place(lane, shape.block_rows);
  Tile tile(shape.record_bytes, shape.groups);
  const auto load_row_scales = [&](int item) {
    if constexpr (!Tile::kPlain) {
      if (shape.groups > 0 || item >= shape.items) return;
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
        tile.numbers.scales[i] =
            row_scales[unit_of<kUnits>(shape, item, warp, i) * kPackedRows + lane / 4];
    }
  };
  RingCursor panel;
  int stage = 0;  // bytes
  load_row_scales(static_cast<int>(blockIdx.x));
  wait_stage(shape.stages);
  tile.begin(ring);
  for (int item = static_cast<int>(blockIdx.x); item < shape.items;
       item += static_cast<int>(gridDim.x)) {
    for (int chunk = 0; chunk < shape.chunks;) {
      wait_barrier(panels.full + panel.stage, panel.parity);
      uint32_t place = x + panel.stage * shape.panel_bytes;
      tile.begin_panel(place);
      for (const int end = min(chunk + kChunks, shape.chunks); chunk < end;
           ++chunk, place += kPackedColumns * 2) {
        if constexpr (!Tile::kPlain)
          if (chunk > 0 && chunk == shape.half) tile.end_first_half();
        tile.multiply(place, chunk + 1 < end, [&] {
          __syncwarp();
          supply.issue(ring + stage);
          stage += stage_bytes;
          if (stage == ring_bytes) stage = 0;
          if (chunk + 1 == shape.chunks) load_row_scales(item + static_cast<int>(gridDim.x));
          wait_stage(shape.stages);
          return ring + stage;
        });
      }
      __syncwarp();
      if (lane == 0) arrive(panels.empty + panel.stage);
      panel.next(shape.panels);
    }
    if constexpr (!Tile::kPlain)
      if (shape.half > 0) tile.add_halves();
    store_tile<kUnits, Tile::kTiles>(y, shape, tile.sum, item, warp);
    tile.clear();
  }
}

/// `row_scales`: of whole rows of a packed weight, if that is what scales are for.
template <class Tile>
__global__ void __launch_bounds__((kMostPackedWarps + kMostPackedCopiers) * kWarp, 1)
    gemm_mma_kernel(__nv_bfloat16* y, const unsigned char* w, const __nv_bfloat16* x,
                    const uint32_t* row_scales, const __grid_constant__ Shape shape) {
  constexpr int kTiles = Tile::kTiles;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* const full = reinterpret_cast<uint64_t*>(shared);
  const Panels<kTiles> panels{shared + kPackedBarrierBytes, full, full + kMostPanels};
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == 0)
    for (int i = 0; i < shape.panels; ++i) {
      init_barrier(&panels.full[i], shape.copiers * kWarp);
      init_barrier(&panels.empty[i], shape.warps);
    }
  __syncthreads();
  if (warp >= shape.warps)
    copy_panels<kTiles>(x, shape, panels, static_cast<int>(threadIdx.x) - shape.warps * kWarp);
  else
    multiply_tiles<Tile>(
        y, w, row_scales, shape, panels,
        shared + shape.rings + warp * shape.stages * Tile::kUnits * shape.record_bytes, warp);
}

}  // namespace nanovllm::gemm_mma
