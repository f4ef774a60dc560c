// y = x w^T of many rows on Hopper, or silu_and_mul() of it: blocks stay on their SM and take tiles
// of 128 rows by 256 columns. A thread of the first warpgroup copies slices of 64 along k into a
// ring (TMA); two warpgroups have 64 rows each and multiply by wgmma, k in order, which gives the
// bits of every other kernel of this product (gemm.cpp). Two blocks form a cluster with tiles side
// by side: each copies half of their common columns' weights to both.
//
// A finished tile's sums are rounded into registers at once, and leave them while the tensor cores
// work on the next tile: a sixteenth, with its activation, in each of that tile's first steps.
#pragma once

#include "ops/cuda/device.cuh"
#include "ops/cuda/gemm_cluster.cuh"
#include "ops/cuda/mma.cuh"

namespace nanovllm {

constexpr int kLargeRows = 128, kLargeColumns = 256, kLargeDepth = 64, kLargeStages = 4;
constexpr int kLargeThreads = 384, kLargeBlocks = 2;  // blocks: of a cluster
constexpr int kLargeParts = 16;                       // in which a tile's results are stored

struct LargeShape {
  int rows, columns;  // of y
  int64_t stride;     // of y's rows
  int steps;          // of 64 along k, kLargeParts at least
  int pairs, row_pairs,
      groups;  // tiles of a cluster: all, those above each other, those of a group
  int up;      // w's row where those of `up` begin, if gated
};

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

struct LargeCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage == kLargeStages) stage = 0, parity ^= 1;
  }
};

/// One thread's part: all copies.
template <bool gated>
__device__ void copy_tiles(LargeShared& shared, const CUtensorMap& x, const CUtensorMap& w,
                           const LargeShape& shape) {
  const int rank = static_cast<int>(cluster_rank());
  constexpr int kHalf = kLargeColumns / kLargeBlocks;
  LargeCursor at;
  for (int i = blockIdx.x / kLargeBlocks; i < shape.pairs; i += gridDim.x / kLargeBlocks) {
    const LargeTile tile(shape, i, rank);
    const int x_row = tile.row * kLargeRows,
              w_row = gated ? tile.column * kHalf + rank * shape.up
                            : tile.column * kLargeColumns + rank * kHalf;
    for (int step = 0; step < shape.steps; ++step, at.next()) {
      wait_barrier(&shared.empty[at.stage], at.parity ^ 1);
      LargeStage& stage = shared.stage[at.stage];
      uint64_t* full = &shared.full[at.stage];
      arrive_expecting(full, sizeof(LargeStage));
      copy_box_to_keep(stage.x, &x, full, step * kLargeDepth, x_row);
      copy_box_to((1 << kLargeBlocks) - 1, stage.w + rank * kHalf * kLargeDepth, &w, full,
                  step * kLargeDepth, w_row);
    }
  }
}

/// The two bf16 of a register.
__device__ inline float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

/// a / b, rounded once as the division is, without its branch: for |a| of 2^-60 to 2^60 and b of 1
/// to 2^60, where none of these steps leaves the normal numbers.
__device__ __forceinline__ float quotient(float a, float b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = __fmaf_rn(r, __fmaf_rn(-b, r, 1.0f), r);
  float q = __fmul_rn(a, r);
  q = __fmaf_rn(r, __fmaf_rn(-b, q, a), q);
  return __fmaf_rn(r, __fmaf_rn(-b, q, a), q);
}

/// silu_times() of four gates with their ups, two bf16 in each register, into the gates.
__device__ __forceinline__ void silu_times_pairs(uint32_t& gate0, uint32_t& gate1, uint32_t up0,
                                                 uint32_t up1) {
  float g[4] = {low_of(gate0), high_of(gate0), low_of(gate1), high_of(gate1)},
        u[4] = {low_of(up0), high_of(up0), low_of(up1), high_of(up1)}, y[4];
  constexpr float kLeast = 0x1p-60f, kMost = 32.0f;  // e^32 < 2^60
  const float least = fminf(fminf(fabsf(g[0]), fabsf(g[1])), fminf(fabsf(g[2]), fabsf(g[3]))),
              most = fmaxf(fmaxf(fabsf(g[0]), fabsf(g[1])), fmaxf(fabsf(g[2]), fabsf(g[3])));
  if (least >= kLeast && most <= kMost) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = quotient(g[i], 1.0f + expf(-g[i])) * u[i];
  } else {
    // Rare, and code is to be short: each in turn at the same place.
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const float next = silu_times(g[0], u[0]);
#pragma unroll
      for (int k = 0; k < 3; ++k) g[k] = g[k + 1], u[k] = u[k + 1], y[k] = y[k + 1];
      y[3] = next;
    }
  }
  gate0 = pack_bf16(y[0], y[1]);
  gate1 = pack_bf16(y[2], y[3]);
}

/// The rounded sums of a tile that was finished before: pair[2 j + r] is columns 8 j + 2 (lane % 4)
/// and the next of row lane / 4 + 8 r of the warp's 16.
template <bool gated>
struct LargeResult {
  uint32_t pair[64];
  __nv_bfloat16* to = nullptr;  // the lane's first vector of its first row; null: nothing is held
  int rows, columns;            // of y, left from there

  __device__ void take(const float (&sum)[128]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) pair[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
  }
  __device__ void store(const LargeShape& shape, int q, int r) {
    uint32_t unit[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) unit[i] = pair[2 * (4 * q + i) + r];
    transpose_quad(unit);
    if (8 * r < rows && 32 * q < columns)
      *reinterpret_cast<uint4*>(to + 8 * r * shape.stride + 32 * q) = {unit[0], unit[1], unit[2],
                                                                       unit[3]};
  }
  /// Part `i` of kLargeParts, in order.
  __device__ void store_part(const LargeShape& shape, int i) {
    if (!to) return;
    if constexpr (gated) {
      const int q = i / 4, r = i / 2 % 2, first = 2 * (4 * q + i % 2 * 2) + r;
      silu_times_pairs(pair[first], pair[first + 2], pair[first + 32], pair[first + 34]);
      if (i % 2 == 1) store(shape, q, r);
    } else {
      store(shape, i / 2, i % 2);
    }
  }
};

/// Two warpgroups' part: the products of all tiles.
template <bool gated>
__device__ void multiply_tiles(LargeShared& shared, __nv_bfloat16* y, const LargeShape& shape) {
  const int rank = static_cast<int>(cluster_rank()), lane = threadIdx.x % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp - 4;
  constexpr int kTileBytes = 64 * kLargeDepth * sizeof(__nv_bfloat16);
  LargeCursor at;
  int last = 0;
  float sum[128];
  LargeResult<gated> result;
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
      at.next();
    };
#pragma unroll
    for (int step = 0; step < kLargeParts; ++step) {
      multiply(step > 0);
      result.store_part(shape, step);
      end_step(step == 0);
    }
    for (int step = kLargeParts; step < shape.steps; ++step) {
      multiply(true);
      end_step(false);
    }
    wgmma_wait<0>();
    pin(sum);
    release(last);
    result.take(sum);
    const LargeTile tile(shape, i, rank);
    const int row = tile.row * kLargeRows + 16 * warp + lane / 4,
              column = tile.column * (gated ? kLargeColumns / 2 : kLargeColumns) + lane % 4 * 8;
    result.to = y + row * shape.stride + column;
    result.rows = shape.rows - row;
    result.columns = shape.columns - column;
  }
#pragma unroll
  for (int step = 0; step < kLargeParts; ++step) result.store_part(shape, step);
}

/// `x`, `w`: boxes of 128 rows by 64 columns. The grid is a multiple of kLargeBlocks.
template <bool gated>
__global__ void __cluster_dims__(kLargeBlocks, 1, 1) __launch_bounds__(kLargeThreads, 1)
    gemm_large_kernel(__nv_bfloat16* y, const __grid_constant__ CUtensorMap x,
                      const __grid_constant__ CUtensorMap w, const LargeShape shape) {
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
      copy_tiles<gated>(shared, x, w, shape);
      let_next_start();
    }
    __syncwarp();
  } else {
    take_registers<240>();
    multiply_tiles<gated>(shared, y, shape);
  }
  // The other block still arrives here, and copies to here.
  sync_cluster();
}

}  // namespace nanovllm
