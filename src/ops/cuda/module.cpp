// The module's entry points.
#include <cstdio>
#include <cstring>

#include "comm/cuda_module.h"
#include "ops/cuda/communicator.h"
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

extern "C" __attribute__((visibility("default"))) nanovllm::Communicator*
nanovllm_open_cuda_communicator(int version, nanovllm::Backend* backend,
                                nanovllm::RankMeeting* meeting, int rank, char* error,
                                size_t error_size) {
  const auto refuse = [&](const char* reason) {
    if (error_size > 0) std::snprintf(error, error_size, "%s", reason);
    return nullptr;
  };
  if (version != nanovllm::kCommunicatorVersion)
    return refuse(
        "the CUDA module belongs to another build of the program: install both from one build");
  try {
    return nanovllm::make_peer_communicator(dynamic_cast<nanovllm::CudaBackend&>(*backend),
                                            *meeting, rank)
        .release();
  } catch (const std::exception& failure) {
    return refuse(failure.what());
  } catch (...) {
    return refuse("the CUDA module failed to connect the GPUs");
  }
}

static_assert(std::is_same_v<decltype(nanovllm_open_cuda), nanovllm::OpenCudaFunction>);
static_assert(
    std::is_same_v<decltype(nanovllm_open_cuda_communicator), nanovllm::OpenCommunicatorFunction>);
