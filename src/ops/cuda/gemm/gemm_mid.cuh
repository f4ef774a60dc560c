// y[m, n] = x[m, k] w[n, k]^T for up to 256 rows, on sm_90: gemm_skinny.cuh for larger tiles.
//
// Floor, beside the weight's bytes from memory: for each 16 of k, a block of c columns and r rows
// takes (c + r) * 32 bytes into its SM at 64 bytes a cycle; its shared memory moves those and
// what the tensor cores read, (c + 64) * 32 bytes for each 64 rows, at 128; and the tensor cores
// work max(16 + c / 4, c / 2) cycles for each 64 rows. So a block has one tile, nearly square, and
// there are as many as SMs, or a little fewer. One warp issues bulk copies of weights into a ring
// of stages, another those of rows; groups of four multiply, each one or two tiles of 64 rows of x
// (A) with the weight's rows (B): one chain of k16 steps from zero, the bits of gemm_in_order. Two
// blocks with the same columns may be a cluster: each copies half of the weight's tile into both.
// Or the two of a cluster have the same tile of a weight in halves of k, and a half each: as few
// columns again, and half as many rows of x, for each byte of w.
#pragma once

#include "ops/cuda/comm/sent_parts.cuh"
#include "ops/cuda/gemm/gated.cuh"
#include "ops/cuda/gemm/gemm_heads.cuh"
#include "ops/cuda/gemm/gemm_mid_copy.cuh"
#include "ops/cuda/gemm/gemm_pieces.cuh"
#include "ops/cuda/gemm/half_sums.cuh"
#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

// -- Products --

/// A group's sums over all of k. `stays`: the block has more tiles, and begins at `at`. `halves`:
/// those of both halves of k, one after the other.
template <MidTile tile, bool stays = false, bool halves = false>
__device__ void multiply(float (&sum)[tile.tiles][tile.columns / 2], const MidShape& shape,
                         const MidRing& ring, int group, RingCursor& at) {
  const int lane = threadIdx.x % kWarp, blocks = shape.paired ? kPair : 1;
  const int tile_bytes = shape.tile_rows * kSliceRowBytes;
  const uint64_t next_tile = static_cast<uint64_t>(tile_bytes >> 4),
                 next_slice = static_cast<uint64_t>(shape.block_rows * kSliceRowBytes >> 4);
#pragma unroll
  for (int t = 0; t < tile.tiles; ++t)
#pragma unroll
    for (float& s : sum[t]) s = 0.0f;
  int last = 0, step = 0;
  const auto multiply_until = [&](int end) {
    for (; step < end; ++step) {
      wait_barrier(ring.full + at.stage, at.parity);
      wait_barrier(ring.full_of_weight + at.stage, at.parity);
      const uint64_t w = tile_of(ring.weight(at.stage)),
                     x = tile_of(ring.rows(at.stage) + group * tile.tiles * tile_bytes);
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < tile.depth; ++slice)
#pragma unroll
        for (int i = 0; i < kSliceWidth / 16; ++i)
#pragma unroll
          for (int t = 0; t < tile.tiles; ++t)
            product<tile.columns>(sum[t], x + slice * next_slice + t * next_tile + 2 * i,
                                  w + (slice * tile.columns * kSliceRowBytes >> 4) + 2 * i);
      wgmma_commit();
      wgmma_wait<1>();  // all but these
      // The stage before this one is free. Nobody arrives that nobody waits for: the other block
      // might be gone.
      if (step > 0 && (stays || step - 1 + shape.stages < shape.steps) && lane < blocks) {
        if (shape.paired)
          arrive_at(ring.empty + last, static_cast<uint32_t>(lane));
        else
          arrive(ring.empty + last);
      }
      last = at.stage;
      at.next(shape.stages);
    }
    wgmma_wait<0>();
  };
  if constexpr (halves) {
    static_assert(tile.tiles == 1);
    return multiply_halves(sum[0], shape.steps, multiply_until);
  }
  multiply_until(shape.steps);
  if (stays && lane == 0) arrive(ring.empty + last);
#pragma unroll
  for (int t = 0; t < tile.tiles; ++t) pin(sum[t]);
}

/// `rows` of a tensor core tile's rows from `y` on, of which `columns` columns are left.
template <MidTile tile>
__device__ void store_rows(float* y, int64_t stride, const float (&sum)[tile.columns / 2], int rows,
                           int columns) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * warp + 8 * half + lane / 4;
    if (row >= rows) continue;
#pragma unroll
    for (int j = 0; j < tile.columns / 8; ++j)
      if (8 * j < columns)
        *reinterpret_cast<float2*>(y + row * stride + 8 * j + 2 * t) = {sum[4 * j + 2 * half],
                                                                        sum[4 * j + 2 * half + 1]};
  }
}
template <MidTile tile>
__device__ void store_rows(__nv_bfloat16* y, int64_t stride, const float (&sum)[tile.columns / 2],
                           int rows, int columns) {
  const int first = 16 * (threadIdx.x / kWarp % 4) + threadIdx.x % kWarp / 4;
  for_pieces<tile.columns>(sum, [&](int half, int column, auto piece) {
    if (first + half < rows && column < columns)
      *reinterpret_cast<decltype(piece)*>(y + (first + half) * stride + column) = piece;
  });
}

/// The same of silu(gate) * up, both rounded first. Through shared memory, so that the activation
/// is a loop: as one straight line it would take longer to fetch than to run.
template <MidTile tile>
__device__ void store_gated(__nv_bfloat16* y, int64_t stride, const float (&sum)[tile.columns / 2],
                            unsigned char* shared, int rows, int columns) {
  constexpr int kPitch = tile.columns * 2 + 16, kUnits = tile.outputs() / 8, kRows = 16;
  static_assert(kRows * kUnits % kWarp == 0);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  unsigned char* const mine = shared + warp * kRows * kPitch;
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < tile.columns / 8; ++j) {
      const int i = 4 * j + 2 * half;
      *reinterpret_cast<uint32_t*>(mine + (8 * half + lane / 4) * kPitch + 16 * j + lane % 4 * 4) =
          pack_bf16(sum[i], sum[i + 1]);
    }
  __syncwarp();
  rows -= kRows * (warp % 4);
#pragma unroll 1
  for (int i = lane; i < kRows * kUnits; i += kWarp) {
    const int row = i / kUnits, unit = i % kUnits;
    const auto* at = reinterpret_cast<const uint4*>(mine + row * kPitch + 16 * unit);
    const bool needed = row < rows && 8 * unit < columns;
    const uint4 v = silu_times_vector(at[0], at[kUnits], needed);
    if (needed) *reinterpret_cast<uint4*>(y + (kRows * (warp % 4) + row) * stride + 8 * unit) = v;
  }
}

/// The arguments of products that store their sums, as they are or gated.
template <bool halves>
struct MidNothing {};
/// And of those whose cluster's blocks have a half of k each.
struct MidPairs {};

/// Makes a head of each tile (gemm_heads.cuh). What that reads is asked for before the product.
template <MidTile tile>
__device__ void multiply_and_store(__nv_bfloat16* y, const MidShape& shape, const MidRing& ring,
                                   const MidPlace& place, int group, const HeadsInput& input) {
  static_assert(tile.columns == kProductHead && tile.tiles == 1 && !tile.gated);
  const int lane = threadIdx.x % kWarp, c = lane % 4 * 8, head = place.column / kProductHead,
            first = place.row + group * shape.tile_rows,
            in_tile = threadIdx.x / kWarp % 4 * 16 + lane / 4, row = first + in_tile;
  HeadWeights weights;
  weights.load(input.heads, head, c);
  wait_for_previous();
  HeadReads reads;
  reads.load(input.heads, row, shape.rows, c);
  float sum[1][tile.columns / 2];
  RingCursor at;
  multiply<tile>(sum, shape, ring, group, at);
  HeadPairs<1> pairs;
  pairs.take(sum[0]);
  pairs.finish_rows(input, reads, weights, 0, head, c, y + row * shape.stride + place.column + c,
                    shape.stride, min(shape.tile_rows, shape.rows - first) - in_tile);
}
/// All tiles of a block that stays.
template <MidTile tile>
__device__ void multiply_and_store_all(float* y, const MidShape& shape, const MidRing& ring,
                                       int group) {
  RingCursor at;
  wait_for_previous();
  for_tiles<tile>(shape, [&](const MidPlace& place) {
    float sum[tile.tiles][tile.columns / 2];
    multiply<tile, true>(sum, shape, ring, group, at);
#pragma unroll
    for (int t = 0; t < tile.tiles; ++t) {
      const int row = place.row + (group * tile.tiles + t) * shape.tile_rows;
      store_rows<tile>(y + row * shape.stride + place.column, shape.stride, sum[t],
                       min(shape.tile_rows, shape.rows - row), shape.columns - place.column);
    }
  });
}
/// Sends the results to where they are summed.
template <MidTile tile>
__device__ void multiply_and_store(__nv_bfloat16*, const MidShape& shape, const MidRing& ring,
                                   const MidPlace& place, int group, const SentParts& to) {
  static_assert(tile.tiles == 1 && !tile.gated);
  wait_for_previous();
  const PartSender sender(to, place.column);
  float sum[1][tile.columns / 2];
  RingCursor at;
  multiply<tile>(sum, shape, ring, group, at);
  const int in_tile = 16 * (threadIdx.x / kWarp % 4) + threadIdx.x % kWarp / 4,
            first = place.row + group * shape.tile_rows,
            rows = min(shape.tile_rows, shape.rows - first);
  for_pieces<tile.columns>(sum[0], [&](int half, int column, auto piece) {
    if (in_tile + half < rows && first + in_tile + half >= place.own &&
        place.column + column < shape.columns)
      sender.send(first + in_tile + half, place.column + column, piece);
  });
}
template <MidTile tile, class Y, bool halves>
__device__ void multiply_and_store(Y* y, const MidShape& shape, const MidRing& ring,
                                   const MidPlace& place, int group, MidNothing<halves>) {
  wait_for_previous();
  float sum[tile.tiles][tile.columns / 2];
  RingCursor at;
  multiply<tile, false, halves>(sum, shape, ring, group, at);
  if constexpr (tile.gated) sync_threads<1, tile.consumers()>();  // nobody reads the ring any more
#pragma unroll
  for (int t = 0; t < tile.tiles; ++t) {
    const int row = place.row + (group * tile.tiles + t) * shape.tile_rows;
    Y* out = y + row * shape.stride + place.column;
    const int rows = min(shape.tile_rows, shape.rows - row), columns = shape.columns - place.column;
    if constexpr (tile.gated)
      store_gated<tile>(out, shape.stride, sum[t], ring.data, rows, columns);
    else
      store_rows<tile>(out, shape.stride, sum[t], rows, columns);
  }
}

/// The first of the cluster sends its sums, the second stores both's.
template <MidTile tile>
__device__ void multiply_and_store(__nv_bfloat16* y, const MidShape& shape, const MidRing& ring,
                                   const MidPlace& place, int group, MidPairs) {
  static_assert(tile.tiles == 1 && !tile.gated);
  HalfSums<tile.columns, 2> halves(ring.of_halves, ring.half_sums,
                                   static_cast<int>(threadIdx.x) / kWarp, tile.consumers() / kWarp);
  // Known to be the same in all lanes, or ptxas lets each product wait for the one before it.
  const bool sends = __shfl_sync(kFullMask, place.slice, 0) == 0;
  wait_for_previous();
  float sum[1][tile.columns / 2];
  RingCursor at;
  multiply<tile>(sum, shape, ring, group, at);
  if (sends) return halves.send(sum[0]);
  halves.add_to(sum[0], false);
  const int row = place.row + group * shape.tile_rows;
  store_rows<tile>(y + row * shape.stride + place.column, shape.stride, sum[0],
                   min(shape.tile_rows, shape.rows - row), shape.columns - place.column);
}

/// `w`: boxes of the tile's columns ([2, columns / 2] where gated) by `depth` slices, or half of
/// that in a pair, as copy_weight() takes them; `x`: of a block's rows by `depth` slices.
template <int kColumns, int kGroups, int kTiles, int kDepth, bool gated, class Y, class Input>
__global__ void __launch_bounds__(MidTile{kColumns, kGroups, kTiles, kDepth}.threads(), 1)
    gemm_mid_kernel(Y* y, const __grid_constant__ CUtensorMap w,
                    const __grid_constant__ CUtensorMap x, const MidShape shape,
                    const __grid_constant__ Input input) {
  constexpr MidTile tile{kColumns, kGroups, kTiles, kDepth, gated};
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t *const empty = full + kMostStages, *const full_of_weight = empty + kMostStages,
                  *const of_halves = full_of_weight + kMostStages;
  unsigned char* data = shared + kMidBarrierBytes;
  // Blocks without a tile keep SMs free for those of the next product.
  const int block = static_cast<int>(blockIdx.x);
  if (block >= shape.blocks) {
    let_next_start();
    wait_for_previous();
    return;
  }
  constexpr bool kInPairs = std::is_same_v<Input, MidPairs>;
  constexpr int kHalfBytes = kInPairs ? half_sum_bytes(kColumns, 2, kGroups) : 0;
  data += (1024 - shared_address(data) % 1024) % 1024;
  const MidRing ring{
      {data + kHalfBytes, tile.stage_bytes(shape.block_rows), full, empty, tile.weight_bytes()},
      full_of_weight,
      of_halves,
      data};
  const MidPlace place{place_of(shape, tile.outputs(), kInPairs ? block / kPair : block),
                       kInPairs ? block % kPair * shape.steps * kDepth : 0};
  constexpr int kConsumers = tile.consumers();
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == kConsumers) {
    prefetch_map(&w);
    prefetch_map(&x);
    for (int i = 0; i < shape.stages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&full_of_weight[i], 1);
      init_barrier(&empty[i], (shape.paired ? kPair : 1) * kConsumers / kWarp);
    }
    if constexpr (kInPairs) HalfSums<kColumns, 2>::init(of_halves, kConsumers / kWarp);
    fence_new_barriers();
  }
  if (shape.paired || kInPairs)
    sync_new_cluster();
  else
    __syncthreads();
  if (warp >= kConsumers / kWarp) {
    if constexpr (tile.is_large()) leave_registers<24>();
    if (warp == kConsumers / kWarp && threadIdx.x % kWarp == 0) {
      if constexpr (kStays<Y>)
        copy_all_weights<tile>(w, shape, ring);
      else
        copy_weights<tile>(w, shape, ring, place);
    }
    if (warp == kConsumers / kWarp + 1 && threadIdx.x % kWarp == 0) {
      if constexpr (kStays<Y>)
        copy_all_rows<tile>(x, shape, ring);
      else
        copy_rows<tile>(x, shape, ring, place);
    }
  } else {
    if constexpr (tile.is_large()) take_registers<240>();
    const int group = tile.groups == 1 ? 0 : warp / (kGroupThreads / kWarp);
    if constexpr (kStays<Y>)
      multiply_and_store_all<tile>(y, shape, ring, group);
    else
      multiply_and_store<tile>(y, shape, ring, place, group, input);
  }
}

}  // namespace nanovllm
