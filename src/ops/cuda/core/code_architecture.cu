#include "ops/cuda/core/code_architecture.h"
#include "ops/cuda/core/handles.h"

namespace nanovllm {
namespace {

/// Stands for all kernels of the module: they are compiled for the same list of architectures.
__global__ void probe_kernel() {}

}  // namespace

int code_architecture() {
  cudaFuncAttributes attributes{};
  cuda_check(cudaFuncGetAttributes(&attributes, probe_kernel));
  return attributes.ptxVersion;
}

}  // namespace nanovllm
