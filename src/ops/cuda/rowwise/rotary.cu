// Rotary embedding, the store into the paged cache, and both with the q/k norm before them in one
// kernel. One warp has one head of one token, or as many heads as fit it; of usual sizes, several
// heads of one token, of many tokens all (rotary.cuh).
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/rowwise/rotary.cuh"

namespace nanovllm {
namespace {

constexpr int64_t kMaxFusedHeadDim = 256;

/// The head and the token of this warp, among `heads` of them; false past the end.
__device__ bool my_head(int64_t tokens, int heads, int64_t& token, int& head) {
  const unsigned index = blockIdx.x * kWarpsPerBlock + threadIdx.x / kWarp,
                 count = static_cast<unsigned>(heads);
  token = index / count;
  head = static_cast<int>(index % count);
  return token < tokens;
}

dim3 grid_for(int64_t tokens, int64_t heads) {
  return {grid_size(ceil_div(tokens * heads, kWarpsPerBlock))};
}

template <class T>
__global__ void rotary_kernel(Heads<T> q, Heads<T> k, const int* positions, const float* cos_sin,
                              int64_t table_stride, int half, int64_t tokens) {
  let_next_start();
  wait_for_previous();
  int64_t token;
  int head;
  if (!my_head(tokens, q.count + k.count, token, head)) return;
  T* x = head < q.count ? q.head(token, head) : k.head(token, head - q.count);
  const float* table = cos_sin + positions[token] * table_stride;
  for (int i = threadIdx.x % kWarp; i < half; i += kWarp) {
    const Pair turned = rotate(to_float(x[i]), to_float(x[i + half]), table[i], table[half + i]);
    x[i] = round_to<T>(turned.first);
    x[i + half] = round_to<T>(turned.second);
  }
}

template <class T, class C>
__global__ void store_kv_kernel(C* k_cache, PagesOf<C> k_pages, C* v_cache, PagesOf<C> v_pages,
                                Heads<T> k, Heads<T> v, const int* slots, int64_t d, int64_t tokens,
                                bool wide) {
  let_next_start();
  wait_for_previous();
  int64_t token;
  int head;
  if (!my_head(tokens, k.count, token, head)) return;
  const int slot = slots[token];
  if (slot < 0) return;
  if constexpr (is_e4m3<C>) {
    store_whole_row(k_cache, k_pages, slot, head, k.head(token, head), d);
    store_whole_row(v_cache, v_pages, slot, head, v.head(token, head), d);
  } else {
    T *k_target = k_cache + k_pages.offset(slot, head),
      *v_target = v_cache + v_pages.offset(slot, head);
    for (int64_t c = threadIdx.x % kWarp * Vec<T>::size; c < d; c += kWarp * Vec<T>::size) {
      store_vec(k_target + c, load_vec(k.head(token, head) + c, d - c, wide), d - c, wide);
      store_vec(v_target + c, load_vec(v.head(token, head) + c, d - c, wide), d - c, wide);
    }
  }
}

/// Warps of q heads normalise and rotate; those of k heads store the result as well; those of v
/// heads only store.
template <class T, class C>
__global__ void qk_norm_rope_store_kernel(const FusedArguments<T, C> a) {
  __shared__ T normalised[kWarpsPerBlock]
                         [kMaxFusedHeadDim];  // an element and its partner are in different lanes
  let_next_start();
  wait_for_previous();
  int64_t token;
  int head;
  if (!my_head(a.tokens, a.q.count + a.k.count + a.v.count, token, head)) return;
  const int lane = threadIdx.x % kWarp;
  const int slot = a.slots[token];
  const bool is_q = head < a.q.count, is_k = !is_q && head < a.q.count + a.k.count;
  if (!is_q && !is_k) {
    const int h = head - a.q.count - a.k.count;
    if (slot < 0) return;
    if constexpr (is_e4m3<C>) {
      store_whole_row(a.v_cache, a.v_pages, slot, h, a.v.head(token, h), a.d);
    } else {
      T* target = a.v_cache + a.v_pages.offset(slot, h);
      for (int c = lane * Vec<T>::size; c < a.d; c += kWarp * Vec<T>::size)
        store_vec(target + c, load_vec(a.v.head(token, h) + c, a.d - c, a.wide), a.d - c, a.wide);
    }
    return;
  }
  const int h = is_q ? head : head - a.q.count;
  T* x = is_q ? a.q.head(token, h) : a.k.head(token, h);
  const T* weights = is_q ? a.q_norm : a.k_norm;
  T* values = normalised[threadIdx.x / kWarp];
  float sum = 0.0f;
  for (int c = lane * Vec<T>::size; c < a.d; c += kWarp * Vec<T>::size)
    sum = add_squares(sum, load_vec(x + c, a.d - c, a.wide));
  const float reciprocal = reciprocal_rms(warp_sum(sum), a.d, a.eps);
  for (int c = lane; c < a.d; c += kWarp) values[c] = normalise(x[c], reciprocal, weights[c]);
  __syncwarp();
  const float* table = a.cos_sin + a.positions[token] * a.table_stride;
  for (int i = lane; i < a.half; i += kWarp) {
    const Pair turned =
        rotate(to_float(values[i]), to_float(values[i + a.half]), table[i], table[a.half + i]);
    values[i] = round_to<T>(turned.first);
    values[i + a.half] = round_to<T>(turned.second);
  }
  __syncwarp();
  if constexpr (is_e4m3<C>) {
    for (int c = lane; c < a.d; c += kWarp) x[c] = values[c];
    if (is_k && slot >= 0) store_whole_row(a.k_cache, a.k_pages, slot, h, values, a.d);
  } else {
    T* stored = is_k && slot >= 0 ? a.k_cache + a.k_pages.offset(slot, h) : nullptr;
    for (int c = lane; c < a.d; c += kWarp) {
      x[c] = values[c];
      if (stored) stored[c] = values[c];
    }
  }
}

/// The same, with or without the norm, for heads that fit one vector per lane: a head stays in the
/// registers of `lanes` lanes (a power of two), so that a warp may have several heads. Sums run
/// over the lanes in the order of warp_sum(), whose other lanes would add zeros.
template <class T, bool kNorm, class C>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    rope_store_kernel(const FusedArguments<T, C> a, unsigned lanes) {
  constexpr int kSize = Vec<T>::size;
  let_next_start();
  const unsigned heads = static_cast<unsigned>(a.q.count + a.k.count + a.v.count),
                 index = blockIdx.x * (kWarpsPerBlock * kWarp / lanes) + threadIdx.x / lanes;
  const int64_t token = index / heads;
  const int head = static_cast<int>(index % heads),
            c = static_cast<int>(threadIdx.x % lanes) * kSize;
  const bool is_q = head < a.q.count, is_k = !is_q && head < a.q.count + a.k.count,
             mine = token < a.tokens && c < a.d;
  const int h = is_q ? head : is_k ? head - a.q.count : head - a.q.count - a.k.count;
  Vec<T> weights{};
  if (kNorm && mine && (is_q || is_k))
    weights = load_vec((is_q ? a.q_norm : a.k_norm) + c, kSize, true);
  Vec<float> cosines[kSize / 4], sines[kSize / 4];
  int slot = -1;
  // The element's partner is `half` away: whole vectors, so in the same place of another lane.
  const bool turned = mine && (is_q || is_k) && c < 2 * a.half, is_first = c < a.half;
  const auto find_place = [&] {
    if (mine && !is_q) slot = a.slots[token];
    if (turned) load_turns(cosines, sines, a, a.positions[token], c);
  };
  if (a.is_settled) find_place();
  wait_for_previous();
  Vec<T> x{};
  T* source = nullptr;
  if (mine) {
    source = (is_q ? a.q : is_k ? a.k : a.v).head(token, h) + c;
    x = load_vec(source, kSize, true);
  }
  if (!a.is_settled) find_place();
  if (kNorm) {
    const float reciprocal = reciprocal_rms(lane_sum(add_squares(0.0f, x), lanes), a.d, a.eps);
    if (is_q || is_k)
#pragma unroll
      for (int i = 0; i < kSize; ++i) x.v[i] = normalise(x.v[i], reciprocal, weights.v[i]);
  }
  const int partner = static_cast<int>(threadIdx.x) % kWarp + (is_first ? a.half : -a.half) / kSize;
  Vec<T> result = x;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float own = to_float(x.v[i]), other = __shfl_sync(kFullMask, own, partner);
    if (!turned) continue;
    const float cosine = cosines[i / 4].v[i % 4], sine = sines[i / 4].v[i % 4];
    result.v[i] = round_to<T>(is_first ? rotate(own, other, cosine, sine).first
                                       : rotate(other, own, cosine, sine).second);
  }
  if constexpr (is_e4m3<C>) {
    if (mine && is_q) store_vec(source, result, kSize, true);
    store_row(is_k ? a.k_cache : a.v_cache, is_k ? a.k_pages : a.v_pages, slot, h, c, result,
              mine && !is_q && slot >= 0, lanes);
  } else {
    if (!mine) return;
    if (is_q)
      store_vec(source, result, kSize, true);
    else if (slot >= 0)
      store_vec(
          (is_k ? a.k_cache + a.k_pages.offset(slot, h) : a.v_cache + a.v_pages.offset(slot, h)) +
              c,
          result, kSize, true);
  }
}

/// How many lanes a head takes in rope_store_kernel, or 0 where it needs the general kernels.
template <class T, class C>
unsigned lanes_of_head(const FusedArguments<T, C>& a) {
  constexpr int kSize = Vec<T>::size;
  if (!a.wide || a.d % kSize != 0 || a.half % kSize != 0 || a.d > kWarp * kSize) return 0;
  unsigned lanes = 1;
  while (static_cast<int>(lanes) * kSize < a.d) lanes *= 2;
  return lanes;
}

template <class T, class C>
dim3 grid_of_lanes(const FusedArguments<T, C>& a, unsigned lanes) {
  const int64_t heads = a.q.count + a.k.count + a.v.count;
  return {grid_size(ceil_div(a.tokens * heads * lanes, kWarpsPerBlock * kWarp))};
}

}  // namespace

void CudaBackend::rotary_embedding(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) {
  const int64_t tokens = positions.numel(), rotary_dim = cos_sin.shape[1];
  check_heads("rotary_embedding", q, k, tokens);
  check(cos_sin.rank == 2 && rotary_dim % 2 == 0 && rotary_dim <= q.shape[2],
        "rotary_embedding: a table of {} for {}", cos_sin.describe(), q.describe());
  dispatch_float(q.dtype, [&]<class T>() {
    launch_early(rotary_kernel<DeviceType<T>>, grid_for(tokens, q.shape[1] + k.shape[1]),
                 kWarpsPerBlock * kWarp, 0, heads_of<T>(q), heads_of<T>(k),
                 positions.ptr<int32_t>(), cos_sin.ptr<float>(), cos_sin.stride[0],
                 static_cast<int>(rotary_dim / 2), tokens);
  });
}

void CudaBackend::store_kv(KvCache cache, Tensor k, Tensor v, Tensor slot_mapping) {
  const int64_t tokens = slot_mapping.numel();
  check_heads("store_kv", k, v, tokens);
  check_stored(cache, k, v);
  dispatch_float(k.dtype, [&]<class T>() {
    dispatch_cache<T>(cache, [&]<class C>() {
      launch_early(
          store_kv_kernel<DeviceType<T>, C>, grid_for(tokens, k.shape[1]), kWarpsPerBlock * kWarp,
          0, cache_ptr<C>(cache.k), PagesOf<C>(cache.k, cache.k_scales), cache_ptr<C>(cache.v),
          PagesOf<C>(cache.v, cache.v_scales), heads_of<T>(k), heads_of<T>(v),
          slot_mapping.ptr<int32_t>(), k.shape[2], tokens, wide_rows({k, v, cache.k, cache.v}));
    });
  });
}

void CudaBackend::rope_store(Tensor q, Tensor k, Tensor v, const Batch& batch, Tensor cos_sin,
                             KvCache cache) {
  check_fused("rope_store", q, k, v, batch, cos_sin, cache);
  dispatch_float(q.dtype, [&]<class T>() {
    dispatch_cache<T>(cache, [&]<class C>() {
      FusedArguments<DeviceType<T>, C> a = fused_arguments<T, C>(q, k, v, batch, cos_sin, cache);
      a.is_settled = is_settled(batch);
      const unsigned lanes = lanes_of_head(a);
      if (lanes == 0) return Backend::rope_store(q, k, v, batch, cos_sin, cache);
      dim3 grid;
      if (const auto kernel = tokens_kernel_for<false>(a, lanes, grid))
        return launch_early(kernel, grid, kWarpsPerBlock * kWarp, 0, a);
      launch_early(rope_store_kernel<DeviceType<T>, false, C>, grid_of_lanes(a, lanes),
                   kWarpsPerBlock * kWarp, 0, a, lanes);
    });
  });
}

void CudaBackend::qk_norm_rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm,
                                     float eps, const Batch& batch, Tensor cos_sin, KvCache cache) {
  check_fused("qk_norm_rope_store", q, k, v, batch, cos_sin, cache);
  const int64_t d = q.shape[2];
  check(q_norm.numel() == d && k_norm.numel() == d && q_norm.dtype == q.dtype &&
            k_norm.dtype == q.dtype,
        "qk_norm_rope_store: {} with weights {} and {}", q.describe(), q_norm.describe(),
        k_norm.describe());
  if (d > kMaxFusedHeadDim)
    return Backend::qk_norm_rope_store(q, k, v, q_norm, k_norm, eps, batch, cos_sin, cache);
  dispatch_float(q.dtype, [&]<class T>() {
    dispatch_cache<T>(cache, [&]<class C>() {
      FusedArguments<DeviceType<T>, C> a = fused_arguments<T, C>(q, k, v, batch, cos_sin, cache);
      a.q_norm = device_ptr<T>(q_norm);
      a.k_norm = device_ptr<T>(k_norm);
      a.eps = eps;
      a.is_settled = is_settled(batch);
      const unsigned lanes = wide_rows({q_norm, k_norm}) ? lanes_of_head(a) : 0;
      dim3 grid;
      if (const auto kernel = tokens_kernel_for<true>(a, lanes, grid))
        launch_early(kernel, grid, kWarpsPerBlock * kWarp, 0, a);
      else if (lanes > 0)
        launch_early(rope_store_kernel<DeviceType<T>, true, C>, grid_of_lanes(a, lanes),
                     kWarpsPerBlock * kWarp, 0, a, lanes);
      else
        launch_early(qk_norm_rope_store_kernel<DeviceType<T>, C>,
                     grid_for(a.tokens, q.shape[1] + 2 * k.shape[1]), kWarpsPerBlock * kWarp, 0, a);
    });
  });
}

}  // namespace nanovllm
