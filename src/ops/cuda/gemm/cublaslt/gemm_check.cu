#include "ops/cuda/core/handles.h"
#include "ops/cuda/gemm/cublaslt/gemm_check.h"
#include "ops/cuda/ptx/device.cuh"

namespace nanovllm {
namespace {

constexpr int kThreads = 256, kBlocks = 256;

/// bf16 numbers from -1 to 1 that look random.
__global__ void __launch_bounds__(kThreads)
    make_operand_kernel(__nv_bfloat16* data, int64_t count, uint32_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    uint32_t x = (static_cast<uint32_t>(i) + seed) * 2654435761u;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    data[i] = __float2bfloat16_rn(static_cast<float>(x >> 8) * 0x1p-23f - 1.0f);
  }
}

__global__ void __launch_bounds__(kThreads)
    count_different_kernel(const uint32_t* a, const uint32_t* b, int64_t count, int* different) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads)
    if (a[i] != b[i]) atomicAdd(different, 1);
}

}  // namespace

void make_operand(const Tensor& x, uint32_t seed, cudaStream_t stream) {
  make_operand_kernel<<<kBlocks, kThreads, 0, stream>>>(device_ptr<bf16>(x), x.numel(), seed);
  cuda_check(cudaGetLastError());
}

void count_different(const Tensor& a, const Tensor& b, int* count, cudaStream_t stream) {
  count_different_kernel<<<kBlocks, kThreads, 0, stream>>>(
      reinterpret_cast<const uint32_t*>(a.data), reinterpret_cast<const uint32_t*>(b.data),
      static_cast<int64_t>(a.bytes() / sizeof(uint32_t)), count);
  cuda_check(cudaGetLastError());
}

}  // namespace nanovllm
