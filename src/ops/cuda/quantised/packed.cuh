// Numbers of packed weights (packed.h) as bf16: w = bf16(scale * (q - zero)) in f32, exactly
// (docs/contract.md), by what is cheapest.
#pragma once

#include <type_traits>

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

__device__ inline uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
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
#if __CUDA_ARCH__ >= 890
  float scale;
  Unpack() = default;
  __device__ explicit Unpack(uint32_t word) { scale = __uint_as_float(word); }
  __device__ uint32_t pair(uint32_t two) const {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(two)));
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    return pack_bf16(__fmul_rn(both.x, scale), __fmul_rn(both.y, scale));
  }
  __device__ void operator()(uint32_t (&to)[4], uint32_t first, uint32_t second) const {
    to[0] = pair(first), to[1] = pair(first >> 16);
    to[2] = pair(second), to[3] = pair(second >> 16);
  }
#else
  // 2^120 times it, below 2^127 (kMostScale): a number is taken as f32 of the same fields, so much
  // too small.
  float scale;
  Unpack() = default;
  __device__ explicit Unpack(uint32_t word) { scale = __fmul_rn(__uint_as_float(word), 0x1p120f); }
  template <int i>
  __device__ float number(uint32_t word) const {
    const int top = static_cast<int>(word << (24 - 8 * i));
    return __fmul_rn(__uint_as_float(static_cast<uint32_t>(top >> 4) & 0x87f00000u), scale);
  }
  __device__ void operator()(uint32_t (&to)[4], uint32_t first, uint32_t second) const {
    to[0] = pack_bf16(number<0>(first), number<1>(first));
    to[1] = pack_bf16(number<2>(first), number<3>(first));
    to[2] = pack_bf16(number<0>(second), number<1>(second));
    to[3] = pack_bf16(number<2>(second), number<3>(second));
  }
#endif
};

/// Four bits without zero points. A pair's bits in place are numbers q + 8 of
/// bf16, times 2^-133 or 2^-129, subnormal ones included; a fused step rounds scale * (q + 8) - 8 *
/// scale once, for scales that have 8 significant bits and are below 2^-5.
struct CoarseUnpack {
  uint32_t first, second, offset;  // scale * 2^133, scale * 2^129, -8 * scale
  CoarseUnpack() = default;
  /// `word`: of scale.
  __device__ explicit CoarseUnpack(uint32_t word) {
    const uint32_t scale = __byte_perm(word, 0, 0x3232);
    first = scale + (133u << 7) * 0x10001u;
    second = scale + (129u << 7) * 0x10001u;
    offset = scale + (0x8000u + (3u << 7)) * 0x10001u;
  }
  __device__ static uint32_t pair(uint32_t word, uint32_t mask, uint32_t scale, uint32_t offset) {
    return of_pair(__hfma2(as_pair(word & mask), as_pair(scale), as_pair(offset)));
  }
  /// A lane's part of two steps, in four pairs.
  __device__ void operator()(uint32_t (&to)[4], uint32_t word, uint32_t) const {
#pragma unroll
    for (int i = 0; i < 2; ++i, word >>= 8) {
      to[2 * i] = pair(word, 0x000f000fu, first, offset);
      to[2 * i + 1] = pair(word, 0x00f000f0u, second, offset);
    }
  }
};

/// `coarse`: of a CoarseUnpack.
template <WeightFormat::Numbers packing, bool coarse>
using UnpackOf = std::conditional_t<coarse, CoarseUnpack, Unpack<packing>>;

/// The same of any scale and zero point. Of experts whose scales differ in kind some have words
/// with zero points in them.
template <WeightFormat::Numbers packing>
struct UnpackAny {
  float scale;
  int zero;
  UnpackAny() = default;
  __device__ UnpackAny(uint32_t word, int zero_point) {
    if (packing == WeightFormat::int4 && ((zero_point >> 6 ^ zero_point >> 7) & 1) != 0) {
      word &= 0xffffff00u;
      zero_point ^= kZeroInScale;
    }
    scale = __uint_as_float(word);
    zero = zero_point;
  }
  __device__ float number(uint32_t q) const {
    constexpr int kMiddle = packing == WeightFormat::int4 ? 8 : 128;
    return __fmul_rn(static_cast<float>(static_cast<int>(q) - kMiddle - zero), scale);
  }
  __device__ void operator()(uint32_t (&to)[4], uint32_t first, uint32_t second) const {
#pragma unroll
    for (int p = 0; p < 4; ++p)
      if constexpr (packing == WeightFormat::int4) {
        to[p] = pack_bf16(number(first >> (4 * p) & 15), number(first >> (16 + 4 * p) & 15));
      } else {
        const uint32_t two = (p < 2 ? first : second) >> (p % 2 * 16);
        to[p] = pack_bf16(number(two & 255), number(two >> 8 & 255));
      }
  }
};

// -- As tensor cores take them: A [16, 16] of mma.sync, or a warp's part of wgmma's --

/// A lane's part of a chunk, of kUnits eights of rows, as it is stored.
template <WeightFormat::Numbers packing, int kUnits>
struct PackedNumbers {
  static constexpr int kParts = WeightFormat(packing).bits() / 4;  // of 16 bytes
  uint4 parts[kUnits][kParts];
  uint32_t scales[kUnits];     // of the chunk, or its first group
  const unsigned char* words;  // of scale
  /// `records`: of the warp's units, `unit_bytes` apart.
  __device__ void load(const unsigned char* records, int unit_bytes, bool has_scales) {
    const int lane = threadIdx.x % kWarp;
    words = records + packed_number_bytes(packing) + lane / 4 * 4;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (has_scales) scales[u] = scale(unit_bytes, u, 0);
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        parts[u][p] = reinterpret_cast<const uint4*>(records + u * unit_bytes)[p * kWarp + lane];
    }
  }
  __device__ uint32_t scale(int unit_bytes, int unit, int group) const {
    return *reinterpret_cast<const uint32_t*>(words + unit * unit_bytes + group * kPackedRows * 4);
  }
  /// Word i of a lane's four or eight.
  template <int i>
  __device__ uint32_t word(int unit) const {
    return word_of(parts[unit][i / 4], i % 4);
  }
};

/// Two steps of a chunk, steps 2 quarter and 2 quarter + 1, as A.
template <int quarter, WeightFormat::Numbers packing, int kUnits, class Unpacker>
__device__ __forceinline__ void unpack_quarter(uint32_t (&a)[2][4],
                                               const PackedNumbers<packing, kUnits>& numbers,
                                               Unpacker (&unpack)[kUnits], int unit_bytes,
                                               int groups) {
  constexpr int kWords = WeightFormat(packing).bits() / 4;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if constexpr (quarter == 0) unpack[u] = Unpacker(numbers.scales[u]);
    if (quarter > 0 && groups * quarter % 4 == 0 && groups > 1)
      unpack[u] = Unpacker(numbers.scale(unit_bytes, u, groups * quarter / 4));
    uint32_t pairs[4];
    unpack[u](pairs, numbers.template word<quarter * kWords>(u),
              numbers.template word<quarter * kWords + kWords - 1>(u));
#pragma unroll
    for (int i = 0; i < 2; ++i) a[i][u] = pairs[2 * i], a[i][u + 2] = pairs[2 * i + 1];
  }
}

/// Where a lane stores two neighbouring columns of one row, of the rows `row` and `row` + 1; null
/// where there is none.
__device__ inline uint32_t* place_of_two(__nv_bfloat16* y, int64_t stride, int row, int rows,
                                         bool inside) {
  row += (threadIdx.x & 4) != 0;
  const int g = threadIdx.x % kWarp / 4;
  return inside && row < rows ? reinterpret_cast<uint32_t*>(y + row * stride + g / 2 * 2) : nullptr;
}
/// One value for each of two rows of x, in neighbouring columns of y for lanes with neighbouring g,
/// becomes what a lane stores there.
__device__ inline float2 two_of_row(float first, float second) {
  const bool odd = threadIdx.x & 4;
  const float got = __shfl_xor_sync(kFullMask, odd ? first : second, 4);
  return {odd ? got : first, odd ? second : got};
}
__device__ inline void store_two(__nv_bfloat16* y, int64_t stride, float first, float second,
                                 int row, int rows, bool inside) {
  const float2 sums = two_of_row(first, second);
  if (uint32_t* const to = place_of_two(y, stride, row, rows, inside))
    *to = pack_bf16(sums.x, sums.y);
}

}  // namespace nanovllm
