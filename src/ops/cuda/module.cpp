// The module's one entry point.
#include <cstdio>
#include <cstring>

#include "ops/cuda/cuda_backend.h"
#include "ops/cuda_module.h"

extern "C" __attribute__((visibility("default"))) nanovllm::Backend* nanovllm_open_cuda(
    const char* version, int index, char* error, size_t error_size) {
  const auto refuse = [&](const char* reason) {
    if (error_size > 0) std::snprintf(error, error_size, "%s", reason);
    return nullptr;
  };
  if (std::strcmp(version, nanovllm::kCudaModuleVersion) != 0)
    return refuse(
        "the CUDA module belongs to another build of the program: install both from one build");
  try {
    return new nanovllm::CudaBackend(index);
  } catch (const std::exception& failure) {
    return refuse(failure.what());
  } catch (...) {
    return refuse("the CUDA module failed to open the device");
  }
}

static_assert(std::is_same_v<decltype(nanovllm_open_cuda), nanovllm::OpenCudaFunction>);
