// Sixteen floats at a time, in the vector extensions of GCC and Clang: one zmm, two ymm or four
// xmm/neon registers, whatever the instruction set this file is compiled for. Everything here is
// forced inline and in an unnamed namespace: a copy made for AVX-512 must never be the one that the
// linker keeps for everybody.
#define NANOVLLM_INLINE inline __attribute__((always_inline))

namespace {

using Vec = float __attribute__((vector_size(64)));
using VecI = int32_t __attribute__((vector_size(64)));
using VecU = uint32_t __attribute__((vector_size(64)));
using Vec8 = float __attribute__((vector_size(32)));
using Vec4 = float __attribute__((vector_size(16)));
using VecH = uint16_t __attribute__((vector_size(32)));
using VecB = int8_t __attribute__((vector_size(16)));

constexpr int64_t kLanes = 16;

NANOVLLM_INLINE Vec splat(float value) { return value - Vec{}; }

NANOVLLM_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
/// bf16 numbers as floats.
NANOVLLM_INLINE Vec widen(VecH h) {
#if defined(__AVX512BF16__)
  const VecU u =
      reinterpret_cast<VecU>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(h)));
#else
  const VecU u = __builtin_convertvector(h, VecU);
#endif
  return reinterpret_cast<Vec>(u << 16);
}
NANOVLLM_INLINE Vec load(const bf16* p) {
  VecH h;
  __builtin_memcpy(&h, p, sizeof h);
  return widen(h);
}
NANOVLLM_INLINE VecI widen(VecB b) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecI>(_mm512_maskz_cvtepi8_epi32(0xffff, reinterpret_cast<__m128i>(b)));
#elif defined(__AVX2__)
  using VecI8 = int32_t __attribute__((vector_size(32)));
  const auto bytes = reinterpret_cast<__m128i>(b);
  const auto low = reinterpret_cast<VecI8>(_mm256_cvtepi8_epi32(bytes)),
             high = reinterpret_cast<VecI8>(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  using VecS = int16_t __attribute__((vector_size(32)));
  return __builtin_convertvector(__builtin_convertvector(b, VecS), VecI);
#endif
}
/// The lowest bytes; left to itself, GCC moves them one by one.
NANOVLLM_INLINE VecB narrow(VecI v) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecB>(_mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(v)));
#else
  return __builtin_convertvector(v, VecB);
#endif
}
/// E4M3 numbers in bits 20 to 27 of the lanes, with their signs in those above.
NANOVLLM_INLINE Vec e4m3_numbers(VecI q) {
  return reinterpret_cast<Vec>(q & static_cast<int32_t>(0x87f00000u)) * 0x1p+120f;
}
NANOVLLM_INLINE Vec load(const E4m3* p) {
  VecB b;
  __builtin_memcpy(&b, p, sizeof b);
  return e4m3_numbers(widen(b) << 20);
}
/// Sixteen floats as the registers that they take, and sums of them. Loops carry sums so: GCC moves
/// a Vec of two registers through memory, in pieces that cannot be read back whole.
#if defined(__AVX2__) && !defined(__AVX512F__)
struct Sixteen {
  Vec8 low{}, high{};
};
NANOVLLM_INLINE Sixteen sixteen(Vec v) {
  return {__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
          __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)};
}
NANOVLLM_INLINE Sixteen sixteen(const float* p) {
  Sixteen v;
  __builtin_memcpy(&v.low, p, sizeof v.low);
  __builtin_memcpy(&v.high, p + 8, sizeof v.high);
  return v;
}
NANOVLLM_INLINE Sixteen sixteen(const bf16* p) {
  const auto half = [](const bf16* from) __attribute__((always_inline)) {
    __m128i h;
    __builtin_memcpy(&h, from, sizeof h);
    return reinterpret_cast<Vec8>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  };
  return {half(p), half(p + 8)};
}
NANOVLLM_INLINE Sixteen sixteen(const E4m3* p) { return sixteen(load(p)); }
struct Sum {
  Sixteen all;
  NANOVLLM_INLINE void add(float x, Sixteen v) {
    all.low += x * v.low;
    all.high += x * v.high;
  }
  NANOVLLM_INLINE void add(float x, Vec v) { add(x, sixteen(v)); }
  NANOVLLM_INLINE void add(Sixteen x, Sixteen v) {
    all.low += x.low * v.low;
    all.high += x.high * v.high;
  }
  NANOVLLM_INLINE void scale(float x) {
    all.low *= x;
    all.high *= x;
  }
  NANOVLLM_INLINE Vec get() const {
    return __builtin_shufflevector(all.low, all.high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
                                   14, 15);
  }
  NANOVLLM_INLINE void store(float* p) const {
    __builtin_memcpy(p, &all.low, sizeof all.low);
    __builtin_memcpy(p + 8, &all.high, sizeof all.high);
  }
};
#else
using Sixteen = Vec;
NANOVLLM_INLINE Sixteen sixteen(Vec v) { return v; }
template <class T>
NANOVLLM_INLINE Sixteen sixteen(const T* p) {
  return load(p);
}
struct Sum {
  Sixteen all{};
  NANOVLLM_INLINE void add(float x, Sixteen v) { all += x * v; }
  NANOVLLM_INLINE void add(Sixteen x, Sixteen v) { all += x * v; }
  NANOVLLM_INLINE void scale(float x) { all *= x; }
  NANOVLLM_INLINE Vec get() const { return all; }
  NANOVLLM_INLINE void store(float* p) const { __builtin_memcpy(p, &all, sizeof all); }
};
#endif
/// Sums that a loop carries at once: as many as the registers hold beside its operands.
#if defined(__AVX512F__)
constexpr int kSumsAtOnce = 16;
#else
constexpr int kSumsAtOnce = 4;
#endif

NANOVLLM_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
/// Of E4M3 numbers: their bits.
NANOVLLM_INLINE void store(E4m3* p, Vec v) {
  const VecI bits = reinterpret_cast<VecI>(v), sign = (bits >> 24) & 0x80;
  const Vec magnitude = reinterpret_cast<Vec>(bits & 0x7fffffff);
  const VecI normal = ((bits & 0x7fffffff) >> 20) - (120 << 3),
             subnormal = __builtin_convertvector(magnitude * 512.0f, VecI);
  const VecB b = narrow((magnitude < 0x1p-6f ? subnormal : normal) | sign);
  __builtin_memcpy(static_cast<void*>(p), &b, sizeof b);
}

/// Rounds to nearest even, as bf16(float) does, NaN included; beside AMX, which knows no subnormal
/// numbers, they become zero here as well.
NANOVLLM_INLINE VecH round_bf16(Vec v) {
#if defined(__AMX_BF16__)
  return reinterpret_cast<VecH>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v)));
#else
  const VecU u = reinterpret_cast<VecU>(v);
  const VecU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const VecU nan = (u >> 16) | 0x40u;
  return __builtin_convertvector((v == v) ? rounded : nan, VecH);
#endif
}
NANOVLLM_INLINE void store(bf16* p, Vec v) {
  const VecH h = round_bf16(v);
  __builtin_memcpy(static_cast<void*>(p), &h, sizeof h);
}
/// Both, one behind the other, by fewer instructions: the halves of words that are rounded in
/// place.
NANOVLLM_INLINE void store(bf16* p, Vec a, Vec b) {
#if defined(__AVX512BW__) && !defined(__AMX_BF16__)
  using Halves = uint16_t __attribute__((vector_size(64)));
  const auto rounded = [](Vec v) __attribute__((always_inline)) {
    const VecU u = reinterpret_cast<VecU>(v);
    return reinterpret_cast<Halves>((v == v) ? u + 0x7fffu + ((u >> 16) & 1u) : (u | 0x400000u));
  };
  const Halves all = __builtin_shufflevector(rounded(a), rounded(b), 1, 3, 5, 7, 9, 11, 13, 15, 17,
                                             19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45,
                                             47, 49, 51, 53, 55, 57, 59, 61, 63);
  __builtin_memcpy(static_cast<void*>(p), &all, sizeof all);
#else
  store(p, a);
  store(p + kLanes, b);
#endif
}

/// v as it reads back after being stored as T.
template <class T>
NANOVLLM_INLINE Vec rounded_to(Vec v) {
  if constexpr (sizeof(T) == 2)
    return widen(round_bf16(v));
  else
    return v;
}

/// The first `count` < 16 elements, zeros behind them.
template <class T>
NANOVLLM_INLINE Vec load_some(const T* p, int64_t count) {
  T part[kLanes];
  __builtin_memset(static_cast<void*>(part), 0, sizeof part);
  __builtin_memcpy(static_cast<void*>(part), p, static_cast<size_t>(count) * sizeof(T));
  return load(part);
}
template <class T>
NANOVLLM_INLINE void store_some(T* p, Vec v, int64_t count) {
  T part[kLanes];
  store(part, v);
  __builtin_memcpy(static_cast<void*>(p), part, static_cast<size_t>(count) * sizeof(T));
}

NANOVLLM_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }

/// Lanes i and i + 8, then i and i + 4, ...: the same tree as reduce16 below.
NANOVLLM_INLINE float sum(Vec v) {
  const Vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const Vec4 b =
      __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}
NANOVLLM_INLINE float max(Vec v) {
  const Vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
             b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), c = a > b ? a : b;
  const Vec4 d = __builtin_shufflevector(c, c, 0, 1, 2, 3),
             e = __builtin_shufflevector(c, c, 4, 5, 6, 7), f = d > e ? d : e;
  const float g = f[0] > f[2] ? f[0] : f[2], h = f[1] > f[3] ? f[1] : f[3];
  return g > h ? g : h;
}

/// The sums of sixteen vectors, as one vector; each sum is that of sum(), bit for bit, whatever its
/// place.
NANOVLLM_INLINE Vec reduce16(Vec* v) {
  for (int i = 0; i < 8; ++i)
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19,
                                   20, 21, 22, 23) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26,
                                   27, 28, 29, 30, 31);
  for (int i = 0; i < 4; ++i)
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19,
                                   24, 25, 26, 27) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22,
                                   23, 28, 29, 30, 31);
  for (int i = 0; i < 2; ++i)
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21,
                                   24, 25, 28, 29) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22,
                                   23, 26, 27, 30, 31);
  return __builtin_shufflevector(v[0], v[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                                 30) +
         __builtin_shufflevector(v[0], v[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29,
                                 31);
}

/// out[i] = sum(sums[i]), bit for bit.
NANOVLLM_INLINE void reduce(const Sum (&sums)[kSumsAtOnce], float* out) {
#if defined(__AVX512F__)
  Vec all[kSumsAtOnce];
  for (int i = 0; i < kSumsAtOnce; ++i) all[i] = sums[i].all;
  store(out, reduce16(all));
#elif defined(__AVX2__)
  Vec4 b[4];
  for (int i = 0; i < 4; ++i) {
    const Vec8 a = sums[i].all.low + sums[i].all.high;
    b[i] = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  }
  const auto pair = [](Vec4 x, Vec4 y) __attribute__((always_inline)) {
    return __builtin_shufflevector(x, y, 0, 1, 4, 5) + __builtin_shufflevector(x, y, 2, 3, 6, 7);
  };
  const Vec4 c = pair(b[0], b[1]), d = pair(b[2], b[3]),
             all = __builtin_shufflevector(c, d, 0, 2, 4, 6) +
                   __builtin_shufflevector(c, d, 1, 3, 5, 7);
  __builtin_memcpy(out, &all, sizeof all);
#else
  for (int i = 0; i < kSumsAtOnce; ++i) out[i] = sum(sums[i].all);
#endif
}

/// e^x within 2 ulp; 0 below -87.3 (no subnormals), +inf above 88.7; NaN stays NaN.
NANOVLLM_INLINE Vec exp(Vec x) {
  const Vec low = splat(-87.3f), high = splat(88.72f), infinite = splat(__builtin_inff());
#if defined(__AMX_BF16__)
  const Vec clamped = x;  // values beyond are left out below
#else
  const Vec clamped = x < low ? low : (x > high ? high : x);
#endif
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = clamped * 1.44269504f + magic;
  const Vec n = shifted - magic;
  const Vec r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Vec p = splat(1.9875691500e-4f);                                  // Cephes expf
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if defined(__AMX_BF16__)
  const __mmask16 normal =
      _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(low), _CMP_NLT_UQ);
  const Vec result = reinterpret_cast<Vec>(
      _mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
  return x > high ? infinite : result;
#else
  // 2^n in two halves: n reaches 128, which one exponent field cannot hold.
  const VecI exponent = __builtin_convertvector(n, VecI), half = exponent >> 1;
  const Vec result = p * reinterpret_cast<Vec>((half + 127) << 23) *
                     reinterpret_cast<Vec>((exponent - half + 127) << 23);
  return x < low ? Vec{} : (x > high ? infinite : (x == x ? result : x));
#endif
}

}  // namespace
