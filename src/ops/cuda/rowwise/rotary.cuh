// Shared by the kernels of rotary.cu, also with products that end as they do, and the one of them
// that steps of many tokens take.
#pragma once

#include "ops/cuda/ptx/e4m3.cuh"
#include "ops/cuda/ptx/mma.cuh"
#include "ops/cuda/rowwise/row_math.cuh"

namespace nanovllm {

constexpr int kWarpsPerBlock = 4;

/// [t, heads, d], strided.
template <class T>
struct Heads {
  T* data;
  int64_t token_stride, head_stride;
  int count;
  __device__ T* head(int64_t token, int head) const {
    return data + token * token_stride + head * head_stride;
  }
};

template <class T>
Heads<DeviceType<T>> heads_of(const Tensor& t) {
  return {device_ptr<T>(t), t.stride[0], t.stride[1], static_cast<int>(t.shape[1])};
}

template <class C>
using PagesOf = std::conditional_t<is_e4m3<C>, ScaledPages, Pages>;

/// C: of the cache's elements, T or E4m3.
template <class T, class C = T>
struct FusedArguments {
  Heads<T> q, k, v;
  const T *q_norm, *k_norm;
  float eps;
  const int *positions, *slots;
  const float* cos_sin;
  int64_t table_stride;
  C *k_cache, *v_cache;
  PagesOf<C> k_pages, v_pages;
  int64_t tokens;
  int d, half;
  bool wide;
  bool is_settled;  // positions and slots are there before the kernel before this one is done
};

inline void check_heads(const char* op, const Tensor& q, const Tensor& k, int64_t tokens) {
  check(q.rank == 3 && k.rank == 3 && q.shape[0] == tokens && k.shape[0] == tokens &&
            q.shape[2] == k.shape[2] && q.dtype == k.dtype && dense_last_axis(q) &&
            dense_last_axis(k),
        "{}: {} tokens, {} and {}", op, tokens, q.describe(), k.describe());
}

inline void check_stored(const KvCache& cache, const Tensor& k, const Tensor& v) {
  check_pages(cache);
  check(v.rank == 3 && k.shape == v.shape && k.shape[1] == cache.k.shape[1] &&
            k.shape[2] == cache.k.shape[3] &&
            (cache.k.dtype == k.dtype || cache.k.dtype == DType::e4m3) && v.dtype == k.dtype &&
            dense_last_axis(v),
        "store_kv: {} and {} into pages of {}", k.describe(), v.describe(), cache.k.describe());
}

inline void check_fused(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Batch& batch, const Tensor& cos_sin, const KvCache& cache) {
  const int64_t tokens = batch.positions.numel();
  check_heads(op, q, k, tokens);
  check_stored(cache, k, v);
  check(cos_sin.rank == 2 && cos_sin.shape[1] % 2 == 0 && cos_sin.shape[1] <= q.shape[2] &&
            batch.slot_mapping.numel() == tokens,
        "{}: {}, a table of {}, {} slots", op, q.describe(), cos_sin.describe(),
        batch.slot_mapping.numel());
}

/// Half of a cache that has elements of type C.
template <class C>
C* cache_ptr(const Tensor& half) {
  return reinterpret_cast<C*>(half.data);
}
/// Calls body.template operator()<C>() with the type of the elements of a cache of T or E4M3.
template <class T, class Body>
void dispatch_cache(const KvCache& cache, Body&& body) {
  if (cache.k.dtype == DType::e4m3)
    body.template operator()<E4m3>();
  else
    body.template operator()<DeviceType<T>>();
}

/// All but the norm.
template <class T, class C = DeviceType<T>>
FusedArguments<DeviceType<T>, C> fused_arguments(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Batch& batch, const Tensor& cos_sin,
                                                 const KvCache& cache) {
  return {.q = heads_of<T>(q),
          .k = heads_of<T>(k),
          .v = heads_of<T>(v),
          .q_norm = nullptr,
          .k_norm = nullptr,
          .eps = 0.0f,
          .positions = batch.positions.ptr<int32_t>(),
          .slots = batch.slot_mapping.ptr<int32_t>(),
          .cos_sin = cos_sin.ptr<float>(),
          .table_stride = cos_sin.stride[0],
          .k_cache = cache_ptr<C>(cache.k),
          .v_cache = cache_ptr<C>(cache.v),
          .k_pages = PagesOf<C>(cache.k, cache.k_scales),
          .v_pages = PagesOf<C>(cache.v, cache.v_scales),
          .tokens = batch.positions.numel(),
          .d = static_cast<int>(q.shape[2]),
          .half = static_cast<int>(cos_sin.shape[1] / 2),
          .wide = wide_rows({q, k, v, cache.k, cache.v, cos_sin}),
          .is_settled = false};
}

/// Stores a lane's vector, from element c on, of a row that `lanes` neighbours have, zeros past its
/// end. By all of them; not `valid`: nothing is stored.
template <class T, class C>
__device__ __forceinline__ void store_row(C* cache, const PagesOf<C>& pages, int slot, int head,
                                          int c, const Vec<T>& x, bool valid, unsigned lanes) {
  if constexpr (is_e4m3<C>) {
    const float most = most_of_lanes(most_of(x), lanes);
    if (!valid) return;
    const float scale = row_scale(most, pages.scale_of(head));
    E4m3* to = cache + pages.offset(slot, head) + c;
    const bool is_finite = scale == scale;
    if constexpr (Vec<T>::size == 8) {
      *reinterpret_cast<uint2*>(to) = is_finite ? quantise_eight(x, Divisor(scale)) : uint2{};
    } else {
      const uint32_t low = quantise_two(x.v[0], x.v[1], scale),
                     high = quantise_two(x.v[2], x.v[3], scale);
      *reinterpret_cast<uint32_t*>(to) = is_finite ? low | high << 16 : 0;
    }
    if (c == 0) *reinterpret_cast<float*>(cache + pages.scale_offset(slot, head)) = scale;
  } else if (valid) {
    store_whole(cache + pages.offset(slot, head) + c, x);
  }
}
/// Stores a row of d elements as E4M3, of any size. By a whole warp.
template <class T>
__device__ void store_whole_row(E4m3* cache, const ScaledPages& pages, int slot, int head,
                                const T* x, int64_t d) {
  const int lane = threadIdx.x % kWarp;
  float most = 0.0f;
  for (int64_t c = lane; c < d; c += kWarp) most = most_of(most, fabsf(to_float(x[c])));
  const float scale = row_scale(most_of_lanes<kWarp>(most), pages.scale_of(head));
  E4m3* to = cache + pages.offset(slot, head);
  for (int64_t c = lane; c < d; c += kWarp) {
    const uint32_t number = quantise_two(to_float(x[c]), 0.0f, scale) & 0xff;
    to[c].bits = static_cast<uint8_t>(scale == scale ? number : 0);
  }
  if (lane == 0) *reinterpret_cast<float*>(cache + pages.scale_offset(slot, head)) = scale;
}

/// Eight bf16, two in a register.
struct alignas(16) Words {
  uint32_t pair[4];
  __device__ static Words at(const __nv_bfloat16* p) {
    const uint4 u = *reinterpret_cast<const uint4*>(p);
    return {{u.x, u.y, u.z, u.w}};
  }
  __device__ float low(int i) const { return low_of(pair[i]); }
  __device__ float high(int i) const { return high_of(pair[i]); }
};

/// The rotation at a position of the elements from `c` on of a token's heads: those of both halves
/// turn by the same angles. `turned_back`: the sines of the first half change their sign.
template <class Arguments, int kParts>
__device__ __forceinline__ void load_turns(Vec<float> (&cosines)[kParts],
                                           Vec<float> (&sines)[kParts], const Arguments& a,
                                           int position, int c, bool turned_back = false) {
  const bool is_first = c < a.half;
  const float* table = a.cos_sin + position * a.table_stride + (is_first ? c : c - a.half);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    cosines[i] = load_vec(table + 4 * i, 4, true);
    sines[i] = load_vec(table + a.half + 4 * i, 4, true);
    if (turned_back && is_first)
#pragma unroll
      for (float& sine : sines[i].v) sine = -sine;
  }
}

/// The same of many tokens: a warp has all heads of its token, kLanes lanes to a head, and reads
/// angles and weights once for them. The arithmetic is that of row_math.cuh, two elements at a
/// time: a head's size is a power of two, so that multiplying by its inverse is dividing by it, and
/// the sine's sign is turned beforehand where the first half of a pair subtracts.
template <bool kNorm, int kLanes, class C>
struct TokenHeads {
  using T = __nv_bfloat16;
  static constexpr int kSize = 8, kHeads = kWarp / kLanes;
  const FusedArguments<T, C>& a;
  int64_t token;
  int c, head;  // the lane's first element, and the first of its heads
  int partner;
  bool turned;
  Vec<float> cosines[kSize / 4], sines[kSize / 4];

  __device__ explicit TokenHeads(const FusedArguments<T, C>& arguments, int64_t t)
      : a(arguments),
        token(t),
        c(static_cast<int>(threadIdx.x % kLanes) * kSize),
        head(static_cast<int>(threadIdx.x % kWarp) / kLanes),
        partner(static_cast<int>(threadIdx.x % kWarp) + (c < a.half ? a.half : -a.half) / kSize),
        turned(c < 2 * a.half) {}
  __device__ void load_angles() {
    if (turned) load_angles(a.positions[token]);
  }
  __device__ void load_angles(int position) {
    if (turned) load_turns(cosines, sines, a, position, c, true);
  }
  __device__ void normalise_words(Words& x, const Words& weights) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = __fmaf_rn(x.low(i), x.low(i), sum);
      sum = __fmaf_rn(x.high(i), x.high(i), sum);
    }
    const float mean = __fmul_rn(lane_sum(sum, kLanes), 1.0f / (kLanes * kSize)),
                reciprocal = __frsqrt_rn(__fadd_rn(mean, a.eps));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x.pair[i] = pack_bf16(x.low(i) * reciprocal, x.high(i) * reciprocal);
      x.pair[i] = pack_bf16(weights.low(i) * x.low(i), weights.high(i) * x.high(i));
    }
  }
  __device__ Words turn(Words x, const Words& weights) const {
    if (kNorm) normalise_words(x, weights);
    Words result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Words other;
      other.pair[i] = __shfl_sync(kFullMask, x.pair[i], partner);
      const float *cosine = cosines[i / 2].v + i % 2 * 2, *sine = sines[i / 2].v + i % 2 * 2;
      result.pair[i] =
          pack_bf16(__fmaf_rn(other.low(i), sine[0], __fmul_rn(x.low(i), cosine[0])),
                    __fmaf_rn(other.high(i), sine[1], __fmul_rn(x.high(i), cosine[1])));
    }
    return turned ? result : x;
  }
  /// The lane's parts of heads begin, begin + kHeads, ...; zeros past the last.
  template <int count>
  __device__ void load(Words (&x)[count], const Heads<T>& heads, int begin) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int h = begin + i * kHeads + head;
      x[i] = h < heads.count ? Words::at(heads.head(token, h) + c) : Words{};
    }
  }
  /// Brings all of `heads` through `change` to where target(head) says, or where each is quantised
  /// calls target(head, vector, whether there is such a head). `x`: the first of them.
  template <int count, class Change, class Target>
  __device__ void finish(Words (&x)[count], const Heads<T>& heads, Change&& change,
                         Target&& target) const {
    for (int begin = 0;;) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int h = begin + i * kHeads + head;
        const Words y = change(x[i]);
        if constexpr (std::is_invocable_v<Target, int>) {
          if (h < heads.count) store_whole(target(h) + c, reinterpret_cast<const Vec<T>&>(y));
        } else {
          target(h, reinterpret_cast<const Vec<T>&>(y), h < heads.count);
        }
      }
      begin += count * kHeads;
      if (begin >= heads.count) return;
      load(x, heads, begin);
    }
  }
};

/// Loads come as early as there are registers for them.
template <bool kNorm, int kLanes, class C>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    many_tokens_kernel(const FusedArguments<__nv_bfloat16, C> a) {
  let_next_start();
  wait_for_previous();
  const int64_t token = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarp;
  if (token >= a.tokens) return;
  TokenHeads<kNorm, kLanes, C> heads(a, token);
  Words q[8], k[4], v[4], q_weights, k_weights;
  heads.load(q, a.q, 0);
  heads.load(k, a.k, 0);
  heads.load(v, a.v, 0);
  const int slot = a.slots[token];
  if (kNorm) {
    q_weights = Words::at(a.q_norm + heads.c);
    k_weights = Words::at(a.k_norm + heads.c);
  }
  heads.load_angles();
  heads.finish(
      q, a.q, [&](const Words& x) { return heads.turn(x, q_weights); },
      [&](int h) { return a.q.head(token, h); });
  if (slot < 0) return;
  const auto turn_key = [&](const Words& x) { return heads.turn(x, k_weights); };
  const auto leave = [](const Words& x) { return x; };
  if constexpr (is_e4m3<C>) {
    const auto store = [&](C* cache, const PagesOf<C>& pages) {
      return [&, cache](int h, const Vec<__nv_bfloat16>& x, bool valid) {
        store_row(cache, pages, slot, h, heads.c, x, valid, kLanes);
      };
    };
    heads.finish(k, a.k, turn_key, store(a.k_cache, a.k_pages));
    heads.finish(v, a.v, leave, store(a.v_cache, a.v_pages));
  } else {
    heads.finish(k, a.k, turn_key, [&](int h) { return a.k_cache + a.k_pages.offset(slot, h); });
    heads.finish(v, a.v, leave, [&](int h) { return a.v_cache + a.v_pages.offset(slot, h); });
  }
}

/// Heads of q, k or v that a warp of some_tokens_kernel has.
constexpr int kHeadsAtOnce = 2;
__host__ __device__ constexpr int part_heads(int lanes) { return kHeadsAtOnce * kWarp / lanes; }
__host__ __device__ constexpr int parts_of(int heads, int lanes) {
  return (heads + part_heads(lanes) - 1) / part_heads(lanes);
}

/// The same of fewer tokens: a warp has a part of a token's heads, and loads what no kernel makes
/// before it waits. Grid: tokens by parts of q, k and v.
template <bool kNorm, int kLanes, class C>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    some_tokens_kernel(const FusedArguments<__nv_bfloat16, C> a) {
  let_next_start();
  const int part = static_cast<int>(blockIdx.y), q_parts = parts_of(a.q.count, kLanes),
            k_parts = parts_of(a.k.count, kLanes);
  const bool is_q = part < q_parts, is_k = !is_q && part < q_parts + k_parts, turns = is_q || is_k;
  const int first = part_heads(kLanes) * (part - (is_q ? 0 : is_k ? q_parts : q_parts + k_parts));
  const int64_t token = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarp;
  if (token >= a.tokens) return;
  TokenHeads<kNorm, kLanes, C> heads(a, token);
  const Heads<__nv_bfloat16>& mine = is_q ? a.q : is_k ? a.k : a.v;
  Words x[kHeadsAtOnce], weights{};
  int slot = -1;
  if (kNorm && turns) weights = Words::at((is_q ? a.q_norm : a.k_norm) + heads.c);
  const auto find_place = [&] {
    if (!is_q) slot = a.slots[token];
    if (turns) heads.load_angles();
  };
  if (a.is_settled) find_place();
  wait_for_previous();
  heads.load(x, mine, first);
  if (!a.is_settled) find_place();
  if (turns)
#pragma unroll
    for (Words& w : x) w = heads.turn(w, weights);
  if (!is_q && slot < 0) return;
#pragma unroll
  for (int i = 0; i < kHeadsAtOnce; ++i) {
    const int h = first + i * heads.kHeads + heads.head;
    const Vec<__nv_bfloat16>& part = reinterpret_cast<const Vec<__nv_bfloat16>&>(x[i]);
    if constexpr (is_e4m3<C>) {
      if (!is_q)
        store_row(is_k ? a.k_cache : a.v_cache, is_k ? a.k_pages : a.v_pages, slot, h, heads.c,
                  part, h < mine.count, kLanes);
      else if (h < mine.count)
        store_whole(a.q.head(token, h) + heads.c, part);
    } else {
      if (h >= mine.count) continue;
      __nv_bfloat16* target = is_q   ? a.q.head(token, h)
                              : is_k ? a.k_cache + a.k_pages.offset(slot, h)
                                     : a.v_cache + a.v_pages.offset(slot, h);
      store_whole(target + heads.c, part);
    }
  }
}

/// From so many tokens on, a warp for each keeps an H200 busy.
constexpr int64_t kManyTokens = 1024;

/// Null where another kernel is better; else with its grid.
template <bool kNorm, class T, class C>
auto tokens_kernel_for(const FusedArguments<T, C>& a, unsigned lanes, dim3& grid)
    -> void (*)(FusedArguments<T, C>) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if ((lanes != 16 && lanes != 8) || static_cast<int>(lanes) * Vec<T>::size != a.d)
      return nullptr;
    grid = {grid_size(ceil_div(a.tokens, int64_t{kWarpsPerBlock}))};
    if (a.tokens >= kManyTokens)
      return lanes == 16 ? many_tokens_kernel<kNorm, 16, C> : many_tokens_kernel<kNorm, 8, C>;
    const int each = static_cast<int>(lanes);
    grid.y = static_cast<unsigned>(parts_of(a.q.count, each) + parts_of(a.k.count, each) +
                                   parts_of(a.v.count, each));
    return lanes == 16 ? some_tokens_kernel<kNorm, 16, C> : some_tokens_kernel<kNorm, 8, C>;
  }
  return nullptr;
}

}  // namespace nanovllm
