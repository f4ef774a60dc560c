// The products of gemm_packed.cuh where four warps would have all of a tile's rows of the weight,
// up to 32 rows of x; and the kernel.
//
// Alone in their quarters of the SM four warps issue an instruction in three cycles, and each of
// their products waits for what they unpack. So three groups of four have the same rows and take
// stages of 256 columns in turn: one multiplies, in 16 steps of 19 cycles that nothing interrupts,
// while the others unpack. It is one chain all the same: a group hands its sums on to the next. Of
// a weight in halves of k the turns of two chains alternate.
#pragma once

#include "ops/cuda/quantised/gemm_packed.cuh"

namespace nanovllm {

/// A tile's sums that one group hands to the next.
constexpr int handed_bytes(int rows, int units) { return rows / 8 * units * kGroupThreads * 8; }
/// Places of such sums: of each chain, and of the first half's when it has ended.
__host__ __device__ constexpr int handed_areas(int halves) { return 2 * halves - 1; }
/// Named barriers. Where halves have chains of their own, a group may end its next turn before the
/// one that it handed sums to begins: each of a group's turns has another name than the one before.
constexpr int kTurnBarriers = 2 * kMostPackedGroups, kHalfBarrier = 1 + kTurnBarriers;

/// A lane's sums of a tile, in shared memory on their way from one group to the next, two at a
/// time. With a lone eight of rows a lane has but two for eight columns.
template <int kRows, int kUnits>
struct HandedSums {
  static constexpr int kPairs = kRows / 8 * kUnits, kPairBytes = kGroupThreads * 8;
  uint32_t first;
  __device__ explicit HandedSums(const void* sums)
      : first(shared_address(sums) + threadIdx.x % kGroupThreads * 8) {}
  __device__ uint32_t area(int i) const { return first + i * handed_bytes(kRows, kUnits); }
  __device__ __forceinline__ void put(const float (&sum)[kRows / 2], int to) const {
    const uint32_t at = area(to);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + i * kPairBytes),
                   "f"(sum[4 / kUnits * i]), "f"(sum[4 / kUnits * i + 1])
                   : "memory");
  }
  __device__ __forceinline__ void get(float (&sum)[kRows / 2], int from) const {
    const uint32_t at = area(from);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(sum[4 / kUnits * i]), "=f"(sum[4 / kUnits * i + 1])
                   : "r"(at + i * kPairBytes)
                   : "memory");
  }
  /// The second half's sums become both halves'.
  __device__ __forceinline__ void add_first_half(float (&sum)[kRows / 2]) const {
    float ended[kRows / 2];
#pragma unroll
    for (float& s : ended) s = 0.0f;
    get(ended, 2);
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 2) {
      const float2 both = add_halves(pack_bf16(ended[i], ended[i + 1]), sum[i], sum[i + 1]);
      sum[i] = both.x, sum[i + 1] = both.y;
    }
  }
};

/// The part of a group of four warps where all have the same rows of w: they take stages in turn.
/// While one multiplies, the others unpack, and each hands its sums on to the next.
template <WeightFormat::Numbers packing, class Unpacker, int kRows, int kUnits>
__device__ void consume_in_turns(__nv_bfloat16* y, const uint32_t* row_scales,
                                 const PackedShape& shape, const PackedRing<true>& ring,
                                 const HandedSums<kRows, kUnits>& handed, int group, int warp) {
  constexpr int kQuarters = 4 * kTurnChunks, kGroups = kMostPackedGroups;
  const bool leader = threadIdx.x % kWarp == 0;
  const int slot = min(warp, shape.warps - 1),  // a warp without rows does another's work again
      row = kTurnChunks * shape.record_bytes, unit_bytes = (shape.up > 0 ? shape.warps : 1) * row,
            first_record = shape.x_bytes + packed_slot<kUnits>(shape, slot, 0) * row;
  const uint32_t x_slice = static_cast<uint32_t>(shape.block_rows * kSliceRowBytes >> 4);
  uint32_t a[kQuarters][2][4];
#pragma unroll
  for (int i = 0; i < kQuarters * 8; ++i)  // 0, where no row of w is, as in consume_packed()
    if (kUnits == 1) a[i / 8][i / 4 % 2][i % 4] = static_cast<uint32_t>((shape.rows + i) >> 31);
  const auto never = static_cast<uint32_t>(shape.rows >> 31);  // 0
  PackedNumbers<packing, kUnits> numbers[kTurnChunks];
  RingCursor at = RingCursor{}.plus(group, shape.stages);
  int item = static_cast<int>(blockIdx.x), step = group, turn = group;
  const int chains = shape.halves;  // whose turns alternate
  const auto settle = [&] {
    while (step >= shape.steps) step -= shape.steps, item += static_cast<int>(gridDim.x);
  };
  for (settle(); item < shape.items; settle()) {
    wait_barrier(ring.full + at.stage, at.parity);
#pragma unroll
    for (int chunk = 0; chunk < kTurnChunks; ++chunk) {
      numbers[chunk].load(ring.at(at.stage) + first_record + chunk * shape.record_bytes, unit_bytes,
                          shape.groups > 0);
      if (shape.groups == 0)
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
          numbers[chunk].scales[u] = row_scales[packed_row<kUnits>(shape, item, slot, u)];
    }
#pragma unroll
    for (int chunk = 0; chunk < kTurnChunks; ++chunk) {
      Unpacker unpack[kUnits];
      const auto go = [&]<int quarter>() {
        unpack_quarter<quarter>(a[4 * chunk + quarter], numbers[chunk], unpack, unit_bytes,
                                shape.groups);
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
    const bool ends = step + chains >= shape.steps, has_all = step + 1 == shape.steps,
               has_next = !ends || item + static_cast<int>(gridDim.x) < shape.items;
    const int chain = step & (chains - 1),
              next = turn + chains < kTurnBarriers ? turn + chains : turn + chains - kTurnBarriers;
    wait_barrier(ring.rows_full() + at.stage, at.parity);
    if (step >= chains || item > static_cast<int>(blockIdx.x))
      sync_some(1 + turn + static_cast<int>(depends & never), 2 * kGroupThreads);
    float sum[kRows / 2];
#pragma unroll
    for (float& s : sum) s = 0.0f;
    if (step >= chains) handed.get(sum, chain);
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
    if (!has_all) handed.put(sum, ends ? 2 : chain);
    if (leader) arrive(ring.empty + at.stage);  // before the next turn: turn_stages()
    if (has_next) arrive_at_some(1 + next, 2 * kGroupThreads);
    if (ends && chains > 1) {
      if (has_all) {
        sync_some(kHalfBarrier, 2 * kGroupThreads);
        handed.add_first_half(sum);
      } else {
        arrive_at_some(kHalfBarrier, 2 * kGroupThreads);
      }
    }
    if (has_all) store_packed<kRows, kUnits>(y, shape, sum, item, warp);
    step += kGroups;
    turn = turn < kGroups ? turn + kGroups : turn - kGroups;
    at = at.plus(kGroups, shape.stages);
  }
}

/// `w`: boxes of a block's records in a stage; `x`: of `block_rows` rows by the slices of a stage;
/// `row_scales`: of whole rows, if that is what they are for. `in_turns`: all groups have the same
/// rows of w.
template <WeightFormat::Numbers packing, bool coarse, int kRows, int kUnits, int kDepth,
          bool in_turns>
__global__ void __launch_bounds__((kMostPackedGroups + 1) * kGroupThreads, 1)
    gemm_packed_kernel(__nv_bfloat16* y, const __grid_constant__ CUtensorMap w,
                       const __grid_constant__ CUtensorMap x, const uint32_t* row_scales,
                       const PackedShape shape) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const empty = full + kMostStages;
  unsigned char* const data =
      shared + kSkinnyBarrierBytes +
      (in_turns ? handed_areas(shape.halves) * handed_bytes(kRows, kUnits) : 0);
  // A stage: rows of x, then the weights.
  const PackedRing<in_turns> ring{
      {data + (1024 - shared_address(data) % 1024) % 1024, shape.stage_bytes, full, empty}};
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0),
            consumers = static_cast<int>(blockDim.x) / kWarp - kPackedCopiers;
  if (threadIdx.x == 0) {
    prefetch_map(&w);
    prefetch_map(&x);
    for (int i = 0; i < shape.stages; ++i) {
      init_barrier(&full[i], 1);
      if (in_turns) init_barrier(ring.rows_full() + i, 1);
      init_barrier(&empty[i], in_turns ? kGroupThreads / kWarp : consumers);
    }
    fence_new_barriers();
  }
  __syncthreads();
  using Unpacker = UnpackOf<packing, coarse>;
  if (warp >= consumers) {
    if (threadIdx.x % kWarp == 0) produce_packed<kUnits>(w, x, shape, ring, warp - consumers);
  } else if constexpr (in_turns) {
    consume_in_turns<packing, Unpacker, kRows, kUnits>(
        y, row_scales, shape, ring, HandedSums<kRows, kUnits>(shared + kSkinnyBarrierBytes),
        warp / 4, warp % 4);
  } else {
    wait_for_previous();
    consume_packed<packing, Unpacker, kRows, kUnits, kDepth>(y, row_scales, shape, ring, warp);
  }
}

}  // namespace nanovllm
