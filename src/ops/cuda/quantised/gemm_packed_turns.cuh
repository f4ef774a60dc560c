// The products of gemm_packed.cuh where four warps would have all of a tile's rows of the weight,
// up to 32 rows of x; and the kernel.
//
// Alone in their quarters of the SM four warps issue an instruction in three cycles, and each of
// their products waits for what they unpack. So three groups of four have the same rows and take
// stages of 256 columns in turn: one multiplies, in 16 steps of 19 cycles that nothing interrupts,
// while the others unpack. It is one chain all the same: a group hands its sums on to the next.
#pragma once

#include "ops/cuda/quantised/gemm_packed.cuh"

namespace nanovllm {

/// A tile's sums that one group hands to the next.
constexpr int handed_bytes(int rows, int units) { return rows / 8 * units * kGroupThreads * 8; }

/// A lane's sums of a tile, in shared memory on their way from one group to the next, two at a
/// time. With a lone eight of rows a lane has but two for eight columns.
template <int kRows, int kUnits>
struct HandedSums {
  static constexpr int kPairs = kRows / 8 * kUnits, kPairBytes = kGroupThreads * 8;
  uint32_t at;
  __device__ explicit HandedSums(const void* sums)
      : at(shared_address(sums) + threadIdx.x % kGroupThreads * 8) {}
  __device__ __forceinline__ void put(const float (&sum)[kRows / 2]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + i * kPairBytes),
                   "f"(sum[4 / kUnits * i]), "f"(sum[4 / kUnits * i + 1])
                   : "memory");
  }
  __device__ __forceinline__ void get(float (&sum)[kRows / 2]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(sum[4 / kUnits * i]), "=f"(sum[4 / kUnits * i + 1])
                   : "r"(at + i * kPairBytes)
                   : "memory");
  }
};

/// The part of a group of four warps where all have the same rows of w: they take stages in turn.
/// While one multiplies, the others unpack, and each hands its sums on to the next.
template <class Kind, int kRows, int kUnits>
__device__ void consume_in_turns(__nv_bfloat16* y, const uint32_t* row_scales,
                                 const PackedShape& shape, const PackedRing<true>& ring,
                                 const HandedSums<kRows, kUnits>& handed,
                                 HalfSums<kRows, kUnits>& half, int group, int warp) {
  constexpr int kQuarters = 4 * kTurnChunks, kGroups = kMostPackedGroups;
  const bool leader = threadIdx.x % kWarp == 0;
  const int groups = Kind::groups(shape),
            slot = min(warp, shape.warps - 1),  // a warp without rows does another's work again
      row = kTurnChunks * shape.record_bytes, unit_bytes = (shape.up > 0 ? shape.warps : 1) * row,
            first_record = shape.x_bytes + packed_slot<kUnits>(shape, slot, 0) * row;
  const uint32_t x_slice = static_cast<uint32_t>(shape.block_rows * kSliceRowBytes >> 4);
  uint32_t a[kQuarters][2][4];
#pragma unroll
  for (int i = 0; i < kQuarters * 8; ++i)  // 0, where no row of w is, as in consume_packed()
    if (kUnits == 1) a[i / 8][i / 4 % 2][i % 4] = static_cast<uint32_t>((shape.rows + i) >> 31);
  const auto never = static_cast<uint32_t>(shape.rows >> 31);  // 0
  PackedNumbers<Kind::kNumbers, kUnits> numbers[kTurnChunks];
  RingCursor at = RingCursor{}.plus(group, shape.stages);
  const int item = first_packed_item(shape);
  if (item >= shape.items) return;
  for (int step = group; step < shape.steps; step += kGroups) {
    wait_barrier(ring.full + at.stage, at.parity);
#pragma unroll
    for (int chunk = 0; chunk < kTurnChunks; ++chunk) {
      numbers[chunk].load(ring.at(at.stage) + first_record + chunk * shape.record_bytes, unit_bytes,
                          groups > 0);
      if (groups == 0)
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
          numbers[chunk].scales[u] = row_scales[packed_row<kUnits>(shape, item, slot, u)];
    }
#pragma unroll
    for (int chunk = 0; chunk < kTurnChunks; ++chunk) {
      typename Kind::Unpacker unpack[kUnits];
      const auto go = [&]<int quarter>() {
        unpack_quarter<quarter>(a[4 * chunk + quarter], numbers[chunk], unpack, unit_bytes, groups);
      };
      go.template operator()<0>();
      go.template operator()<1>();
      go.template operator()<2>();
      go.template operator()<3>();
    }
    // All is unpacked before the turn comes: the barrier's name depends on it, as if it could be
    // another one.
    uint32_t depends = 0;
#pragma unroll
    for (const auto& quarter : a)
#pragma unroll
      for (int i = 0; i < 4 * kUnits; ++i) depends |= quarter[i % 2][i / 2 * (kUnits == 1 ? 2 : 1)];
    wait_barrier(ring.rows_full() + at.stage, at.parity);
    if (step > 0) sync_some(1 + group + static_cast<int>(depends & never), 2 * kGroupThreads);
    float sum[kRows / 2];
#pragma unroll
    for (float& s : sum) s = 0.0f;
    if (step > 0) handed.get(sum);
    uint32_t x = describe_rows(ring.at(at.stage));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2 * kQuarters; ++i)
      packed_product<kRows>(sum, a[i / 2][i % 2], x + i / 4 * x_slice + i % 4 * 2);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (auto& quarter : a) pin_registers(quarter);
#pragma unroll
    for (float& s : sum) asm volatile("" : "+f"(s)::"memory");
    if (step + 1 < shape.steps) {
      handed.put(sum);
      if (leader) arrive(ring.empty + at.stage);  // before the next turn: turn_stages()
      arrive_at_some(1 + (group + 1) % kGroups, 2 * kGroupThreads);
    } else {
      end_packed<kRows, kUnits>(y, shape, sum, half, item, warp);
    }
    at = at.plus(kGroups, shape.stages);
  }
}

/// `w`: boxes of a block's records in a stage; `x`: of `block_rows` rows by the slices of a stage;
/// `row_scales`: of whole rows, if that is what they are for. `in_turns`: all groups have the same
/// rows of w.
template <class Kind, int kRows, int kUnits, int kDepth, bool in_turns>
__global__ void __launch_bounds__((kMostPackedGroups + 1) * kGroupThreads, 1)
    gemm_packed_kernel(__nv_bfloat16* y, const __grid_constant__ CUtensorMap w,
                       const __grid_constant__ CUtensorMap x, const uint32_t* row_scales,
                       const PackedShape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0),
            consumers = static_cast<int>(blockDim.x) / kWarp - kPackedCopiers,
            summing = in_turns ? kGroupThreads / kWarp : consumers;  // warps that have y's sums
  auto* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t *const empty = full + kMostStages, *const half_barriers = empty + kMostStages;
  unsigned char *const half_sums = shared + kPackedBarriers,
                       *const handed_sums =
                           half_sums +
                           (shape.cluster > 1 ? half_sum_bytes(kRows, kUnits, summing / 4) : 0),
                       *const data = handed_sums + (in_turns ? handed_bytes(kRows, kUnits) : 0);
  // A stage: rows of x, then the weights.
  const PackedRing<in_turns> ring{
      {data + (1024 - shared_address(data) % 1024) % 1024, shape.stage_bytes, full, empty}};
  if (threadIdx.x == 0) {
    prefetch_map(&w);
    prefetch_map(&x);
    for (int i = 0; i < shape.stages; ++i) {
      init_barrier(&full[i], 1);
      if (in_turns) init_barrier(ring.rows_full() + i, 1);
      init_barrier(&empty[i], summing);
    }
    HalfSums<kRows, kUnits>::init(half_barriers, summing);
    fence_new_barriers();
  }
  __syncthreads();
  if (shape.cluster > 1) arrive_new_cluster();  // waited for where copies are under way
  HalfSums<kRows, kUnits> half(half_barriers, half_sums, warp % summing, summing);
  if (warp >= consumers) {
    if (threadIdx.x % kWarp == 0) produce_packed<kUnits>(w, x, shape, ring, warp - consumers);
    __syncwarp();
    if (shape.cluster > 1) wait_for_cluster();
  } else if constexpr (in_turns) {
    if (shape.cluster > 1) wait_for_cluster();
    consume_in_turns<Kind, kRows, kUnits>(y, row_scales, shape, ring,
                                          HandedSums<kRows, kUnits>(handed_sums), half, warp / 4,
                                          warp % 4);
  } else {
    if (shape.cluster > 1) wait_for_cluster();
    wait_for_previous();
    consume_packed<Kind, kRows, kUnits, kDepth>(y, row_scales, shape, ring, half, warp);
  }
}

}  // namespace nanovllm
