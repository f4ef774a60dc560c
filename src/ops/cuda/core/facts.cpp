// The versions that this module was made with.
#include <cstdio>
#include <cstring>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "core/load_module.h"
#include "ops/cuda_module.h"
#include "ops/gpu_facts.h"

#ifdef NANOVLLM_NCCL
#include <nccl.h>
#endif

extern "C" __attribute__((visibility("default"))) int nanovllm_cuda_facts(
    const char* version, nanovllm::CudaModuleFacts* facts) {
  if (std::strcmp(version, nanovllm::module_version()) != 0) return 1;
  facts->toolkit = CUDART_VERSION;
  facts->cublaslt = static_cast<int>(cublasLtGetVersion());
#ifdef NANOVLLM_NCCL
  facts->nccl_header = NCCL_VERSION_CODE;
#endif
  std::snprintf(facts->architectures.data(), facts->architectures.size(), "%s",
                NANOVLLM_CUDA_ARCHITECTURES);
  return 0;
}

static_assert(std::is_same_v<decltype(nanovllm_cuda_facts), nanovllm::CudaFactsFunction>);
