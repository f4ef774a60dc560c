// y[m, n] = x[m, k] w[n, k]^T of E4M3 numbers with scales, for any number of rows, on sm_90a; and
// of integers of 8 bits, whose sums are exact in any order.
//
// The sum over a block of 128 of k is the tensor cores' own, four k32 steps from zero, which gives
// the same bits in tiles of any shape, whichever operand comes first; sums of blocks are added in
// f32, in ascending order of k: these accumulators keep 14 bits of what they add up. A row of a
// stage is a block of k. One thread copies weights into a ring of stages, which it begins before
// the kernel before has ended, another rows of x, two their scales; blocks stay, with tile on tile.
//
// Few rows: the weight's rows are wgmma's A and those of x its B, so that one instruction takes all
// rows of a block, as in gemm_wide.cuh. More rows: the other way round, for then a lane's sums have
// four to six scales in all, and little is read beside the operands.
//
// In halves of k (WeightFormat::in_halves) a block multiplies one after the other, and y keeps the
// first one's; or, in pairs, those of a cluster have a half each, and a chain half as long.
//
// Grouped: rows of x are the places of a mixture's pairs (moe.cuh), tiles those of its plan. Then
// nothing is copied before the kernel before has ended, for the plan may be new.
#pragma once

#include "ops/cuda/gemm/half_sums.cuh"
#include "ops/cuda/ptx/gemm_cluster.cuh"
#include "ops/cuda/ptx/wgmma_bytes.cuh"
#include "ops/cuda/quantised/gemm_fp8_ends.cuh"

namespace nanovllm {

/// How the copy engine sees the operands: numbers of w as [k / 128, n / parts / 8, parts, 8, 128],
/// where the first axis runs on from expert to expert; of x as [k / 128, 1, m, 128]; scales of
/// blocks of w as [experts, k / 128, parts, n / parts / 8], of x as [k / 128, m].
struct Fp8Maps {
  CUtensorMap w, x, w_scales, x_scales;
};

/// A block's shared memory.
template <Fp8Tile tile>
struct Fp8Ring {
  unsigned char *data, *half_sums, *results;
  uint64_t *full, *empty, *of_halves;
  __device__ Fp8Ring(unsigned char* shared, const Fp8Shape& shape) {
    full = reinterpret_cast<uint64_t*>(shared);
    empty = full + kMostStages;
    of_halves = empty + kMostStages;
    data = shared + kFp8Barriers;
    data += (1024 - shared_address(data) % 1024) % 1024;
    half_sums = data + shape.stages * shape.stage_bytes;
    results = half_sums + tile.half_bytes();
  }
  __device__ unsigned char* weights(const Fp8Shape& shape, int stage) const {
    return data + stage * shape.stage_bytes;
  }
  __device__ unsigned char* rows(const Fp8Shape& shape, int stage) const {
    return weights(shape, stage) + tile.depth * shape.height * kFp8Block;
  }
  __device__ unsigned char* weight_scales(const Fp8Shape& shape, int stage) const {
    return rows(shape, stage) + tile.depth * shape.block_rows * kFp8Block;
  }
  __device__ unsigned char* row_scales(const Fp8Shape& shape, int stage) const {
    return weight_scales(shape, stage) + tile.weight_scale_bytes();
  }
};

template <Fp8Tile tile, class F>
__device__ void for_fp8_places(const Fp8Shape& shape, F&& f) {
  if constexpr (tile.grouped) {
    const int items = num_tiles(shape.plan) * shape.items;
    for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x))
      f(Fp8Place(shape, item));
    return;
  }
  const int rank = tile.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  for (int item = static_cast<int>(blockIdx.x) / tile.cluster_size(); item < shape.items;
       item += static_cast<int>(gridDim.x) / tile.cluster_size())
    f(Fp8Place(shape, item, tile.cluster, rank));
}

/// The threads that copy, the first of a warp each: a copy keeps its thread for a while.
enum Fp8Copier { kCopiesWeights, kCopiesRows, kCopiesWeightScales, kCopiesRowScales };

/// One thread's part: waits for each stage, and copies what it copies there.
template <Fp8Tile tile, Fp8Copier copier>
__device__ void fp8_copy(const Fp8Maps& maps, const Fp8Shape& shape, const Fp8Ring<tile>& ring) {
  constexpr bool kOfWeights = copier == kCopiesWeights || copier == kCopiesWeightScales;
  const int units = shape.height / (tile.parts() * kFp8Unit),
            rank = tile.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int bytes = copier == kCopiesWeights ? tile.depth * shape.height * kFp8Block
                    : copier == kCopiesRows  ? tile.depth * shape.block_rows * kFp8Block
                    : kOfWeights             ? tile.depth * tile.weight_scales() * 4
                                             : tile.depth * tile.row_scales() * 4;
  if constexpr (tile.grouped || !kOfWeights) wait_for_previous();
  RingCursor at;
  bool is_first = copier == kCopiesWeights;  // time through the ring
  for_fp8_places<tile>(shape, [&](const Fp8Place& place) {
    const int unit = place.tile * units,
              expert_block = static_cast<int>(place.expert * shape.expert_blocks);
    const auto copy_half = [&](int first_block) {
      for (int step = 0; step < shape.steps; ++step) {
        wait_barrier(ring.empty + at.stage, at.parity ^ 1);
        uint64_t* const full = ring.full + at.stage;
        arrive_expecting(full, bytes);
        const int block = first_block + step * tile.depth;
        if constexpr (copier == kCopiesWeights) {
          unsigned char* const to = ring.weights(shape, at.stage);
          if constexpr (tile.grouped && tile.has_rows_first())  // the next tiles' as well
            copy_box(to, &maps.w, full, 0, 0, 0, unit, expert_block + block);
          else
            copy_box_once(to, &maps.w, full, 0, 0, 0, unit, expert_block + block);
        } else if constexpr (copier == kCopiesWeightScales) {
          copy_box(ring.weight_scales(shape, at.stage), &maps.w_scales, full,
                   unit / kFp8Aligned * kFp8Aligned, 0, block, place.expert);
        } else if constexpr (copier == kCopiesRowScales) {
          copy_box(ring.row_scales(shape, at.stage), &maps.x_scales, full,
                   tile.grouped ? place.row / kFp8Aligned * kFp8Aligned : place.row, block);
        } else if constexpr (tile.cluster > 1) {
          static_assert(tile.depth == 1);
          constexpr int kPart = tile.rows / tile.cluster;
          copy_box_to((1 << tile.cluster) - 1,
                      ring.rows(shape, at.stage) + rank * kPart * kFp8Block, &maps.x, full, 0,
                      place.row + rank * kPart, 0, block);
        } else {
          copy_box(ring.rows(shape, at.stage), &maps.x, full, 0, place.row, 0, block);
        }
        at.next(shape.stages);
        if (is_first && at.stage == 0) is_first = false, let_next_start();
      }
    };
    if constexpr (tile.in_pairs)
      copy_half(static_cast<int>(cluster_rank()) * shape.blocks);
    else if constexpr (tile.takes_halves())
      for (int half = 0; half < shape.halves; ++half) copy_half(half * shape.blocks);
    else
      copy_half(0);
  });
  if (is_first) let_next_start();
}

/// The scales of each of a lane's sums, for a block of k. `w_scales`, `x_scales`: those of its
/// first row of w and of x.
template <Fp8Tile tile>
__device__ __forceinline__ void fp8_scales(float (&scale)[tile.sums()], const float* w_scales,
                                           const float* x_scales) {
  constexpr int kParts = tile.parts(), kPart = tile.weight_scales() / kParts;
  if constexpr (tile.has_rows_first()) {
    constexpr int kEven = tile.even_units();
#pragma unroll
    for (int i = 0; i < tile.sums(); ++i)
      scale[i] = x_scales[i / 2 % 2 * 8] *
                 w_scales[i / 4 % kParts * kPart + i / 4 / kParts / kEven * kEven];
  } else {
    const float first = w_scales[0], second = w_scales[tile.gated ? kPart : 1];
#pragma unroll
    for (int j = 0; j < tile.rows / 8; ++j) {
      const float2 x = tile.grouped ? float2{x_scales[8 * j], x_scales[8 * j + 1]}
                                    : *reinterpret_cast<const float2*>(x_scales + 8 * j);
      scale[4 * j] = x.x * first;
      scale[4 * j + 1] = x.y * first;
      scale[4 * j + 2] = x.x * second;
      scale[4 * j + 3] = x.y * second;
    }
  }
}

/// A stage's operands for a group, and the way to those of its next block.
template <Fp8Tile tile>
struct Fp8Operands {
  uint64_t a, b, next_a, next_b;
  __device__ __forceinline__ Fp8Operands(const Fp8Shape& shape, const Fp8Ring<tile>& ring,
                                         int stage, int group) {
    const uint64_t w = tile_of(ring.weights(shape, stage)),
                   x = tile_of(ring.rows(shape, stage) + group * kFp8Height * kFp8Block);
    const uint64_t next_w = static_cast<uint64_t>(shape.height * kFp8Block >> 4),
                   next_x = static_cast<uint64_t>(shape.block_rows * kFp8Block >> 4);
    a = tile.has_rows_first() ? x : w, next_a = tile.has_rows_first() ? next_x : next_w;
    b = tile.has_rows_first() ? w : x, next_b = tile.has_rows_first() ? next_w : next_x;
  }
};

/// A group's place in the ring, and what it does with a stage there.
template <Fp8Tile tile>
struct Fp8Consumer {
  using Part = float[tile.depth][tile.sums()];
  const Fp8Shape& shape;
  const Fp8Ring<tile>& ring;
  int group, unit, row;      // the lane's first scales among those that are copied
  RingCursor ahead, behind;  // the next stage to multiply, and to add to the sums

  /// Begins the products of the next stage, a commit for each of its blocks.
  __device__ __forceinline__ void multiply(Part& part) {
    wait_barrier(ring.full + ahead.stage, ahead.parity);
    const Fp8Operands<tile> of(shape, ring, ahead.stage, group);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < tile.depth; ++d) {
      byte_product<2 * tile.sums(), false>(part[d], of.a + d * of.next_a, of.b + d * of.next_b);
#pragma unroll
      for (int i = 1; i < kFp8Block / 32; ++i)
        byte_product<2 * tile.sums(), true>(part[d], of.a + d * of.next_a + 2 * i,
                                            of.b + d * of.next_b + 2 * i);
      wgmma_commit();
    }
    ahead.next(shape.stages);
  }

  /// Adds block d of the stage after the last one left; `under_way`: commits after that stage's.
  template <int d, int under_way>
  __device__ __forceinline__ void add_block(float (&sum)[tile.sums()], Part& part, int step) {
    // Scales are read before the block is waited for: a read takes as long as two wgmma.
    float scale[tile.sums()];
    if constexpr (tile.blocks)
      fp8_scales<tile>(scale,
                       reinterpret_cast<const float*>(ring.weight_scales(shape, behind.stage)) +
                           d * tile.weight_scales() + unit,
                       reinterpret_cast<const float*>(ring.row_scales(shape, behind.stage)) +
                           d * tile.row_scales() + row);
    wgmma_wait<tile.depth - 1 - d + under_way>();
    pin(part[d]);
    if (tile.depth > 1 && step * tile.depth + d >= shape.blocks) return;
#pragma unroll
    for (int i = 0; i < tile.sums(); ++i)
      sum[i] = tile.blocks ? fmaf(part[d][i], scale[i], sum[i]) : sum[i] + part[d][i];
  }

  /// Adds the stage after the last one left, and leaves it.
  template <int under_way>
  __device__ __forceinline__ void add(float (&sum)[tile.sums()], Part& part, int step) {
    [&]<int... d>(std::integer_sequence<int, d...>) {
      (add_block<d, under_way>(sum, part, step), ...);
    }
    (std::make_integer_sequence<int, tile.depth>());
    leave();
  }

  /// The stage after the last one left has been read.
  __device__ __forceinline__ void leave() {
    __syncwarp();
    const int lane = threadIdx.x % kWarp;
    if constexpr (tile.cluster > 1) {
      if (lane < tile.cluster) arrive_at(ring.empty + behind.stage, static_cast<uint32_t>(lane));
    } else {
      if (lane == 0) arrive(ring.empty + behind.stage);
    }
    behind.next(shape.stages);
  }

  /// A tile's sums. Where registers are enough for it, the next stage is multiplied while one is
  /// added.
  __device__ __forceinline__ void sum_up(float (&sum)[tile.sums()]) {
#pragma unroll
    for (float& s : sum) s = 0.0f;
    Part first;
    int step = 0;
    if constexpr (!tile.has_rows_first()) {
#pragma unroll 1
      for (; step < shape.steps; ++step) {
        multiply(first);
        add<0>(sum, first, step);
      }
    } else {
      Part second;
      multiply(first);
#pragma unroll 1
      for (; step + 2 < shape.steps; step += 2) {
        multiply(second);
        add<tile.depth>(sum, first, step);
        multiply(first);
        add<tile.depth>(sum, second, step + 1);
      }
      if (step + 1 < shape.steps) {
        multiply(second);
        add<tile.depth>(sum, first, step);
        add<0>(sum, second, step + 1);
      } else {
        add<0>(sum, first, step);
      }
    }
  }
};

/// The same of integers: the tensor cores' own sums are exact to the end, and the next stage is
/// always under way.
template <Fp8Tile tile>
struct Int8Consumer : Fp8Consumer<tile> {
  using Base = Fp8Consumer<tile>;
  using Sums = int[tile.sums()];

  template <bool is_first>
  __device__ __forceinline__ void multiply(Sums& sum) {
    wait_barrier(Base::ring.full + Base::ahead.stage, Base::ahead.parity);
    const Fp8Operands<tile> of(Base::shape, Base::ring, Base::ahead.stage, Base::group);
    wgmma_fence();
    byte_product<2 * tile.sums(), !is_first>(sum, of.a, of.b);
#pragma unroll
    for (int d = 0; d < tile.depth; ++d)
#pragma unroll
      for (int i = d == 0 ? 1 : 0; i < kFp8Block / 32; ++i)
        byte_product<2 * tile.sums(), true>(sum, of.a + d * of.next_a + 2 * i,
                                            of.b + d * of.next_b + 2 * i);
    wgmma_commit();
    Base::ahead.next(Base::shape.stages);
  }
  /// A tile's sums, rounded.
  __device__ __forceinline__ void sum_up(float (&rounded)[tile.sums()]) {
    Sums sum;
    multiply<true>(sum);
#pragma unroll 1
    for (int step = 1; step < Base::shape.steps; ++step) {
      multiply<false>(sum);
      wgmma_wait<1>();
      Base::leave();
    }
    wgmma_wait<0>();
    pin(sum);
    Base::leave();
#pragma unroll
    for (int i = 0; i < tile.sums(); ++i) rounded[i] = static_cast<float>(sum[i]);
  }
};

template <Fp8Tile tile>
__device__ void fp8_tiles(void* y, const Fp8RowScales& scales, const Fp8Shape& shape,
                          const Fp8Ring<tile>& ring, int group, int warp) {
  wait_for_previous();
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  float sum[tile.sums()];
  std::conditional_t<tile.integers, Int8Consumer<tile>, Fp8Consumer<tile>> consumer{
      shape, ring, group, 0, 0, {}, {}};
  const int first_row = tile.has_rows_first() ? kFp8Height * group + 16 * warp + g : 2 * t;
  consumer.row = first_row;
  HalfSums<2 * tile.sums(), 2> halves(ring.of_halves, ring.half_sums, group * 4 + warp,
                                      tile.groups() * 4);
  int next_item = static_cast<int>(blockIdx.x) / 2;
  for_fp8_places<tile>(shape, [&](const Fp8Place& place) {
    const int units = shape.height / kFp8Unit / tile.parts();  // of a part
    consumer.unit =
        place.tile * units % kFp8Aligned + (tile.has_rows_first() ? 0 : 2 / tile.parts() * warp);
    if constexpr (tile.grouped) consumer.row = first_row + place.row % kFp8Aligned;
    const auto store = [&](bool is_second_half) {
      auto* const y_bf16 = static_cast<__nv_bfloat16*>(y);
      if constexpr (tile.can_send() && !tile.in_pairs)
        if (shape.sends()) return fp8_send_many<tile>(shape, place, sum, group, warp);
      if (!tile.gated && shape.is_f32)
        fp8_store_each<tile>(static_cast<float*>(y), shape, place, sum, group, warp,
                             is_second_half);
      else if (!tile.gated && !shape.is_whole)
        fp8_store_each<tile>(y_bf16, shape, place, sum, group, warp, is_second_half);
      else if constexpr (tile.has_rows_first())
        fp8_store_many<tile>(y_bf16, shape, place, sum, group, warp, is_second_half);
      else
        fp8_store_few<tile>(y_bf16, shape, place, sum, ring.results, warp, is_second_half);
    };
    consumer.sum_up(sum);
    if constexpr (!tile.blocks) fp8_scale<tile>(sum, shape, scales, place, group, warp);
    if constexpr (tile.in_pairs) {
      if (cluster_rank() == 0) return halves.send(sum);
      next_item += static_cast<int>(gridDim.x) / 2;
      halves.add_to(sum, next_item < shape.items);
    } else if constexpr (tile.takes_halves()) {
      if (shape.halves > 1) {
        store(false);
        consumer.sum_up(sum);
        return store(true);
      }
    }
    store(false);
  });
}

template <int kRows, int kDepth, int kColumns, int kCluster, bool gated, bool blocks, bool grouped,
          bool integers = false, bool in_pairs = false>
__global__ void __launch_bounds__(Fp8Tile{kRows, kDepth, kColumns}.threads(), 1)
    gemm_fp8_kernel(void* y, const __grid_constant__ Fp8Maps maps, const Fp8RowScales scales,
                    const __grid_constant__ Fp8Shape shape) {
  constexpr Fp8Tile tile{kRows,  kDepth,  kColumns, kCluster, gated,
                         blocks, grouped, integers, in_pairs};
  constexpr bool kMovesRegisters = tile.groups() > 1 && tile.sums() > 32;
  extern __shared__ __align__(16) unsigned char shared[];
  const Fp8Ring<tile> ring(shared, shape);
  if (threadIdx.x == 0) {
    prefetch_map(&maps.w);
    prefetch_map(&maps.x);
    for (int i = 0; i < shape.stages; ++i) {
      init_barrier(ring.full + i, tile.blocks ? 4 : 2);
      init_barrier(ring.empty + i, tile.cluster * tile.consumers() / kWarp);
    }
    if constexpr (tile.in_pairs)
      HalfSums<2 * tile.sums(), 2>::init(ring.of_halves, tile.groups() * 4);
    fence_new_barriers();
  }
  if constexpr (tile.cluster_size() > 1)
    sync_new_cluster();
  else
    __syncthreads();
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x < kGroupThreads) {
    if constexpr (kMovesRegisters) leave_registers<24>();
    if (threadIdx.x == kCopiesWeights * kWarp) fp8_copy<tile, kCopiesWeights>(maps, shape, ring);
    if (threadIdx.x == kCopiesRows * kWarp) fp8_copy<tile, kCopiesRows>(maps, shape, ring);
    if constexpr (tile.blocks) {
      if (threadIdx.x == kCopiesWeightScales * kWarp)
        fp8_copy<tile, kCopiesWeightScales>(maps, shape, ring);
      if (threadIdx.x == kCopiesRowScales * kWarp)
        fp8_copy<tile, kCopiesRowScales>(maps, shape, ring);
    }
    __syncwarp();
  } else {
    if constexpr (kMovesRegisters) take_registers<240>();
    fp8_tiles<tile>(y, scales, shape, ring, warp / 4 - 1, warp % 4);
  }
  // The others still arrive here, and copy to here.
  if constexpr (tile.cluster_size() > 1) sync_cluster();
}

}  // namespace nanovllm
