// Tensor core steps of 8-bit numbers: mma.sync m16n8k32. A lane (g = lane / 4, t = lane % 4) holds
// of A [16, 32] four numbers each from (g, 4t), (g + 8, 4t), (g, 4t + 16) and (g + 8, 4t + 16), of
// B [32, 8] from (4t, g) and (4t + 16, g): what ldmatrix gives of rows of bytes; of C what mma.cuh
// has.
#pragma once

#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

/// Integers from -128 to 127.
__device__ inline void mma_m16n8k32(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// E4M3 numbers; code for sm_89 or newer.
__device__ inline void mma_m16n8k32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
#if __CUDA_ARCH__ >= 890
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  (void)a, (void)b0, (void)b1;
  c[0] = c[1] = c[2] = c[3] = 0.0f;
  __trap();  // such a GPU keeps no weight that would come here (CudaBackend::keeps)
#endif
}

/// Four matrices of eight rows of 16 bytes; `place`: in shared memory, lane i's is row i % 8 of
/// matrix i / 8.
__device__ inline void load_byte_rows(uint32_t (&r)[4], uint32_t place) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(place)
               : "memory");
}

/// An 8 x 8 matrix of bf16, of which lane l has a pair of row l / 4, transposed.
__device__ inline uint32_t transposed(uint32_t pair) {
  uint32_t other;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

}  // namespace nanovllm
