// Numbers of packed weights (packed.h) as bf16: w = bf16(scale * (q - zero)) in f32, exactly
// (docs/contract.md), by what is cheapest.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/ptx/mma.cuh"
#include "ops/cuda/quantised/packed.h"

namespace nanovllm {

__device__ inline __nv_bfloat162 as_pair(uint32_t x) {
  return *reinterpret_cast<const __nv_bfloat162*>(&x);
}
__device__ inline uint32_t of_pair(__nv_bfloat162 x) {
  return *reinterpret_cast<const uint32_t*>(&x);
}

/// A row's numbers in a group of columns, as bf16. `word`: of scale.
template <WeightFormat::Numbers>
struct Unpack;

/// The scale has at most 12 significant bits, of which bf16 holds the upper eight; the lowest eight
/// bits of its word are the zero point. q - zero is exact in bf16, its product with the scale's
/// lower bits (three of an f16 scale, none of a bf16 one) too, and a fused step rounds once.
template <>
struct Unpack<WeightFormat::int4> {
  __nv_bfloat162 high, low, zero;
  Unpack() = default;
  __device__ explicit Unpack(uint32_t word) {
    const float lower = __uint_as_float(word & 0xffffff00u) - __uint_as_float(word & 0xffff0000u);
    high = as_pair(__byte_perm(word, 0, 0x3232));
    low = as_pair(__byte_perm(__float_as_uint(lower), 0, 0x3232));
    zero = as_pair(__byte_perm(word, 0x43, 0x4040));
  }
  /// 128 + q is bits 0x4300 | q.
  __device__ uint32_t pair(uint32_t word) const {
    uint32_t bits;  // of one instruction
    asm("lop3.b32 %0, %1, %2, %3, 0xea;"
        : "=r"(bits)
        : "r"(word), "r"(0x000f000f), "r"(0x43004300));
    const __nv_bfloat162 q = __hsub2(as_pair(bits), zero);
    return of_pair(__hfma2(high, q, __hmul2(low, q)));
  }
  /// A lane's part of two steps, in four pairs.
  __device__ void operator()(uint32_t (&to)[4], uint32_t word, uint32_t) const {
#pragma unroll
    for (int p = 0; p < 4; ++p) to[p] = pair(word >> (4 * p));
  }
};

template <>
struct Unpack<WeightFormat::int8> {
  float scale;
  Unpack() = default;
  __device__ explicit Unpack(uint32_t word) { scale = __uint_as_float(word); }
  /// 2^23 + 128 + q is bits 0x4b000000 | (q + 128), as which q is stored.
  template <int i>
  __device__ float number(uint32_t word) const {
    return __fmul_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)) - 8388736.0f,
                     scale);
  }
  /// The same of two words.
  __device__ void operator()(uint32_t (&to)[4], uint32_t first, uint32_t second) const {
    to[0] = pack_bf16(number<0>(first), number<1>(first));
    to[1] = pack_bf16(number<2>(first), number<3>(first));
    to[2] = pack_bf16(number<0>(second), number<1>(second));
    to[3] = pack_bf16(number<2>(second), number<3>(second));
  }
};

template <>
struct Unpack<WeightFormat::e4m3> {
  float scale;
  Unpack() = default;
  __device__ explicit Unpack(uint32_t word) { scale = __uint_as_float(word); }
  __device__ uint32_t pair(uint32_t two) const {
    float first, second;
#if __CUDA_ARCH__ >= 890
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(two)));
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    first = both.x, second = both.y;
#else
    // As f32 of the same fields, 2^120 too small.
    const auto number = [](uint32_t q) {
      return __fmul_rn(__uint_as_float((q & 0x80) << 24 | (q & 0x7f) << 20), 0x1p120f);
    };
    first = number(two & 0xff), second = number(two >> 8 & 0xff);
#endif
    return pack_bf16(__fmul_rn(first, scale), __fmul_rn(second, scale));
  }
  __device__ void operator()(uint32_t (&to)[4], uint32_t first, uint32_t second) const {
    to[0] = pair(first), to[1] = pair(first >> 16);
    to[2] = pair(second), to[3] = pair(second >> 16);
  }
};

}  // namespace nanovllm
