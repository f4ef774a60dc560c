// Rotary embedding, the store into the paged cache, and both with the q/k norm before them in one
// kernel. One warp has one head of one token.
#include "ops/cuda/cuda_backend.h"
#include "ops/cuda/row_math.cuh"

namespace nanovllm {
namespace {

constexpr int kWarpsPerBlock = 4;
constexpr int64_t kMaxFusedHeadDim = 256;

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

/// Which head of which token this warp has, among `heads` of them; false past the end.
__device__ bool my_head(int64_t tokens, int heads, int64_t& token, int& head) {
  const int64_t index = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarp;
  token = index / heads;
  head = static_cast<int>(index % heads);
  return token < tokens;
}

dim3 grid_for(int64_t tokens, int64_t heads) {
  return {grid_size(ceil_div(tokens * heads, kWarpsPerBlock))};
}

template <class T>
__global__ void rotary_kernel(Heads<T> q, Heads<T> k, const int* positions, const float* cos_sin,
                              int64_t table_stride, int half, int64_t tokens) {
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

template <class T>
__global__ void store_kv_kernel(T* k_cache, Pages k_pages, T* v_cache, Pages v_pages, Heads<T> k,
                                Heads<T> v, const int* slots, int64_t d, int64_t tokens,
                                bool wide) {
  int64_t token;
  int head;
  if (!my_head(tokens, k.count, token, head)) return;
  const int slot = slots[token];
  if (slot < 0) return;
  T *k_target = k_cache + k_pages.offset(slot, head),
    *v_target = v_cache + v_pages.offset(slot, head);
  for (int64_t c = threadIdx.x % kWarp * Vec<T>::size; c < d; c += kWarp * Vec<T>::size) {
    store_vec(k_target + c, load_vec(k.head(token, head) + c, d - c, wide), d - c, wide);
    store_vec(v_target + c, load_vec(v.head(token, head) + c, d - c, wide), d - c, wide);
  }
}

template <class T>
struct FusedArguments {
  Heads<T> q, k, v;
  const T *q_norm, *k_norm;
  float eps;
  const int *positions, *slots;
  const float* cos_sin;
  int64_t table_stride;
  T *k_cache, *v_cache;
  Pages k_pages, v_pages;
  int64_t tokens;
  int d, half;
  bool wide;
};

/// Warps of q heads normalise and rotate; those of k heads store the result as well; those of v
/// heads only store.
template <class T>
__global__ void qk_norm_rope_store_kernel(const FusedArguments<T> a) {
  __shared__ T normalised[kWarpsPerBlock]
                         [kMaxFusedHeadDim];  // an element and its partner are in different lanes
  int64_t token;
  int head;
  if (!my_head(a.tokens, a.q.count + a.k.count + a.v.count, token, head)) return;
  const int lane = threadIdx.x % kWarp;
  const int slot = a.slots[token];
  const bool is_q = head < a.q.count, is_k = !is_q && head < a.q.count + a.k.count;
  if (!is_q && !is_k) {
    const int h = head - a.q.count - a.k.count;
    if (slot < 0) return;
    T* target = a.v_cache + a.v_pages.offset(slot, h);
    for (int c = lane * Vec<T>::size; c < a.d; c += kWarp * Vec<T>::size)
      store_vec(target + c, load_vec(a.v.head(token, h) + c, a.d - c, a.wide), a.d - c, a.wide);
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
  T* stored = is_k && slot >= 0 ? a.k_cache + a.k_pages.offset(slot, h) : nullptr;
  for (int c = lane; c < a.d; c += kWarp) {
    x[c] = values[c];
    if (stored) stored[c] = values[c];
  }
}

void check_heads(const char* op, const Tensor& q, const Tensor& k, int64_t tokens) {
  check(q.rank == 3 && k.rank == 3 && q.shape[0] == tokens && k.shape[0] == tokens &&
            q.shape[2] == k.shape[2] && q.dtype == k.dtype && dense_last_axis(q) &&
            dense_last_axis(k),
        "{}: {} tokens, {} and {}", op, tokens, q.describe(), k.describe());
}

void check_stored(const KvCache& cache, const Tensor& k, const Tensor& v) {
  check_pages(cache);
  check(v.rank == 3 && k.shape == v.shape && k.shape[1] == cache.k.shape[1] &&
            k.shape[2] == cache.k.shape[3] && k.dtype == cache.k.dtype && v.dtype == k.dtype &&
            dense_last_axis(v),
        "store_kv: {} and {} into pages of {}", k.describe(), v.describe(), cache.k.describe());
}

}  // namespace

void CudaBackend::rotary_embedding(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) {
  const int64_t tokens = positions.numel(), rotary_dim = cos_sin.shape[1];
  check_heads("rotary_embedding", q, k, tokens);
  check(cos_sin.rank == 2 && rotary_dim % 2 == 0 && rotary_dim <= q.shape[2],
        "rotary_embedding: a table of {} for {}", cos_sin.describe(), q.describe());
  dispatch_float(q.dtype, [&]<class T>() {
    launch(rotary_kernel<DeviceType<T>>, grid_for(tokens, q.shape[1] + k.shape[1]),
           kWarpsPerBlock * kWarp, 0, heads_of<T>(q), heads_of<T>(k), positions.ptr<int32_t>(),
           cos_sin.ptr<float>(), cos_sin.stride[0], static_cast<int>(rotary_dim / 2), tokens);
  });
}

void CudaBackend::store_kv(KvCache cache, Tensor k, Tensor v, Tensor slot_mapping) {
  const int64_t tokens = slot_mapping.numel();
  check_heads("store_kv", k, v, tokens);
  check_stored(cache, k, v);
  dispatch_float(k.dtype, [&]<class T>() {
    launch(store_kv_kernel<DeviceType<T>>, grid_for(tokens, k.shape[1]), kWarpsPerBlock * kWarp, 0,
           device_ptr<T>(cache.k), Pages(cache.k), device_ptr<T>(cache.v), Pages(cache.v),
           heads_of<T>(k), heads_of<T>(v), slot_mapping.ptr<int32_t>(), k.shape[2], tokens,
           wide_rows({k, v, cache.k, cache.v}));
  });
}

void CudaBackend::qk_norm_rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm,
                                     float eps, const Batch& batch, Tensor cos_sin, KvCache cache) {
  const int64_t tokens = batch.positions.numel(), d = q.shape[2], rotary_dim = cos_sin.shape[1];
  check_heads("qk_norm_rope_store", q, k, tokens);
  check_stored(cache, k, v);
  check(q_norm.numel() == d && k_norm.numel() == d && rotary_dim % 2 == 0 && rotary_dim <= d &&
            batch.slot_mapping.numel() == tokens,
        "qk_norm_rope_store: {} with weights {} and {}, a table of {}, {} slots", q.describe(),
        q_norm.describe(), k_norm.describe(), cos_sin.describe(), batch.slot_mapping.numel());
  if (d > kMaxFusedHeadDim)
    return Backend::qk_norm_rope_store(q, k, v, q_norm, k_norm, eps, batch, cos_sin, cache);
  dispatch_float(q.dtype, [&]<class T>() {
    using D = DeviceType<T>;
    const FusedArguments<D> arguments{heads_of<T>(q),
                                      heads_of<T>(k),
                                      heads_of<T>(v),
                                      device_ptr<T>(q_norm),
                                      device_ptr<T>(k_norm),
                                      eps,
                                      batch.positions.ptr<int32_t>(),
                                      batch.slot_mapping.ptr<int32_t>(),
                                      cos_sin.ptr<float>(),
                                      cos_sin.stride[0],
                                      device_ptr<T>(cache.k),
                                      device_ptr<T>(cache.v),
                                      Pages(cache.k),
                                      Pages(cache.v),
                                      tokens,
                                      static_cast<int>(d),
                                      static_cast<int>(rotary_dim / 2),
                                      wide_rows({q, k, v, cache.k, cache.v})};
    launch(qk_norm_rope_store_kernel<D>, grid_for(tokens, q.shape[1] + 2 * k.shape[1]),
           kWarpsPerBlock * kWarp, 0, arguments);
  });
}

}  // namespace nanovllm
