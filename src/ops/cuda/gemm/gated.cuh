// The gated activation without a branch at each element, for kernels that compute many at the end
// of a tile.
#pragma once

#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

constexpr uint32_t kMostPlain = 0x4270;  // 60 in bf16

/// a / b by one correction of an approximation: the bits of the division for silu's a and b and all
/// gates in bf16 of at most kMostPlain in size. (The division has a branch for the ends of float's
/// range.)
__device__ inline float plain_quotient(float a, float b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  const float q = a * r;
  return fmaf(r, fmaf(-b, q, a), q);
}

/// silu_times() of such gates.
__device__ inline float silu_times_plain(float gate, float up) {
  return copysignf(plain_quotient(gate, 1.0f + expf(-gate)), gate) * up;
}

/// silu_times() of any gate.
__device__ inline float silu_times_straight(float gate, float up) {
  constexpr float kScale = 0x1p-64f, kFar = -60.0f;  // kMostPlain
  const float b = 1.0f + expf(-gate), scale = gate < kFar ? kScale : 1.0f;
  float q = copysignf(plain_quotient(gate, b * scale) * scale, gate);
  q = b == 1.0f ? gate : q;           // infinity, too
  q = b > 3.4e38f ? 0.0f * gate : q;  // b is infinite: -0, or NaN for -infinity
  return q * up;
}

constexpr uint32_t kGateSizes = 0x7fff7fff;  // of a pair of bf16, what is left without signs

/// Whether gates whose largest sizes are `most`, a pair, are such.
__device__ inline bool are_plain_sizes(uint32_t most) {
  return max(most & 0xffff, most >> 16) <= kMostPlain;
}

/// Whether all of these gates, pairs of bf16, are such.
__device__ inline bool are_plain_gates(const uint4& gate) {
  return are_plain_sizes(
      __vmaxu2(__vimax3_u16x2(gate.x & kGateSizes, gate.y & kGateSizes, gate.z & kGateSizes),
               gate.w & kGateSizes));
}

/// silu_times() of eight gates: pairs of bf16, as the result. By a whole warp; anything where not
/// `needed`.
__device__ inline uint4 silu_times_vector(const uint4& gate, const uint4& up, bool needed) {
  const auto pairs = [&](auto f) {
    const auto pair = [&](uint32_t g, uint32_t u) {
      return pack_bf16(f(low_of(g), low_of(u)), f(high_of(g), high_of(u)));
    };
    return uint4{pair(gate.x, up.x), pair(gate.y, up.y), pair(gate.z, up.z), pair(gate.w, up.w)};
  };
  if (__all_sync(kFullMask, !needed || are_plain_gates(gate))) return pairs(silu_times_plain);
  return pairs(silu_times_straight);
}

}  // namespace nanovllm
