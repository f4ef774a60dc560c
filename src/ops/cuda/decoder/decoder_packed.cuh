// Eight elements of a row in registers, of the decoder layers' kernel, and row_math.cuh's
// arithmetic on them.
#pragma once

#include "ops/cuda/ptx/mma.cuh"
#include "ops/cuda/rowwise/row_math.cuh"

namespace nanovllm::decoder {

/// Eight elements in four registers; one by one, each would take a register.
struct __align__(16) Packed {
  uint32_t pair[4];
};
__device__ inline float2 unpack(uint32_t pair) { return {low_of(pair), high_of(pair)}; }

// The arithmetic of row_math.cuh, on pairs.

__device__ inline float add_squares(float sum, const Packed& x) {
#pragma unroll
  for (const uint32_t pair : x.pair) {
    const float2 value = unpack(pair);
    sum = __fmaf_rn(value.y, value.y, __fmaf_rn(value.x, value.x, sum));
  }
  return sum;
}
__device__ inline uint32_t normalised(uint32_t pair, float reciprocal, uint32_t weights) {
  const float2 value = unpack(pair), scale = unpack(weights);
  const float2 rounded = unpack(pack_bf16(value.x * reciprocal, value.y * reciprocal));
  return pack_bf16(scale.x * rounded.x, scale.y * rounded.y);
}
__device__ inline void normalise(Packed& x, float reciprocal, const Packed& weight) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.pair[i] = normalised(x.pair[i], reciprocal, weight.pair[i]);
}
__device__ inline void add(Packed& x, const Packed& more) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = unpack(x.pair[i]), b = unpack(more.pair[i]);
    x.pair[i] = pack_bf16(a.x + b.x, a.y + b.y);
  }
}

// Shared memory by its address there: of a pointer that is found early the compiler forgets that it
// points there, and access by such a pointer is slower.

__device__ inline Packed load_shared(uint32_t address) {
  Packed x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.pair[0]), "=r"(x.pair[1]), "=r"(x.pair[2]), "=r"(x.pair[3])
               : "r"(address)
               : "memory");
  return x;
}
__device__ inline void store_shared(uint32_t address, const Packed& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.pair[0]),
               "r"(x.pair[1]), "r"(x.pair[2]), "r"(x.pair[3])
               : "memory");
}
__device__ inline void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ inline void store_shared(uint32_t address, uint32_t first, uint32_t second) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second)
               : "memory");
}

/// Eight elements, read here and not where they are first needed: after a wait for other blocks.
__device__ inline Packed load_early(const __nv_bfloat16* p) {
  Packed x;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.pair[0]), "=r"(x.pair[1]), "=r"(x.pair[2]), "=r"(x.pair[3])
               : "l"(p));
  return x;
}

__device__ inline uint2 load_early_four(const __nv_bfloat16* p) {
  uint2 x;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
  return x;
}

}  // namespace nanovllm::decoder
