// FP8 E4M3: how rows become numbers and a scale (docs/contract.md has the definition), and how
// numbers become bf16 again.
#pragma once

#include <cuda_fp8.h>

#include "core/weight.h"
#include "ops/cuda/ptx/device.cuh"

namespace nanovllm {

/// A number of a KV cache.
struct E4m3 {
  uint8_t bits;
};
template <class C>
constexpr bool is_e4m3 = std::is_same_v<C, E4m3>;

/// The scale of what has `most` as its largest magnitude; NaN where that is not finite.
__device__ inline float row_scale(float most) {
  return most <= 0x1.fffffep127f ? __fdiv_rn(fmaxf(most, kLeastMagnitude), 448.0f)
                                 : __int_as_float(0x7fffffff);
}
/// The same where, not 0, `fixed` is the scale of all rows.
__device__ inline float row_scale(float most, float fixed) {
  const float own = row_scale(most);
  return fixed != 0.0f && own == own ? fixed : own;
}
/// The largest magnitude; NaN if one of them is.
__device__ inline float most_of(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
template <class T>
__device__ float most_of(const Vec<T>& v) {
  float most = 0.0f;
#pragma unroll
  for (const T& x : v.v) most = most_of(most, fabsf(to_float(x)));
  return most;
}
/// Over `lanes` neighbours, a power of two.
__device__ __forceinline__ float most_of_lanes(float most, unsigned lanes) {
  for (unsigned offset = lanes / 2; offset > 0; offset /= 2)
    most = most_of(most, __shfl_xor_sync(kFullMask, most, static_cast<int>(offset)));
  return most;
}
/// `mask`: the warp's lanes that take part.
template <int lanes>
__device__ float most_of_lanes(float most, unsigned mask = kFullMask) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    most = most_of(most, __shfl_xor_sync(mask, most, offset));
  return most;
}

/// Two numbers, the first in the lower byte.
__device__ inline uint32_t quantise_two(float first, float second, float scale) {
  return __nv_cvt_float2_to_fp8x2({__fdiv_rn(first, scale), __fdiv_rn(second, scale)},
                                  __NV_SATFINITE, __NV_E4M3);
}

/// Quotients of bf16 numbers by one scale, of at least kLeastMagnitude / 448 and less than 2^126: a
/// product with the rounded reciprocal, and one correction by its remainder, which is exact. They
/// are correctly rounded: those of all mantissas of a bf16 number and of a scale are. One far
/// beyond 448, as it may be where a scale is fixed, stays as it is.
struct Divisor {
  float up, scale, reciprocal;
  __device__ explicit Divisor(float s) {
    up = s < 0x1p-60f ? 0x1p64f : 1.0f;
    scale = s * up;
    reciprocal = __fdiv_rn(1.0f, scale);
  }
  __device__ float divide(float x) const {
    x *= up;
    const float quotient = x * reciprocal;  // zero keeps its sign
    return fabsf(quotient) < 1024.0f
               ? __fmaf_rn(__fmaf_rn(quotient, scale, -x), -reciprocal, quotient)
               : quotient;
  }
};
__device__ inline uint32_t quantise_two(float first, float second, const Divisor& by) {
  return __nv_cvt_float2_to_fp8x2({by.divide(first), by.divide(second)}, __NV_SATFINITE, __NV_E4M3);
}
__device__ inline uint2 quantise_eight(const Vec<__nv_bfloat16>& v, const Divisor& by) {
  uint32_t two[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    two[i] = quantise_two(to_float(v.v[2 * i]), to_float(v.v[2 * i + 1]), by);
  return {two[0] | two[1] << 16, two[2] | two[3] << 16};
}

/// The value of one number.
__device__ inline float to_float(E4m3 x) {
  // As f32 of the same fields, 2^120 too small.
  return __fmul_rn(__uint_as_float((x.bits & 0x80u) << 24 | (x.bits & 0x7fu) << 20), 0x1p120f);
}
/// Four numbers as bf16: the first and the third, the second and the fourth. Any bits give finite
/// numbers.
__device__ inline void widen_e4m3(uint32_t four, uint32_t& even, uint32_t& odd) {
  // As bf16 of the same fields, 2^120 too small.
  const auto times = [](uint32_t x) {
    constexpr uint32_t kFactors = 0x7b807b80;
    const __nv_bfloat162 product = __hmul2_rn(reinterpret_cast<const __nv_bfloat162&>(x),
                                              reinterpret_cast<const __nv_bfloat162&>(kFactors));
    return reinterpret_cast<const uint32_t&>(product);
  };
  even = times((four << 4 & 0x07f007f0) | (four << 8 & 0x80008000));
  odd = times((four >> 4 & 0x07f007f0) | (four & 0x80008000));
}
/// Two registers of bf16 pairs, elements 0 to 3, in the order of widen_e4m3().
__device__ inline void in_widened_order(uint2 pairs, uint32_t& even, uint32_t& odd) {
  even = __byte_perm(pairs.x, pairs.y, 0x5410);
  odd = __byte_perm(pairs.x, pairs.y, 0x7632);
}

/// The weight of a key for its value's numbers, which `scale` belongs to: what lies in a slot that
/// no row sees must not meet a zero.
__device__ inline float scaled_weight(float weight, float scale) {
  return weight == 0.0f ? 0.0f : __fmul_rn(weight, scale);
}

}  // namespace nanovllm
