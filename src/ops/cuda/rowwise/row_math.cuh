// The arithmetic of RMSNorm and of the rotary embedding, in one place: the separate kernels and the
// fused ones give the same bits because they run these same lines. Products that feed a sum are
// written as the fused operation they become, so that the compiler has no choice between one
// rounding and two.
#pragma once

#include "core/batch.h"
#include "ops/cuda/ptx/device.cuh"

namespace nanovllm {

/// Threads that share a row of n elements: a function of n alone, since the tree of the sum follows
/// from it.
inline unsigned row_threads(int64_t n) {
  constexpr int64_t kElementsPerThread = 8;
  const int64_t warps = ceil_div(n, kWarp * kElementsPerThread);
  return static_cast<unsigned>(kWarp * (warps <= 2 ? 1 : warps < 16 ? warps : 16));
}

template <class T>
__device__ float add_squares(float sum, const Vec<T>& x) {
#pragma unroll
  for (int i = 0; i < Vec<T>::size; ++i) {
    const float value = to_float(x.v[i]);
    sum = __fmaf_rn(value, value, sum);
  }
  return sum;
}

__device__ inline float reciprocal_of_mean(float mean_of_squares, float eps) {
  return __frsqrt_rn(__fadd_rn(mean_of_squares, eps));
}
__device__ inline float reciprocal_rms(float sum_of_squares, int64_t n, float eps) {
  return reciprocal_of_mean(__fdiv_rn(sum_of_squares, static_cast<float>(n)), eps);
}

/// Rounded before it is scaled, as Hugging Face does.
template <class T>
__device__ T normalise(T x, float reciprocal, T weight) {
  return round_to<T>(to_float(weight) * to_float(round_to<T>(to_float(x) * reciprocal)));
}

template <class T>
__device__ void normalise(Vec<T>& x, float reciprocal, const Vec<T>& weights) {
#pragma unroll
  for (int i = 0; i < Vec<T>::size; ++i) x.v[i] = normalise(x.v[i], reciprocal, weights.v[i]);
}

/// x += the residual stream.
template <class T>
__device__ void add_stream(Vec<T>& x, const Vec<T>& stream) {
#pragma unroll
  for (int i = 0; i < Vec<T>::size; ++i)
    x.v[i] = round_to<T>(to_float(stream.v[i]) + to_float(x.v[i]));
}

struct Pair {
  float first, second;
};
/// One element of the first half and its partner in the second, turned by the angle.
__device__ inline Pair rotate(float first, float second, float cosine, float sine) {
  return {__fmaf_rn(-second, sine, __fmul_rn(first, cosine)),
          __fmaf_rn(first, sine, __fmul_rn(second, cosine))};
}

/// A page of keys or values, in elements.
struct Pages {
  int64_t block_stride, head_stride, head_dim;
  int block_size;  // an int: the GPU divides by it, and divides 64 bits slowly
  explicit Pages(const Tensor& cache, const Tensor& = {})
      : block_stride(cache.stride[0]),
        head_stride(cache.stride[1]),
        head_dim(cache.shape[3]),
        block_size(static_cast<int>(cache.shape[2])) {}
  __device__ int64_t offset(int slot, int head) const {
    return slot / block_size * block_stride + head * head_stride + slot % block_size * head_dim;
  }
};
/// The same of E4M3 numbers, whose rows have scales.
struct ScaledPages : Pages {
  const float* scales;  // of all rows of each head; null: a row has its own
  ScaledPages(const Tensor& cache, const Tensor& of_heads)
      : Pages(cache), scales(of_heads.defined() ? of_heads.ptr<float>() : nullptr) {}
  /// Of the scale of a row.
  __device__ int64_t scale_offset(int slot, int head) const {
    return slot / block_size * block_stride + head * head_stride + block_size * head_dim +
           slot % block_size * static_cast<int>(sizeof(float));
  }
  /// 0: a row has its own.
  __device__ float scale_of(int head) const { return scales ? scales[head] : 0.0f; }
};

inline void check_pages(const KvCache& cache) {
  const auto has_scales = [](const Tensor& t) {  // behind the rows, as f32
    return t.stride[1] >= t.shape[2] * (t.shape[3] + 4) && t.shape[2] * t.shape[3] % 4 == 0 &&
           t.stride[1] % 4 == 0 && t.stride[0] % 4 == 0;
  };
  for (const Tensor& t : {cache.k, cache.v})
    check(t.rank == 4 && t.stride[3] == 1 && t.stride[2] == t.shape[3] &&
              (t.dtype != DType::e4m3 || has_scales(t)),
          "KV cache {}: the axes are blocks, heads, offset, element, the last two dense",
          t.describe());
  check(cache.k.shape == cache.v.shape && cache.k.dtype == cache.v.dtype,
        "KV cache: k is {}, v is {}", cache.k.describe(), cache.v.describe());
  for (const Tensor& t : {cache.k_scales, cache.v_scales})
    check(!t.defined() || (t.dtype == DType::f32 && t.numel() == cache.k.shape[1]),
          "KV cache: scales {} of {} heads", t.describe(), cache.k.shape[1]);
}

}  // namespace nanovllm
