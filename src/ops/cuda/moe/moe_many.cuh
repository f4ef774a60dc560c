// The products of a mixture of experts in bf16 where an expert has many tokens, on sm_90.
//
// Floor: the tensor cores, or the weights' bytes where tokens are fewer. A unit of work is 128
// places of an expert by 256 rows of its weight (where gated 128 of each half). Two warpgroups
// multiply 64 places each with wgmma, both operands in shared memory, one chain of k16 steps per
// output from zero: the bits of expert_gemm_kernel(). A third brings what they need through a ring
// of stages, 64 columns at a time: the weight by the copy engine, the tokens, which lie anywhere,
// by ordinary asynchronous copies. Blocks stay and take unit after unit; the ring runs on.
#pragma once

#include "ops/cuda/moe/moe.cuh"
#include "ops/cuda/ptx/gemm_cluster.cuh"
#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

struct ManyCut {
  static constexpr int kTokens = 128, kRows = 256;  // of a unit: places, rows of the weight
  static constexpr int kConsumers = 2 * 128, kThreads = kConsumers + 128;
  static constexpr int kDepth = 64, kRowBytes = kDepth * 2;  // of a stage
  static constexpr int kTokenBytes = kTokens * kRowBytes, kWeightBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes, kStages = 4;
  static constexpr size_t kSharedBytes = 1024 + size_t{kStages} * kStageBytes;
  static constexpr int kColumns(bool gated) { return gated ? kRows / 2 : kRows; }  // of y
};

/// The warpgroup that copies. A thread has one 16-byte chunk of every 16th row.
template <bool kGated>
__device__ void bring_units(const ExpertProduct<__nv_bfloat16>& product, const ExpertPlan& plan,
                            const CUtensorMap* map, const ProductRing& ring, int units,
                            int row_blocks) {
  using Cut = ManyCut;
  constexpr int kRowsAtOnce = 16, kCopies = Cut::kTokens / kRowsAtOnce;
  constexpr int kBehind = 2;  // stages whose copies may be under way
  const int thread = threadIdx.x - Cut::kConsumers, row0 = thread / 8, chunk = thread % 8;
  const int place = row0 * Cut::kRowBytes + ((chunk ^ row0 % 8) << 4);
  RingCursor at, landed;
  int behind = 0;
  const auto land = [&] {
    fence_shared_for_async();
    arrive(ring.full + landed.stage);
    landed.next(ManyCut::kStages);
  };
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const ExpertTile tile = tile_at(plan, unit / row_blocks);
    const __nv_bfloat16* from[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = i * kRowsAtOnce + row0, of_tile = tile.first + min(row, tile.rows - 1);
      from[i] = product.x + chunk * 8 +
                (product.by_token ? plan.token_of[of_tile] : of_tile) * product.x_stride;
    }
    for (int k = 0; k < product.k; k += Cut::kDepth, at.next(ManyCut::kStages)) {
      wait_barrier(ring.empty + at.stage, at.parity ^ 1);
      if (thread == 0) {
        arrive_expecting(ring.full + at.stage, Cut::kWeightBytes);
        copy_box(ring.weight(at.stage), map, ring.full + at.stage, 0,
                 unit % row_blocks * Cut::kColumns(kGated), 0, k / Cut::kDepth, tile.expert);
      }
#pragma unroll
      for (int i = 0; i < kCopies; ++i)
        copy_async(ring.rows(at.stage) + place + i * kRowsAtOnce * Cut::kRowBytes, from[i] + k,
                   i * kRowsAtOnce + row0 < tile.rows);
      commit_copies();
      if (behind == kBehind) {
        wait_copies<kBehind>();
        land();
      } else {
        ++behind;
      }
    }
  }
  wait_copies<0>();
  for (; behind > 0; --behind) land();
}

/// A warp's 16 rows of a unit's outputs, 16 bytes at a time.
template <bool kGated>
__device__ void store_many(const ExpertProduct<__nv_bfloat16>& product, const ExpertTile& tile,
                           int row0, int column0, const float (&sum)[128]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + 8 * half + lane / 4;
    __nv_bfloat16* to = product.y + (tile.first + row) * product.y_stride;
#pragma unroll
    for (int j = 0; j < (kGated ? 16 : 32); j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (j + i) + 2 * half;
        if constexpr (kGated)
          words[i] = pack_bf16(to_float(gated<__nv_bfloat16>(sum[at], sum[at + 64])),
                               to_float(gated<__nv_bfloat16>(sum[at + 1], sum[at + 65])));
        else
          words[i] = pack_bf16(sum[at], sum[at + 1]);
      }
      transpose_quad(words);
      const int column = column0 + (j + lane % 4) * 8;
      if (row < tile.rows && column < product.columns)
        *reinterpret_cast<uint4*>(to + column) = {words[0], words[1], words[2], words[3]};
    }
  }
}

/// A multiplying warpgroup's part.
template <bool kGated>
__device__ void multiply_many(const ExpertProduct<__nv_bfloat16>& product, const ExpertPlan& plan,
                              const ProductRing& ring, int units, int row_blocks) {
  using Cut = ManyCut;
  const int group = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / 128, 0),
            warp = threadIdx.x / kWarp;
  const bool leader = threadIdx.x % kWarp == 0;
  RingCursor at;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    float sum[128];
#pragma unroll
    for (float& s : sum) s = 0.0f;
    int last = -1;
    for (int k = 0; k < product.k; k += Cut::kDepth, at.next(ManyCut::kStages)) {
      wait_barrier(ring.full + at.stage, at.parity);
      const uint64_t x = tile_of(ring.rows(at.stage) + group * 64 * Cut::kRowBytes),
                     w = tile_of(ring.weight(at.stage));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < Cut::kDepth / 16; ++i) product_n256(sum, x + 2 * i, w + 2 * i, true);
      wgmma_commit();
      wgmma_wait<1>();  // all but these
      if (leader && last >= 0) arrive(ring.empty + last);
      last = at.stage;
    }
    wgmma_wait<0>();
    pin(sum);
    if (leader) arrive(ring.empty + last);
    store_many<kGated>(product, tile_at(plan, unit / row_blocks), warp * 16,
                       unit % row_blocks * Cut::kColumns(kGated), sum);
  }
}

/// `map`: boxes of kRows of the weight ([2, kRows / 2] where gated) by one slice.
template <bool kGated>
__global__ void __launch_bounds__(ManyCut::kThreads, 1)
    expert_many_kernel(const __grid_constant__ ExpertProduct<__nv_bfloat16> product,
                       const __grid_constant__ ExpertPlan plan,
                       const __grid_constant__ CUtensorMap map, int row_blocks) {
  using Cut = ManyCut;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint64_t full[Cut::kStages], empty[Cut::kStages];
  const ProductRing ring{shared + (1024 - shared_address(shared) % 1024) % 1024, Cut::kStageBytes,
                         full, empty, Cut::kWeightBytes};
  if (threadIdx.x == Cut::kConsumers) {
    prefetch_map(&map);
    for (int i = 0; i < Cut::kStages; ++i) {
      init_barrier(&full[i], 128 + 1);  // the copying threads, and the weight
      init_barrier(&empty[i], Cut::kConsumers / kWarp);
    }
    fence_new_barriers();
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  const int units = num_tiles(plan) * row_blocks;
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (warp >= Cut::kConsumers / kWarp) {
    leave_registers<56>();
    bring_units<kGated>(product, plan, &map, ring, units, row_blocks);
  } else {
    take_registers<224>();
    multiply_many<kGated>(product, plan, ring, units, row_blocks);
  }
}

}  // namespace nanovllm
