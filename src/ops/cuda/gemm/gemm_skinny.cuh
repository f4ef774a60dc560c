// y[m, n] = x[m, k] w[n, k]^T for few rows, on sm_90: the weight streams through shared memory
// once.
//
// Floor: the weight's bytes over the memory's bandwidth, or k / 16 dependent tensor core steps of
// 18 cycles. A block makes kColumns columns of y for at most 64 rows: wgmma with the rows of x as A
// (64 of them, of which those past m are never read back) and the weight's rows as B, one chain of
// k16 steps from zero: the bits of gemm_in_order. One warp issues bulk copies into a ring of
// stages, four multiply. The weight's first stages are requested before the kernel before this one
// has ended (programmatic dependent launch), x after that. What a step costs besides the chain
// counts: a stage's products are one straight line of code. (A in registers would make a step 13
// cycles, but reading it there costs more.)
#pragma once

#include "ops/cuda/gemm/gated.cuh"
#include "ops/cuda/gemm/gemm_kernels.h"
#include "ops/cuda/ptx/gemm_cluster.cuh"
#include "ops/cuda/ptx/gemm_wgmma.cuh"
#include "ops/cuda/ptx/tensor_map.h"

namespace nanovllm {

struct SkinnyShape {
  int rows, columns;  // of y
  int64_t stride;     // of y's rows
  int block_rows;     // that a block makes at once: a multiple of 8, at most 64
  int row_blocks;     // that many make all rows
  int items;          // row blocks times groups of columns
  int steps;          // stages that cover k
  int stages;         // of the ring
  int pace;           // cycles between two stages of weights, before the ring is full
};

/// How the copy engine sees a matrix: slices of [parts, rows / parts, 64].
struct MapBox {
  int parts;                           // of the matrix
  int rows, parts_of_box = 1, slices;  // of a box; rows: of all its parts together
};
CUtensorMap gemm_map(EncodeMap encode, const Tensor& t, MapBox box,
                     CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);

/// Where a block's tile lies: its first row of x and y, its first column of y.
struct TilePlace {
  int row, column;
  int own;  // rows before are another block's as well
};

/// The tile of block `block`, of `outputs` columns. The last rows' block begins early rather than
/// end behind them: the copy engine is slow where it fills with zeros.
template <class Shape>
__device__ TilePlace place_of(const Shape& shape, int outputs, int block) {
  const int own = block % shape.row_blocks * shape.block_rows;
  return {max(min(own, shape.rows - shape.block_rows), 0), block / shape.row_blocks * outputs, own};
}

/// The steps of a block's items one after another, and their places in the ring.
struct SkinnyCursor : RingCursor {
  int item, step = 0;
  __device__ SkinnyCursor() : item(static_cast<int>(blockIdx.x)) {}
  template <class Shape>
  __device__ bool done(const Shape& shape) const {
    return item >= shape.items;
  }
  template <class Shape>
  __device__ void next(const Shape& shape) {
    if (++step == shape.steps) step = 0, item += static_cast<int>(gridDim.x);
    RingCursor::next(shape.stages);
  }
};

template <int kOutputs, int kDepth>
__device__ void copy_weight(const CUtensorMap& w, const SkinnyShape& shape, const ProductRing& ring,
                            const SkinnyCursor& at) {
  uint64_t* barrier = ring.full + at.stage;
  arrive_expecting(barrier, ring.stage_bytes);
  copy_box_once(ring.weight(at.stage), &w, barrier, 0, at.item / shape.row_blocks * kOutputs, 0,
                at.step * kDepth);
}

/// Asks for the weights that fit the ring, at a pace, as another kernel's loads would wait behind
/// those that are asked for at once. The next kernel, whose blocks may come when these go, need not
/// wait for it.
template <int kOutputs, int kDepth>
__device__ SkinnyCursor fill_with_weight(const CUtensorMap& w, const SkinnyShape& shape,
                                         const ProductRing& ring) {
  if (shape.pace > 0) let_next_start();
  SkinnyCursor at;
  for (int64_t due = clock64(); at.parity == 0 && !at.done(shape); due += shape.pace) {
    while (shape.pace > 0 && clock64() < due) continue;
    copy_weight<kOutputs, kDepth>(w, shape, ring, at);
    at.next(shape);
  }
  if (shape.pace == 0) let_next_start();
  return at;
}

template <int kDepth>
__device__ void copy_rows(const CUtensorMap& x, const SkinnyShape& shape, const ProductRing& ring,
                          const SkinnyCursor& at) {
  copy_box(ring.rows(at.stage), &x, ring.full + at.stage, 0,
           at.item % shape.row_blocks * shape.block_rows, 0, at.step * kDepth);
}

/// Two threads' parts where a weight streams for long: one that copies both waits for a stage and
/// asks for two boxes in turn, which takes some 300 ns, more than the stage's products.
template <int kOutputs, int kDepth>
__device__ void produce_weight(const CUtensorMap& w, const SkinnyShape& shape,
                               const ProductRing& ring) {
  SkinnyCursor at = fill_with_weight<kOutputs, kDepth>(w, shape, ring);
  for (; !at.done(shape); at.next(shape)) {
    wait_barrier(ring.empty + at.stage, at.parity ^ 1);
    copy_weight<kOutputs, kDepth>(w, shape, ring, at);
  }
}
template <int kDepth>
__device__ void produce_rows(const CUtensorMap& x, const SkinnyShape& shape,
                             const ProductRing& ring) {
  wait_for_previous();
  for (SkinnyCursor at; !at.done(shape); at.next(shape)) {
    wait_barrier(ring.empty + at.stage, at.parity ^ 1);
    copy_rows<kDepth>(x, shape, ring, at);
  }
}

/// One thread's part: all copies. The next kernel may begin early, so that its own weight is there
/// when this one ends.
template <int kOutputs, int kDepth>
__device__ void produce(const CUtensorMap& w, const CUtensorMap& x, const SkinnyShape& shape,
                        const ProductRing& ring) {
  SkinnyCursor weight = fill_with_weight<kOutputs, kDepth>(w, shape, ring);
  wait_for_previous();
  SkinnyCursor rows;
  for (; rows.parity == 0 && !rows.done(shape); rows.next(shape))
    copy_rows<kDepth>(x, shape, ring, rows);
  for (; !weight.done(shape); weight.next(shape)) {
    wait_barrier(ring.empty + weight.stage, weight.parity ^ 1);
    copy_weight<kOutputs, kDepth>(w, shape, ring, weight);
    copy_rows<kDepth>(x, shape, ring, weight);
  }
}

template <class Y>
__device__ void store_pair(Y* y, float first, float second, int left) {
  if (left > 1) {
    if constexpr (std::is_same_v<Y, float>)
      *reinterpret_cast<float2*>(y) = {first, second};
    else
      *reinterpret_cast<__nv_bfloat162*>(y) = __floats2bfloat162_rn(first, second);
  } else if (left > 0) {
    *y = round_to<Y>(first);
  }
}

/// A tile's sums become y's columns.
template <int kColumns, class Y>
__device__ void store_tile(Y* y, const SkinnyShape& shape, const float (&sum)[kColumns / 2],
                           int row0, int column0) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = 16 * warp + 8 * half + lane / 4, row = row0 + r;
    if (r >= shape.block_rows || row >= shape.rows) continue;
    const int column = column0 + lane % 4 * 2;
    Y* out = y + row * shape.stride + column;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
      store_pair(out + 8 * j, sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1],
                 shape.columns - column - 8 * j);
  }
}

/// The same of a tile whose first half is rows of the gate and whose second the same rows of up:
/// silu(gate) * up, both rounded first. Without a branch at each element: few warps have rows.
template <int kColumns>
__device__ void store_gated_tile(__nv_bfloat16* y, const SkinnyShape& shape,
                                 const float (&sum)[kColumns / 2], int row0, int column0) {
  constexpr int kPairs = kColumns / 16, kUp = kColumns / 4;
  const int lane = threadIdx.x % kWarp, first = 16 * (threadIdx.x / kWarp) + lane / 4;
  uint32_t gate[2][kPairs], up[2][kPairs], most = 0;
  bool needed[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = first + 8 * half;
    needed[half] = r < shape.block_rows && row0 + r < shape.rows;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = 4 * j + 2 * half;
      gate[half][j] = pack_bf16(sum[i], sum[i + 1]);
      up[half][j] = pack_bf16(sum[i + kUp], sum[i + kUp + 1]);
      if (needed[half]) most = __vmaxu2(most, gate[half][j] & kGateSizes);
    }
  }
  const auto store = [&](auto silu) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int row = row0 + first + 8 * half, column = column0 + 8 * j + lane % 4 * 2;
        const uint32_t g = gate[half][j], u = up[half][j];
        const float low = silu(low_of(g), low_of(u)), high = silu(high_of(g), high_of(u));
        if (needed[half])
          store_pair(y + row * shape.stride + column, low, high, shape.columns - column);
      }
  };
  if (__all_sync(kFullMask, are_plain_sizes(most)))
    store(silu_times_plain);
  else
    store(silu_times_straight);
}

/// A tile of a weight in halves of k, of which `sum` has the products of all rows with all columns:
/// the rows with the first half of k, and behind them the rows with the second, and columns
/// likewise. Those of one half with itself are y's: rounded and added.
template <int kColumns>
__device__ __forceinline__ void add_halves_of_tile(float (&y)[kColumns / 2],
                                                   const float (&sum)[kColumns], int block_rows) {
  constexpr int kPairs = kColumns / 8, kPad = 4;
  __shared__ uint32_t second[kMostHalvedRows][kColumns / 2 + kPad];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (block_rows == 8) {  // both are in one lane
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float* other = sum + 4 * (j + kPairs) + 2;
      const float2 both = add_halves(pack_bf16(sum[4 * j], sum[4 * j + 1]), other[0], other[1]);
      y[4 * j] = both.x, y[4 * j + 1] = both.y;
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * warp + 8 * half + lane / 4 - block_rows;
    if (row < 0 || row >= block_rows) continue;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float* other = sum + 4 * (j + kPairs) + 2 * half;
      second[row][4 * j + lane % 4] = pack_bf16(other[0], other[1]);
    }
  }
  sync_threads<1, kSkinnyConsumers>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * warp + 8 * half + lane / 4;
    if (row >= block_rows) continue;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = 4 * j + 2 * half;
      const uint32_t first = pack_bf16(sum[i], sum[i + 1]), other = second[row][4 * j + lane % 4];
      y[i] = low_of(first) + low_of(other), y[i + 1] = high_of(first) + high_of(other);
    }
  }
  sync_threads<1, kSkinnyConsumers>();  // the next tile's come there
}

/// Four warps' part: the products of all steps. `halves`: of a weight in halves of k, both at once,
/// which halves the chain (add_halves_of_tile()).
template <int kColumns, int kDepth, bool gated, bool halves, class Y>
__device__ void consume(Y* y, const SkinnyShape& shape, const ProductRing& ring) {
  constexpr int kWide = halves ? 2 * kColumns : kColumns;
  const bool leader = threadIdx.x % kWarp == 0;
  const uint64_t x_slice =
      static_cast<uint64_t>((halves ? 2 : 1) * shape.block_rows * kSliceRowBytes >> 4);
  float sum[kWide / 2];
  int last = 0;
  for (SkinnyCursor at; !at.done(shape);) {
    const int item = at.item;
#pragma unroll
    for (float& s : sum) s = 0.0f;
    for (int step = 0; step < shape.steps; ++step) {
      wait_barrier(ring.full + at.stage, at.parity);
      const uint64_t w = tile_of(ring.weight(at.stage)), x = tile_of(ring.rows(at.stage));
      wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < kDepth; ++slice)
#pragma unroll
        for (int i = 0; i < kSliceWidth / 16; ++i)
          product<kWide>(sum, x + slice * x_slice + 2 * i,
                         w + (slice * kWide * kSliceRowBytes >> 4) + 2 * i);
      wgmma_commit();
      wgmma_wait<1>();  // all but these
      if (leader && step > 0) arrive(ring.empty + last);
      last = at.stage;
      at.next(shape);
    }
    wgmma_wait<0>();
    if (leader) arrive(ring.empty + last);
    const int row0 = item % shape.row_blocks * shape.block_rows, group = item / shape.row_blocks;
    if constexpr (gated) {
      store_gated_tile<kColumns>(y, shape, sum, row0, group * kColumns / 2);
    } else if constexpr (halves) {
      float both[kColumns / 2] = {};
      pin(sum);
      add_halves_of_tile<kColumns>(both, sum, shape.block_rows);
      store_tile<kColumns>(y, shape, both, row0, group * kColumns);
    } else {
      store_tile<kColumns>(y, shape, sum, row0, group * kColumns);
    }
  }
}

/// `w`: boxes of kColumns rows ([2, kColumns / 2] where gated), `x`: of `block_rows` rows, both by
/// kDepth slices; of both halves of k, where the weight is in `halves`. A warp more copies rows.
template <int kColumns, int kDepth, bool gated, bool halves, class Y>
__global__ void __launch_bounds__(kSkinnyThreads + kWarp)
    gemm_skinny_kernel(Y* y, const __grid_constant__ CUtensorMap w,
                       const __grid_constant__ CUtensorMap x, const SkinnyShape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const empty = full + kMostStages;
  unsigned char* const data = shared + kSkinnyBarrierBytes;
  constexpr int kWeightBytes = (halves ? 2 : 1) * kDepth * kColumns * kSliceRowBytes;
  const ProductRing ring{
      data + (1024 - shared_address(data) % 1024) % 1024,
      kWeightBytes + (halves ? 2 : 1) * kDepth * shape.block_rows * kSliceRowBytes, full, empty,
      kWeightBytes};
  // The same in all lanes, and known to be: the roles' code need not reckon with divided warps.
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0);
  const bool producer = threadIdx.x == kSkinnyConsumers;
  if (producer) {
    prefetch_map(&w);
    prefetch_map(&x);
    for (int i = 0; i < shape.stages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&empty[i], kSkinnyConsumers / kWarp);
    }
    fence_new_barriers();
  }
  __syncthreads();
  constexpr int kOutputs = gated ? kColumns / 2 : kColumns;
  if (warp > kSkinnyConsumers / kWarp) {
    if (threadIdx.x % kWarp == 0) produce_rows<kDepth>(x, shape, ring);
  } else if (warp == kSkinnyConsumers / kWarp) {
    if (producer && blockDim.x > kSkinnyThreads)
      produce_weight<kOutputs, kDepth>(w, shape, ring);
    else if (producer)
      produce<kOutputs, kDepth>(w, x, shape, ring);
  } else {
    wait_for_previous();
    consume<kColumns, kDepth, gated, halves>(y, shape, ring);
  }
}

}  // namespace nanovllm
