// y[m, n] = x[m, k] w[n, k]^T for 65 to 256 rows, on sm_90: gemm_mid.cuh with the operands
// exchanged. The weight's rows are wgmma's A, 64 to a group of four warps, and x is B, so that one
// instruction takes all rows of a block, whatever their number, and x is read from shared memory
// once for 64 columns of y.
//
// A tile of y leaves through shared memory, where it is transposed. Gated: each eight of w's rows
// in the gate lie before the eight of up that belong to them.
#pragma once

#include "ops/cuda/comm/sent_parts.cuh"
#include "ops/cuda/gemm/gated.cuh"
#include "ops/cuda/gemm/gemm_skinny.cuh"
#include "ops/cuda/ptx/gemm_cluster.cuh"
#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

struct WideShape {
  int rows, columns;       // of y
  int64_t stride;          // of y's rows
  int row_blocks;          // that cover all rows
  int block_rows;          // of x that a block copies: a multiple of 8
  int blocks;              // that have a tile
  int steps;               // stages that cover k
  int stages, row_stages;  // of the rings of weights and of rows
};

template <WideTile tile>
__device__ void wide_copy_weight(const CUtensorMap& w, const StageRing& ring,
                                 const TilePlace& place, int step, int stage) {
  arrive_expecting(ring.full + stage, tile.weight_bytes());
  copy_box_once(ring.at(stage), &w, ring.full + stage, 0, 0, 0, place.column / kWideUnit,
                step * tile.depth);
}
template <WideTile tile>
__device__ void wide_copy_x(const CUtensorMap& x, const WideShape& shape, const StageRing& ring,
                            const TilePlace& place, int step, int stage) {
  arrive_expecting(ring.full + stage, tile.depth * shape.block_rows * kSliceRowBytes);
  copy_box(ring.at(stage), &x, ring.full + stage, 0, place.row, 0, step * tile.depth);
}

/// One thread's part. What fits the ring is asked for before the kernel before has ended.
template <WideTile tile>
__device__ void wide_copy_weights(const CUtensorMap& w, const WideShape& shape,
                                  const StageRing& ring, const TilePlace& place) {
  RingCursor at;
  for (int step = 0; step < shape.steps; ++step) {
    if (step == shape.stages) let_next_start();
    wait_barrier(ring.empty + at.stage, at.parity ^ 1);
    wide_copy_weight<tile>(w, ring, place, step, at.stage);
    at.next(shape.stages);
  }
  if (shape.steps <= shape.stages) let_next_start();
}
/// Another's.
template <WideTile tile>
__device__ void wide_copy_rows(const CUtensorMap& x, const WideShape& shape, const StageRing& ring,
                               const TilePlace& place) {
  wait_for_previous();
  RingCursor at;
  for (int step = 0; step < shape.steps; ++step) {
    wait_barrier(ring.empty + at.stage, at.parity ^ 1);
    wide_copy_x<tile>(x, shape, ring, place, step, at.stage);
    at.next(shape.row_stages);
  }
}
/// Both where no warp is there for it: by one thread, before the products.
template <WideTile tile>
__device__ void wide_copy_first(const CUtensorMap& w, const CUtensorMap& x, const WideShape& shape,
                                const StageRing& weights, const StageRing& rows,
                                const TilePlace& place) {
  for (int step = 0; step < min(shape.stages, shape.steps); ++step)
    wide_copy_weight<tile>(w, weights, place, step, step);
  let_next_start();
  wait_for_previous();
  for (int step = 0; step < min(shape.row_stages, shape.steps); ++step)
    wide_copy_x<tile>(x, shape, rows, place, step, step);
}
/// And when the stages of `step` are left.
template <WideTile tile>
__device__ void wide_copy_next(const CUtensorMap& w, const CUtensorMap& x, const WideShape& shape,
                               const StageRing& weights, const StageRing& rows,
                               const TilePlace& place, int step, const RingCursor& w_at,
                               const RingCursor& x_at) {
  if (step + shape.stages < shape.steps) {
    wait_barrier(weights.empty + w_at.stage, w_at.parity);
    wide_copy_weight<tile>(w, weights, place, step + shape.stages, w_at.stage);
  }
  if (step + shape.row_stages < shape.steps) {
    wait_barrier(rows.empty + x_at.stage, x_at.parity);
    wide_copy_x<tile>(x, shape, rows, place, step + shape.row_stages, x_at.stage);
  }
}

/// A group's sums over all of k. `halves`: those of both halves of k, one after the other.
template <WideTile tile, bool halves>
__device__ void wide_multiply(float (&sum)[tile.rows / 2], const CUtensorMap& w_map,
                              const CUtensorMap& x_map, const WideShape& shape,
                              const StageRing& weights, const StageRing& rows,
                              const TilePlace& place, int group) {
  const int lane = threadIdx.x % kWarp;
  const uint64_t next_slice = static_cast<uint64_t>(shape.block_rows * kSliceRowBytes >> 4);
#pragma unroll
  for (int i = 0; i < tile.rows / 2; ++i) sum[i] = 0.0f;
  RingCursor w_at, x_at, w_last, x_last;
  int step = 0;
  const auto multiply_until = [&](int end) {
#pragma unroll 1
    for (; step < end; ++step) {
      wait_barrier(rows.full + x_at.stage, x_at.parity);
      wait_barrier(weights.full + w_at.stage, w_at.parity);
      const uint64_t w = tile_of(weights.at(w_at.stage) + group * kWideColumns * kSliceRowBytes),
                     x = tile_of(rows.at(x_at.stage));
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < tile.depth; ++slice)
#pragma unroll
        for (int i = 0; i < kSliceWidth / 16; ++i)
          product<tile.rows>(sum, w + (slice * tile.columns() * kSliceRowBytes >> 4) + 2 * i,
                             x + slice * next_slice + 2 * i);
      wgmma_commit();
      wgmma_wait<1>();  // all but these
      if (step > 0) {   // the stages before these are free
        if (lane == 0) {
          arrive(weights.empty + w_last.stage);
          arrive(rows.empty + x_last.stage);
        }
        if constexpr (tile.copies_itself()) {
          if (threadIdx.x == 0)
            wide_copy_next<tile>(w_map, x_map, shape, weights, rows, place, step - 1, w_last,
                                 x_last);
          __syncwarp();
        }
      }
      w_last = w_at;
      x_last = x_at;
      w_at.next(shape.stages);
      x_at.next(shape.row_stages);
    }
    wgmma_wait<0>();
  };
  if constexpr (halves) {
    multiply_halves(sum, shape.steps, multiply_until);
  } else {
    multiply_until(shape.steps);
    pin(sum);
  }
}

/// Four 8x8 matrices of bf16 to shared memory, transposed: lane l gives the address of a row of
/// matrix l / 8.
__device__ inline void store_matrices_transposed(void* row, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

/// Where a tile's results go: rows of y, or to where they are summed (PartSender).
struct WideRows {
  __nv_bfloat16* y;
  int64_t stride;
  __device__ void send(int row, int column, uint4 piece) const {
    *reinterpret_cast<uint4*>(y + row * stride + column) = piece;
  }
};
__device__ inline WideRows wide_output(__nv_bfloat16* y, const WideShape& shape, const TilePlace&) {
  return {y, shape.stride};
}
__device__ inline PartSender wide_output(const SentParts& to, const WideShape&,
                                         const TilePlace& place) {
  return {to, place.column};
}

template <WideTile tile, class Output>
__device__ void wide_store(const Output& output, const WideShape& shape, const TilePlace& place,
                           const float (&sum)[tile.rows / 2], unsigned char* shared, int group) {
  const int lane = threadIdx.x % kWarp, thread = threadIdx.x % kGroupThreads, warp = thread / kWarp;
  unsigned char* const mine = shared + group * tile.result_bytes();
  // Matrices: rows 8 j .. 8 j + 7, the warp's columns 0 .. 7 and 8 .. 15; then of 8 (j + 1).
  unsigned char* const to =
      mine + (lane / 16 * 8 + lane % 8) * kWidePitch + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
  for (int j = 0; j < tile.rows / 8; j += 2) {
    const uint32_t v[4] = {
        pack_bf16(sum[4 * j], sum[4 * j + 1]), pack_bf16(sum[4 * j + 2], sum[4 * j + 3]),
        pack_bf16(sum[4 * j + 4], sum[4 * j + 5]), pack_bf16(sum[4 * j + 6], sum[4 * j + 7])};
    store_matrices_transposed(to + 8 * j * kWidePitch, v);
  }
  asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
  constexpr int kUnits = tile.gated ? 4 : 8;
  const int rows = min(tile.rows, shape.rows - place.row), unit = thread % kUnits,
            column = place.column + group * (tile.outputs() / tile.groups) + 8 * unit;
  const bool inside = column < shape.columns;
#pragma unroll 1
  for (int row = thread / kUnits; row < (rows + 31) / 32 * 32; row += kGroupThreads / kUnits) {
    const auto* at = reinterpret_cast<const uint4*>(mine + min(row, rows - 1) * kWidePitch);
    const bool needed = inside && row < rows && place.row + row >= place.own;
    if constexpr (tile.gated) {
      const uint4 v = silu_times_vector(at[2 * unit], at[2 * unit + 1], needed);
      if (needed) output.send(place.row + row, column, v);
    } else {
      if (needed) output.send(place.row + row, column, at[unit]);
    }
  }
}

/// `y`: of bf16, or SentParts.
template <int kRows, int kGroups, int kDepth, bool gated, bool halves, class Y>
__global__ void __launch_bounds__(WideTile{kRows, kGroups, kDepth}.threads(), 1)
    gemm_wide_kernel(const __grid_constant__ Y y, const __grid_constant__ CUtensorMap w,
                     const __grid_constant__ CUtensorMap x, const WideShape shape) {
  constexpr WideTile tile{kRows, kGroups, kDepth, gated};
  extern __shared__ __align__(16) unsigned char shared[];
  const int block = static_cast<int>(blockIdx.x);
  if (block >= shape.blocks) {
    let_next_start();
    wait_for_previous();
    return;
  }
  auto* const barriers = reinterpret_cast<uint64_t*>(shared);
  unsigned char* data = shared + kWideBarrierBytes;
  data += (1024 - shared_address(data) % 1024) % 1024;
  const StageRing weights{data, tile.weight_bytes(), barriers, barriers + kMostStages},
      rows{data + shape.stages * tile.weight_bytes(), tile.row_bytes(), barriers + 2 * kMostStages,
           barriers + 3 * kMostStages};
  const TilePlace place = place_of(shape, tile.outputs(), block);
  constexpr int kConsumers = tile.consumers();
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == (tile.copies_itself() ? 0 : kConsumers)) {
    prefetch_map(&w);
    prefetch_map(&x);
    for (int i = 0; i < shape.stages; ++i) {
      init_barrier(weights.full + i, 1);
      init_barrier(weights.empty + i, kConsumers / kWarp);
    }
    for (int i = 0; i < shape.row_stages; ++i) {
      init_barrier(rows.full + i, 1);
      init_barrier(rows.empty + i, kConsumers / kWarp);
    }
    fence_new_barriers();
  }
  __syncthreads();
  if (warp >= kConsumers / kWarp) {
    if (threadIdx.x % kWarp != 0) return;
    if (warp == kConsumers / kWarp)
      wide_copy_weights<tile>(w, shape, weights, place);
    else
      wide_copy_rows<tile>(x, shape, rows, place);
  } else {
    if (tile.copies_itself() && threadIdx.x == 0)
      wide_copy_first<tile>(w, x, shape, weights, rows, place);
    __syncwarp();
    wait_for_previous();
    const auto output = wide_output(y, shape, place);
    float sum[tile.rows / 2];
    const int group = kGroups == 1 ? 0 : warp / (kGroupThreads / kWarp);
    wide_multiply<tile, halves>(sum, w, x, shape, weights, rows, place, group);
    sync_threads<1, kConsumers>();  // nobody reads the rings any more
    wide_store<tile>(output, shape, place, sum, data, group);
  }
}

}  // namespace nanovllm
