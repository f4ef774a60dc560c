// Copies. A step's input and results are a few kilobytes in pinned memory, which the GPU can reach
// itself: a kernel that does so starts within a microsecond of the kernel before it, where the copy
// engine would take several to hand over, twice a step.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/ptx/device.cuh"

namespace nanovllm {
namespace {

constexpr size_t kMostBytesByKernel = 64 << 10;
constexpr unsigned kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    copy_kernel(std::byte* dst, const std::byte* src, size_t bytes) {
  wait_for_previous();
  let_next_start();
  const size_t at = (size_t{blockIdx.x} * kThreads + threadIdx.x) * sizeof(uint4);
  if (at + sizeof(uint4) <= bytes) {
    *reinterpret_cast<uint4*>(dst + at) = *reinterpret_cast<const uint4*>(src + at);
    return;
  }
  for (size_t i = at; i < bytes; i += sizeof(int))
    *reinterpret_cast<int*>(dst + i) = *reinterpret_cast<const int*>(src + i);
}

/// Whether kernels can reach `p`: memory of this device, or pinned memory of the host.
bool is_reachable(const std::byte* p, int device) {
  cudaPointerAttributes attributes{};
  cuda_check(cudaPointerGetAttributes(&attributes, p));
  return attributes.type == cudaMemoryTypeHost ||
         (attributes.type == cudaMemoryTypeDevice && attributes.device == device);
}

bool is_aligned(const std::byte* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(uint4) == 0; }

void check_alike(const char* operation, const Tensor& dst, const Tensor& src) {
  check(
      dst.dtype == src.dtype && dst.numel() == src.numel() && dst.contiguous() && src.contiguous(),
      "{} {} to {}: one dtype and size, contiguous", operation, src.describe(), dst.describe());
}

}  // namespace

void CudaBackend::copy(Tensor dst, Tensor src) {
  check_alike("copy", dst, src);
  const size_t bytes = dst.bytes();
  if (bytes == 0) return;
  use_device();
  if (bytes <= kMostBytesByKernel && bytes % sizeof(int) == 0 && is_aligned(dst.data) &&
      is_aligned(src.data) && is_reachable(dst.data, index_) && is_reachable(src.data, index_)) {
    const auto vectors = static_cast<int64_t>((bytes + sizeof(uint4) - 1) / sizeof(uint4));
    launch_early(copy_kernel, {grid_size(ceil_div(vectors, int64_t{kThreads}))}, kThreads, 0,
                 dst.data, static_cast<const std::byte*>(src.data), bytes);
    return;
  }
  // Unified addressing tells host from device. From pageable memory the call returns once the
  // source may be reused, to pageable memory once the copy is done.
  cuda_check(cudaMemcpyAsync(dst.data, src.data, bytes, cudaMemcpyDefault, stream()));
}

void CudaBackend::copy_ahead(Tensor dst, Tensor src) {
  check_alike("copy_ahead", dst, src);
  use_device();
  cuda_check(cudaMemcpyAsync(dst.data, src.data, dst.bytes(), cudaMemcpyDefault, ahead_.get()));
  cuda_check(cudaEventRecord(copied_ahead_.get(), ahead_.get()));
  cuda_check(cudaStreamWaitEvent(stream(), copied_ahead_.get(), 0));
}

}  // namespace nanovllm
