// A product in halves of k by clusters of two blocks: each multiplies a half, and the block that
// has the first one's sums sends them, rounded, to the other, which stores both's.
#pragma once

#include "ops/cuda/gemm/gemm_kernels.h"
#include "ops/cuda/ptx/gemm_cluster.cuh"

namespace nanovllm {

/// Shared memory of so many groups of four warps.
constexpr int half_sum_bytes(int rows, int units, int groups) {
  return groups * kGroupThreads * rows / 8 * units * 4;
}

/// The sums of the first half of k, rounded, on their way to the block of a cluster that has the
/// second. Areas are of all warps that have sums, `warps`.
template <int kRows, int kUnits>
class HalfSums {
 public:
  static constexpr int kWords = kRows / 8 * kUnits, kPiece = kWords % 4 == 0   ? 4
                                                             : kWords % 2 == 0 ? 2
                                                                               : 1;  // of a lane
  /// `barriers`: two, that init() sets up; `area`: of the block's warps.
  __device__ HalfSums(uint64_t* barriers, const void* area, int warp, int warps)
      : came_(barriers),
        taken_(barriers + 1),
        area_(shared_address(area) + (warp * kWarp + threadIdx.x % kWarp) * kPiece * 4),
        pitch_(warps * kWarp * kPiece * 4),
        arms_(warp == 0 && threadIdx.x % kWarp == 0) {}
  __device__ static void init(uint64_t* barriers, int warps) {
    init_barrier(barriers, 1);
    init_barrier(barriers + 1, warps);
  }
  /// By the block that has the first half.
  __device__ __forceinline__ void send(const float (&sum)[kRows / 2]) {
    wait_barrier(taken_, parity_ ^ 1);
    parity_ ^= 1;
    const uint32_t there = address_in(1, area_), barrier = address_in(1, shared_address(came_));
#pragma unroll
    for (int i = 0; i < kWords; i += kPiece) {
      uint32_t v[kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; ++j)
        v[j] = pack_bf16(sum[4 / kUnits * (i + j)], sum[4 / kUnits * (i + j) + 1]);
      store_in<kPiece>(there + i / kPiece * pitch_, v, barrier);
    }
  }
  /// By the other one, whose sums become both halves'. `again`: there is another tile.
  __device__ __forceinline__ void add_to(float (&sum)[kRows / 2], bool again) {
    if (arms_) arrive_expecting(came_, kWords / kPiece * pitch_);
    wait_barrier(came_, parity_);
    parity_ ^= 1;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t first;
      asm volatile("ld.shared.b32 %0, [%1];"
                   : "=r"(first)
                   : "r"(area_ + i / kPiece * pitch_ + i % kPiece * 4)
                   : "memory");
      float* const mine = sum + 4 / kUnits * i;
      const float2 both = add_halves(first, mine[0], mine[1]);
      mine[0] = both.x, mine[1] = both.y;
    }
    __syncwarp();
    if (again && threadIdx.x % kWarp == 0) arrive_at(taken_, 0);
  }

 private:
  uint64_t *came_, *taken_;
  uint32_t area_;
  int pitch_;
  bool arms_;
  uint32_t parity_ = 0;
};

}  // namespace nanovllm
