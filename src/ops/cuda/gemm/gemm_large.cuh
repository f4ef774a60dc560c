// y = x w^T of many rows on Hopper, or what GemmEnd says: blocks stay on their SM and take tiles
// of 128 rows by 256 columns. A thread of the first warpgroup copies slices of 64 along k into a
// ring (TMA); two warpgroups have 64 rows each and multiply by wgmma, k in order, which gives the
// bits of every other kernel of this product (gemm.cpp). Two blocks form a cluster with tiles side
// by side: each copies half of their common columns' weights to both.
//
// A finished tile's sums are rounded into registers at once, and leave them while the tensor cores
// work on the next tile: a sixteenth, with what is done to it (gemm_large_ends.cuh), in each of
// that tile's first steps.
#pragma once

#include "ops/cuda/gemm/gemm_large_heads.cuh"
#include "ops/cuda/ptx/gemm_cluster.cuh"

namespace nanovllm {

constexpr int kLargeStages = 4, kLargeThreads = 384;

struct __align__(1024) LargeStage {
  __nv_bfloat16 x[kLargeRows * kLargeDepth], w[kLargeColumns * kLargeDepth];
};
struct LargeShared {
  LargeStage stage[kLargeStages];
  uint64_t full[kLargeStages], empty[kLargeStages];
};

/// Where a cluster's tile lies: groups of row pairs one after another, and in each all columns, so
/// that what runs at the same time shares its rows and its columns in the L2 cache.
struct LargeTile {
  int row, column;  // of this block's tile, counted in tiles
  __device__ LargeTile(const LargeShape& shape, int index, int rank) {
    const int columns = shape.pairs / shape.row_pairs, in_group = shape.groups * columns,
              group = index / in_group, first = group * shape.groups,
              height = min(shape.groups, shape.row_pairs - first), rest = index % in_group;
    row = (first + rest % height) * kLargeBlocks + rank;
    column = rest / height;
  }
};

/// One thread's part: all copies.
template <bool gated>
__device__ void copy_tiles(LargeShared& shared, const CUtensorMap& x, const CUtensorMap& w,
                           const LargeShape& shape) {
  const int rank = static_cast<int>(cluster_rank());
  constexpr int kHalf = kLargeColumns / kLargeBlocks;
  RingCursor at;
  for (int i = blockIdx.x / kLargeBlocks; i < shape.pairs; i += gridDim.x / kLargeBlocks) {
    const LargeTile tile(shape, i, rank);
    const int x_row = tile.row * kLargeRows,
              w_row = gated ? tile.column * kHalf + rank * shape.up
                            : tile.column * kLargeColumns + rank * kHalf;
    for (int step = 0; step < shape.steps; ++step, at.next(kLargeStages)) {
      wait_barrier(&shared.empty[at.stage], at.parity ^ 1);
      LargeStage& stage = shared.stage[at.stage];
      uint64_t* full = &shared.full[at.stage];
      arrive_expecting(full, sizeof(LargeStage));
      copy_box(stage.x, &x, full, step * kLargeDepth, x_row);
      copy_box_to((1 << kLargeBlocks) - 1, stage.w + rank * kHalf * kLargeDepth, &w, full,
                  step * kLargeDepth, w_row);
    }
  }
}

/// Two warpgroups' part: the products of all tiles.
template <GemmEnd end>
__device__ void multiply_tiles(LargeShared& shared, __nv_bfloat16* y, const LargeShape& shape,
                               const LargeInput<end>& input) {
  const int rank = static_cast<int>(cluster_rank()), lane = threadIdx.x % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp - 4;
  constexpr int kTileBytes = 64 * kLargeDepth * sizeof(__nv_bfloat16);
  RingCursor at;
  int last = 0;
  float sum[128];
  LargeResult<end> result;
  const auto multiply = [&](bool accumulate) {
    wait_barrier(&shared.full[at.stage], at.parity);
    LargeStage& stage = shared.stage[at.stage];
    const uint64_t a = tile_of(stage.x) + (warp / 4 * kTileBytes >> 4), b = tile_of(stage.w);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kLargeDepth / 16; ++i)
      product_n256(sum, a + 2 * i, b + 2 * i, accumulate || i > 0);
    wgmma_commit();
  };
  // The step before has been read: both blocks' copies wait for that.
  const auto release = [&](int stage) {
    if (lane < kLargeBlocks) arrive_at(&shared.empty[stage], lane);
  };
  for (int i = blockIdx.x / kLargeBlocks; i < shape.pairs; i += gridDim.x / kLargeBlocks) {
    const auto end_step = [&](bool first) {
      wgmma_wait<1>();
      if (!first) release(last);
      last = at.stage;
      at.next(kLargeStages);
    };
    const auto multiply_chain = [&] {
#pragma unroll
      for (int step = 0; step < kLargeParts; ++step) {
        multiply(step > 0);
        result.store_part(shape, input, step);
        end_step(step == 0);
      }
      for (int step = kLargeParts; step < shape.chain; ++step) {
        multiply(true);
        end_step(false);
      }
      wgmma_wait<0>();
      pin(sum);
      release(last);
    };
    if constexpr (end == GemmEnd::store) {
#pragma unroll 1
      for (int left = shape.steps;;) {
        multiply_chain();
        left -= shape.chain;
        if (left == 0) break;
        result.take(sum);
        result.to = nullptr;
      }
      if (shape.chain < shape.steps)
        result.add(sum);
      else
        result.take(sum);
    } else {
      multiply_chain();
      result.take(sum);
    }
    const LargeTile tile(shape, i, rank);
    result.place(
        y, shape, input, tile.row * kLargeRows + 16 * warp + lane / 4,
        tile.column * (end == GemmEnd::gate ? kLargeColumns / 2 : kLargeColumns) + lane % 4 * 8);
  }
  result.store_all(shape, input);
}

/// `x`, `w`: boxes of 128 rows by 64 columns. The grid is a multiple of kLargeBlocks.
template <GemmEnd end>
__global__ void __cluster_dims__(kLargeBlocks, 1, 1) __launch_bounds__(kLargeThreads, 1)
    gemm_large_kernel(__nv_bfloat16* y, const __grid_constant__ CUtensorMap x,
                      const __grid_constant__ CUtensorMap w, const LargeShape shape,
                      const __grid_constant__ LargeInput<end> input) {
  extern __shared__ __align__(1024) char memory[];
  LargeShared& shared = *reinterpret_cast<LargeShared*>(memory);
  if (threadIdx.x == 0) {
    prefetch_map(&x);
    prefetch_map(&w);
    for (int i = 0; i < kLargeStages; ++i) {
      init_barrier(&shared.full[i], 1);
      init_barrier(&shared.empty[i], kLargeBlocks * 8);  // a lane of each warp that multiplies
    }
    fence_new_barriers();
  }
  sync_cluster();
  wait_for_previous();
  if (threadIdx.x < 128) {
    leave_registers<24>();
    if (threadIdx.x == 0) {
      copy_tiles<end == GemmEnd::gate>(shared, x, w, shape);
      let_next_start();
    }
    __syncwarp();
  } else {
    take_registers<240>();
    multiply_tiles<end>(shared, y, shape, input);
  }
  // The other block still arrives here, and copies to here.
  sync_cluster();
}

}  // namespace nanovllm
