// The copies of gemm_mid.cuh: a block's weights and rows of x, into a ring of stages.
#pragma once

#include "ops/cuda/gemm/gemm_skinny.cuh"
#include "ops/cuda/ptx/gemm_cluster.cuh"

namespace nanovllm {

struct MidShape {
  int rows, columns;  // of y; columns: a multiple of 8
  int64_t stride;     // of y's rows
  int tile_rows;      // of a tensor core tile that are used: a multiple of 8, at most 64
  int row_blocks;     // that cover all rows: even, if paired
  int block_rows;     // of x that a block copies: a multiple of 8
  int blocks;         // that have a tile, or would have, did none stay for several
  int steps;          // stages that cover a block's part of k
  int stages;         // of the ring
  int pace;           // of weights that are under way at once before the ring is full
  bool paired;
};

/// Weights complete on barriers of their own, which tell how fast they come.
struct MidRing : ProductRing {
  uint64_t *full_of_weight, *of_halves;
  unsigned char* half_sums;
};
/// A block's tile, and the first slice of its part of k.
struct MidPlace : TilePlace {
  int slice = 0;
};

/// Products in f32 are logits, which are many tiles to each SM: blocks stay, and copy for the next
/// tile while they store one.
template <class Y>
constexpr bool kStays = std::is_same_v<Y, float>;

/// Weights for one stage; in a pair, this block's half of them for both: half the slices or, where
/// there is one, the gate or up.
template <MidTile tile>
__device__ void copy_weight(const CUtensorMap& w, const MidShape& shape, const MidRing& ring,
                            const MidPlace& place, int step, int stage) {
  uint64_t* barrier = ring.full_of_weight + stage;
  arrive_expecting(barrier, tile.weight_bytes());
  const int slice = place.slice + step * tile.depth;
  if (!shape.paired)
    return copy_box_once(ring.weight(stage), &w, barrier, 0, place.column, 0, slice);
  constexpr bool kSlices = tile.depth % kPair == 0;
  const int rank = static_cast<int>(cluster_rank());
  copy_box_to((1 << kPair) - 1, ring.weight(stage) + rank * (tile.weight_bytes() / kPair), &w,
              barrier, 0, place.column, kSlices ? 0 : rank,
              kSlices ? slice + rank * (tile.depth / kPair) : slice);
}

template <MidTile tile>
__device__ void copy_rows_of(const CUtensorMap& x, const MidRing& ring, const MidPlace& place,
                             int step, int stage) {
  arrive_expecting(ring.full + stage, ring.stage_bytes - tile.weight_bytes());
  copy_box(ring.rows(stage), &x, ring.full + stage, 0, place.row, 0,
           place.slice + step * tile.depth);
}

/// f(place) for each tile of a block that stays.
template <MidTile tile, class F>
__device__ void for_tiles(const MidShape& shape, F&& f) {
  for (int i = static_cast<int>(blockIdx.x); i < shape.blocks; i += static_cast<int>(gridDim.x))
    f(MidPlace{place_of(shape, tile.outputs(), i)});
}

/// The two threads' parts where blocks stay.
template <MidTile tile>
__device__ void copy_all_weights(const CUtensorMap& w, const MidShape& shape, const MidRing& ring) {
  RingCursor at;
  for_tiles<tile>(shape, [&](const MidPlace& place) {
    for (int step = 0; step < shape.steps; ++step, at.next(shape.stages)) {
      wait_barrier(ring.empty + at.stage, at.parity ^ 1);
      copy_weight<tile>(w, shape, ring, place, step, at.stage);
    }
  });
  let_next_start();
}
template <MidTile tile>
__device__ void copy_all_rows(const CUtensorMap& x, const MidShape& shape, const MidRing& ring) {
  wait_for_previous();
  RingCursor at;
  for_tiles<tile>(shape, [&](const MidPlace& place) {
    for (int step = 0; step < shape.steps; ++step, at.next(shape.stages)) {
      wait_barrier(ring.empty + at.stage, at.parity ^ 1);
      copy_rows_of<tile>(x, ring, place, step, at.stage);
    }
  });
}

/// One thread's part. The kernel before may be a norm, whose loads wait behind what is asked for
/// here: so the ring fills at memory's pace.
template <MidTile tile>
__device__ void copy_weights(const CUtensorMap& w, const MidShape& shape, const MidRing& ring,
                             const MidPlace& place) {
  const int first = min(shape.steps, shape.stages);
  for (int i = 0; i < first; ++i) {
    if (i >= shape.pace) wait_barrier(ring.full_of_weight + i - shape.pace, 0);
    copy_weight<tile>(w, shape, ring, place, i, i);
  }
  let_next_start();
  RingCursor at;
  for (int step = first; step < shape.steps; ++step, at.next(shape.stages)) {
    wait_barrier(ring.empty + at.stage, at.parity);
    copy_weight<tile>(w, shape, ring, place, step, at.stage);
  }
}

/// Another's.
template <MidTile tile>
__device__ void copy_rows(const CUtensorMap& x, const MidShape& shape, const MidRing& ring,
                          const MidPlace& place) {
  wait_for_previous();
  RingCursor at;
  for (int step = 0; step < shape.steps; ++step, at.next(shape.stages)) {
    wait_barrier(ring.empty + at.stage, at.parity ^ 1);
    copy_rows_of<tile>(x, ring, place, step, at.stage);
  }
}

}  // namespace nanovllm
