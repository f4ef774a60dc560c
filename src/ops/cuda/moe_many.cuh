// The products of a mixture of experts in bf16 where an expert has many tokens, on sm_90.
//
// Floor: the tensor cores, or the weights' bytes where tokens are fewer. A unit of work is 128
// places of an expert by 256 rows of its weight (where gated 128 of each half). Two warpgroups
// multiply 64 places each with wgmma, both operands in shared memory, one chain of k16 steps per
// output from zero: the bits of expert_gemm_kernel(). A third brings what they need through a ring
// of stages, 64 columns at a time: the weight by the copy engine, the tokens, which lie anywhere,
// by ordinary asynchronous copies. Blocks stay and take unit after unit; the ring runs on.
#pragma once

#include "ops/cuda/gemm_wgmma.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/moe.cuh"

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

#define NANOVLLM_4(d, i) "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3])
#define NANOVLLM_16(d, i) \
  NANOVLLM_4(d, i), NANOVLLM_4(d, (i) + 4), NANOVLLM_4(d, (i) + 8), NANOVLLM_4(d, (i) + 12)
#define NANOVLLM_64(d, i) \
  NANOVLLM_16(d, i), NANOVLLM_16(d, (i) + 16), NANOVLLM_16(d, (i) + 32), NANOVLLM_16(d, (i) + 48)

/// As product<n>() of gemm_wgmma.cuh, for 256 rows of B.
__device__ __forceinline__ void product_n256(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "
      "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "
      "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "
      "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "
      "%119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, 1, 1, 1, 0, 0;"
      : NANOVLLM_64(d, 0), NANOVLLM_64(d, 64)
      : "l"(a), "l"(b));
}
#undef NANOVLLM_64
#undef NANOVLLM_16
#undef NANOVLLM_4

struct ManyRing {
  unsigned char* data;
  uint64_t *full, *empty;
  __device__ unsigned char* tokens(int stage) const { return data + stage * ManyCut::kStageBytes; }
  __device__ unsigned char* weight(int stage) const { return tokens(stage) + ManyCut::kTokenBytes; }
};

struct ManyCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage == ManyCut::kStages) stage = 0, parity ^= 1;
  }
};

/// The warpgroup that copies. A thread has one 16-byte chunk of every 16th row.
template <bool kGated>
__device__ void bring_units(const ExpertProduct<__nv_bfloat16>& product, const ExpertPlan& plan,
                            const CUtensorMap* map, const ManyRing& ring, int units,
                            int row_blocks) {
  using Cut = ManyCut;
  constexpr int kRowsAtOnce = 16, kCopies = Cut::kTokens / kRowsAtOnce;
  constexpr int kBehind = 2;  // stages whose copies may be under way
  const int thread = threadIdx.x - Cut::kConsumers, row0 = thread / 8, chunk = thread % 8;
  const int place = row0 * Cut::kRowBytes + ((chunk ^ row0 % 8) << 4);
  ManyCursor at, landed;
  int behind = 0;
  const auto land = [&] {
    fence_shared_for_async();
    arrive(ring.full + landed.stage);
    landed.next();
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
    for (int k = 0; k < product.k; k += Cut::kDepth, at.next()) {
      wait_barrier(ring.empty + at.stage, at.parity ^ 1);
      if (thread == 0) {
        arrive_expecting(ring.full + at.stage, Cut::kWeightBytes);
        copy_box(ring.weight(at.stage), map, ring.full + at.stage, 0,
                 unit % row_blocks * Cut::kColumns(kGated), 0, k / Cut::kDepth, tile.expert);
      }
#pragma unroll
      for (int i = 0; i < kCopies; ++i)
        copy_async(ring.tokens(at.stage) + place + i * kRowsAtOnce * Cut::kRowBytes, from[i] + k,
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

/// Of four lanes' four words each, word s of lane t becomes word t of lane s.
__device__ inline void transpose_quad(uint32_t (&v)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(kFullMask, odd ? v[i] : v[i + 1], 1);
    (odd ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(kFullMask, high ? v[i] : v[i + 2], 2);
    (high ? v[i] : v[i + 2]) = got;
  }
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
                              const ManyRing& ring, int units, int row_blocks) {
  using Cut = ManyCut;
  const int group = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / 128, 0),
            warp = threadIdx.x / kWarp;
  const bool leader = threadIdx.x % kWarp == 0;
  ManyCursor at;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    float sum[128];
#pragma unroll
    for (float& s : sum) s = 0.0f;
    int last = -1;
    for (int k = 0; k < product.k; k += Cut::kDepth, at.next()) {
      wait_barrier(ring.full + at.stage, at.parity);
      const uint64_t x = tile_of(ring.tokens(at.stage) + group * 64 * Cut::kRowBytes),
                     w = tile_of(ring.weight(at.stage));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < Cut::kDepth / 16; ++i) product_n256(sum, x + 2 * i, w + 2 * i);
      wgmma_commit();
      wgmma_wait<1>();  // all but these
      if (leader && last >= 0) arrive(ring.empty + last);
      last = at.stage;
    }
    wgmma_wait<0>();
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
  const ManyRing ring{shared + (1024 - shared_address(shared) % 1024) % 1024, full, empty};
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
