// Shared by all kernels: element types, 16-byte loads and stores, reductions in a fixed order.
#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/core/layout.h"

namespace nanovllm {

// -- Elements --

template <class T>
struct DeviceTypeOf;
template <>
struct DeviceTypeOf<float> {
  using type = float;
};
template <>
struct DeviceTypeOf<bf16> {
  using type = __nv_bfloat16;
};
/// The type in which device code sees elements of the host's T.
template <class T>
using DeviceType = typename DeviceTypeOf<T>::type;

template <class T>
DeviceType<T>* device_ptr(const Tensor& t) {
  return reinterpret_cast<DeviceType<T>*>(t.ptr<T>());
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ T round_to(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return __float2bfloat16_rn(x);
}

/// The gated activation: silu(gate) * up.
__device__ inline float silu_times(float gate, float up) {
  return gate / (1.0f + expf(-gate)) * up;
}

// -- Vectors --

/// 16 bytes of elements.
template <class T>
struct alignas(16) Vec {
  static constexpr int size = 16 / sizeof(T);
  T v[size];
};

/// The elements p[0 .. min(count, size)), zeros after them. `wide`: p is 16-byte aligned.
template <class T>
__device__ Vec<T> load_vec(const T* p, int64_t count, bool wide) {
  if (wide && count >= Vec<T>::size) return *reinterpret_cast<const Vec<T>*>(p);
  Vec<T> x;
#pragma unroll
  for (int i = 0; i < Vec<T>::size; ++i) x.v[i] = i < count ? p[i] : round_to<T>(0.0f);
  return x;
}

/// 16 bytes of global memory in one instruction, which an assignment does not promise: the compiler
/// may store a Vec's elements singly.
template <class T>
__device__ void store_whole(T* p, const Vec<T>& x) {
  const uint4 u = *reinterpret_cast<const uint4*>(&x);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(u.x), "r"(u.y), "r"(u.z), "r"(u.w)
               : "memory");
}

template <class T>
__device__ void store_vec(T* p, const Vec<T>& x, int64_t count, bool wide) {
  if (wide && count >= Vec<T>::size) {
    store_whole(p, x);
    return;
  }
#pragma unroll
  for (int i = 0; i < Vec<T>::size; ++i)
    if (i < count) p[i] = x.v[i];
}

// -- Overlap with the kernel before (programmatic dependent launch; nothing before sm_90) --

/// Waits until all earlier kernels are done and their writes can be seen. Every block of a kernel
/// that CudaBackend::launch_early() launches calls this, and before it touches no memory that
/// kernels write (weights are fine).
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Lets the next kernel's blocks be scheduled as soon as all blocks of this one have called it (or
/// are done).
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// -- Reductions: one fixed tree, whatever else runs --

constexpr unsigned kFullMask = 0xffffffffu;

/// The sum over `lanes` neighbours, a power of two, the furthest first: over those with the same
/// place in a group of `apart`.
template <class T>
__device__ __forceinline__ T lane_sum(T x, unsigned lanes, unsigned apart = 1) {
  for (unsigned offset = lanes / 2; offset >= apart; offset /= 2)
    x += __shfl_xor_sync(kFullMask, x, static_cast<int>(offset));
  return x;
}

template <class T>
__device__ T warp_sum(T x) {
  return lane_sum(x, kWarp);
}

template <class T>
__device__ T warp_max(T x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(kFullMask, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

/// The sum over the block, in every thread. `shared` holds one T per warp; it may be reused after a
/// barrier.
template <class T>
__device__ T block_sum(T x, T* shared) {
  x = warp_sum(x);
  if (blockDim.x == kWarp) return x;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  T total = shared[0];
  for (unsigned i = 1; i < blockDim.x / kWarp; ++i) total += shared[i];
  return total;
}

}  // namespace nanovllm
