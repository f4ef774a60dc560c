// How the threads of gemm_w8a8.cuh's blocks bring stages of its ring.
#pragma once

#include "ops/cuda/ptx/mma.cuh"
#include "ops/cuda/quantised/w8a8_kernels.h"

namespace nanovllm::w8a8 {

/// A thread's copies of one operand: piece threadIdx.x % 8 of some of the tile's rows.
template <int kTileRows, int kThreads>
struct Copies {
  static constexpr int kStep = kThreads / 8, kCount = kTileRows / kStep;
  static_assert(kStep % 8 == 0 && kTileRows % kStep == 0);
  const uint8_t* from;
  int64_t odd,
      pair;     // from the first row to the second; to the third, and from each to the next but one
  int count;    // of the rows that are there
  uint32_t to;  // in a block of the stage

  __device__ Copies(const uint8_t* first, int64_t to_second, int64_t to_third, int rows)
      : from(first + thread_piece() * 16), odd(to_second), pair(to_third), count(rows) {
    const uint32_t row = threadIdx.x / 8;
    to = row * kByteBlock + ((thread_piece() ^ row % 8) << 4);
  }
  static __device__ uint32_t thread_piece() { return threadIdx.x % 8; }
  /// Block `block` of k; zeros where that is `blocks` or above.
  __device__ void issue(unsigned char* stage, int block, int blocks) const {
    const uint8_t* const at = from + int64_t{block} * kByteBlock;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      copy_async(stage + to + i * kStep * kByteBlock, at + i % 2 * odd + i / 2 * pair,
                 i < count && block < blocks);
  }
};

/// How many of the rows first, first + step, ... lie before `end`.
__device__ inline int rows_before(int end, int first, int step) {
  return max(end - first + step - 1, 0) / step;
}

/// A full ring's oldest stage has come, for this thread.
__device__ inline void wait_stage(int stages) {
  static_assert(kMostByteStages == 6);
  switch (stages) {
    case 2:
      return wait_copies<0>();
    case 3:
      return wait_copies<1>();
    case 4:
      return wait_copies<2>();
    case 5:
      return wait_copies<3>();
    default:
      return wait_copies<4>();
  }
}

}  // namespace nanovllm::w8a8
