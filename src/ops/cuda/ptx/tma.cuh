// Hopper's copy engine (sm_90): boxes of tensors, from global to shared memory, that complete on a
// barrier (mbarrier.cuh).
#pragma once

#include <cuda.h>

#include "ops/cuda/ptx/mbarrier.cuh"

namespace nanovllm {

/// Makes new barriers known to the copy engine: by the thread that set them up.
__device__ inline void fence_new_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Arrives, and makes the phase wait for so many bytes of copies besides.
__device__ inline void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// One box of a tensor of four dimensions, from global to shared memory; completes its bytes on
/// `barrier`. What lies outside the tensor arrives as zeros. By one thread.
__device__ inline void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int c0,
                                int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
/// The same of five dimensions.
__device__ inline void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int c0,
                                int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
/// copy_box() of what nobody reads again: it leaves the L2 cache first.
__device__ inline void copy_box_once(void* shared, const CUtensorMap* map, uint64_t* barrier,
                                     int c0, int c1, int c2, int c3) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(kEvictFirst)
      : "memory");
}
/// The same of five dimensions.
__device__ inline void copy_box_once(void* shared, const CUtensorMap* map, uint64_t* barrier,
                                     int c0, int c1, int c2, int c3, int c4) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000;
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
      "l"(kEvictFirst)
      : "memory");
}

/// Brings such a box as near as the L2 cache.
__device__ inline void prefetch_box(const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                    int c4) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

/// `bytes`, a multiple of 16 as both addresses are, from global to shared memory; completes them on
/// `barrier`. By one thread.
__device__ inline void copy_bytes(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
/// Between ordinary writes to shared memory and the copy engine's or wgmma's reads of them: by each
/// thread that wrote, before the barrier.
__device__ inline void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace nanovllm
