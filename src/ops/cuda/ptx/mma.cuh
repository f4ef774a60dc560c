// The tensor core instruction that all bf16 matrix arithmetic here is defined by: mma.sync
// m16n8k16, f32 accumulators. What a lane holds (g = lane / 4, t = lane % 4): of A [16, 16] the
// pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); of B [16, 8] the pairs (2t, g), (2t +
// 8, g); of C [16, 8] the elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/cuda/ptx/device.cuh"

namespace nanovllm {

__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four 8 x 8 matrices of bf16 from shared memory; lane i names row i % 8 of matrix i / 8, 16
/// bytes, aligned.
__device__ inline void load_matrices(uint32_t (&r)[4], const __nv_bfloat16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
/// The same from a place in shared memory.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
/// Two of them, of lanes 0 .. 15.
__device__ inline void load_two_matrices(uint32_t& r0, uint32_t& r1, const __nv_bfloat16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const __nv_bfloat16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

/// Two bf16 in one register, the first in the lower half.
__device__ inline uint32_t pack_bf16(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
/// They again.
__device__ inline float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

/// Two sums of the second half of k, rounded as those of the first are, and the first's: added, and
/// not rounded yet.
__device__ inline float2 add_halves(uint32_t first, float low, float high) {
  const uint32_t second = pack_bf16(low, high);
  return {low_of(first) + low_of(second), high_of(first) + high_of(second)};
}

/// A product in halves of k (WeightFormat::in_halves): the sums of the first, rounded, while those
/// of the second are made.
template <int n>
struct FirstHalf {
  uint32_t pair[n / 2];
  /// The second half's sums start from zero.
  __device__ void take(float (&sum)[n]) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      pair[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
      sum[2 * i] = sum[2 * i + 1] = 0.0f;
    }
  }
  /// The second half's sums, rounded, are added; what comes of it is not rounded yet.
  __device__ void add_to(float (&sum)[n]) const {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float2 both = add_halves(pair[i], sum[2 * i], sum[2 * i + 1]);
      sum[2 * i] = both.x, sum[2 * i + 1] = both.y;
    }
  }
};

/// 16 bytes from global to shared memory, asynchronously; zeros if not `valid` (then nothing is
/// read).
__device__ inline void copy_async(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global),
                 "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `pending` of this thread's groups are still under way.
template <int pending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/// Of n blocks of eight columns, of which lane t of four holds columns 2t and 2t + 1: lane t then
/// holds block t (n = 4: unit[i] of lane t becomes unit[t] of lane i), or columns t / 2 * 4 and on
/// of block t % 2 (n = 2).
template <int n>
__device__ void transpose_quad(uint32_t (&unit)[n]) {
  static_assert(n == 2 || n == 4);
#pragma unroll
  for (int step = 1; step < n; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (i & step) continue;
      const uint32_t got = __shfl_xor_sync(kFullMask, upper ? unit[i] : unit[i + step], step);
      (upper ? unit[i] : unit[i + step]) = got;
    }
  }
}

}  // namespace nanovllm
