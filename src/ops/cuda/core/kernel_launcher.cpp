#include "ops/cuda/core/kernel_launcher.h"

namespace nanovllm {

void KernelLauncher::allow_shared_memory(const void* kernel, size_t bytes) {
  check(bytes <= max_shared_bytes_, ErrorKind::device,
        "{} offers {} bytes of shared memory to a block, {} are needed", name_, max_shared_bytes_,
        bytes);
  size_t& allowed = shared_memory_allowed_[kernel];
  if (bytes <= allowed) return;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)));
  allowed = bytes;
}

void KernelLauncher::fail_launch(const void* kernel, cudaError_t status, dim3 grid, unsigned block,
                                 size_t shared_bytes) {
  (void)cudaGetLastError();
  const char* kernel_name = nullptr;
  if (cudaFuncGetName(&kernel_name, kernel) != cudaSuccess || !kernel_name)
    kernel_name = "a kernel";
  (void)cudaGetLastError();
  fail(ErrorKind::engine,
       "CUDA: {} launching {} (grid {} x {} x {}, block {}, {} bytes of shared memory)",
       cudaGetErrorString(status), kernel_name, grid.x, grid.y, grid.z, block, shared_bytes);
}

}  // namespace nanovllm
