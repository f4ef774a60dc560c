// Hopper's means for products of more rows, beside gemm_wgmma.cuh: clusters of two blocks, and
// wgmma of 64 rows by 256 columns with both operands in shared memory.
#pragma once

#include "ops/cuda/ptx/gemm_wgmma.cuh"
#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

// -- On the host --

/// f<index>() of an index into a table of `count` kernels; nothing where it is none.
template <int count, int i = 0, class F>
void with_index(int index, F&& f) {
  if constexpr (i < count) {
    if (index == i) return f.template operator()<i>();
    with_index<count, i + 1>(index, f);
  }
}

// -- Clusters --

/// This block's place in its cluster.
__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// A barrier among all threads of the cluster.
__device__ inline void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
/// The halves of sync_new_cluster().
__device__ inline void arrive_new_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// sync_cluster() where the threads have written nothing but new barriers, after
/// fence_new_barriers(): it waits for no memory.
__device__ inline void sync_new_cluster() {
  arrive_new_cluster();
  wait_for_cluster();
}
/// The place in block `rank` of the cluster that `shared` is in this one.
__device__ inline uint32_t address_in(uint32_t rank, uint32_t shared) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}
/// Stores 1, 2 or 4 words in another block of the cluster; they complete their bytes on its
/// barrier.
template <int words>
__device__ __forceinline__ void store_in(uint32_t there, const uint32_t* v, uint32_t barrier) {
  static_assert(words == 1 || words == 2 || words == 4);
  if constexpr (words == 1)
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
        "r"(v[0]), "r"(barrier)
        : "memory");
  if constexpr (words == 2)
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
            there),
        "r"(v[0]), "r"(v[1]), "r"(barrier)
        : "memory");
  if constexpr (words == 4)
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(there),
        "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(barrier)
        : "memory");
}
/// Arrives at the barrier that is `barrier` in block `rank` of the cluster.
__device__ inline void arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
/// One box of a matrix, from global to shared memory. By one thread.
__device__ inline void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int column,
                                int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}
/// The same into the same place of the cluster's blocks that `blocks` has bits for, each of which
/// completes it on its own barrier.
__device__ inline void copy_box_to(uint16_t blocks, void* shared, const CUtensorMap* map,
                                   uint64_t* barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

/// The same of a tensor of four dimensions.
__device__ inline void copy_box_to(uint16_t blocks, void* shared, const CUtensorMap* map,
                                   uint64_t* barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}

// -- d (+)= A B; d is replaced if not `accumulate` --

/// Operands as tile_of() names them; the layout of d is that of product().
__device__ __forceinline__ void product_n256(float (&d)[128], uint64_t a, uint64_t b,
                                             bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NANOVLLM_D128
      "}, %128, %129, p, 1, 1, 0, 0;\n"
      "}\n"
      : NANOVLLM_64("+f", d, 0), NANOVLLM_64("+f", d, 64)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}

/// sum = that of the products of both halves of k (FirstHalf). multiply_until(end) adds to sum
/// those of the steps up to `end` of `steps`, and waits for them.
template <int n, class Multiply>
__device__ __forceinline__ void multiply_halves(float (&sum)[n], int steps,
                                                const Multiply& multiply_until) {
  FirstHalf<n> first;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    multiply_until(half == 0 ? steps / 2 : steps);
    pin(sum);
    if (half == 0)
      first.take(sum);
    else
      first.add_to(sum);
  }
}

}  // namespace nanovllm
