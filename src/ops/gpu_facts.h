// Facts of a machine for the GPU backend: asked of the driver itself, and of the CUDA module where
// that can be loaded, so that a report can say what is missing.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace nanovllm {

struct GpuFacts {
  std::string name{};
  int capability = 0;  ///< 90 for compute capability 9.0
  int64_t total_bytes = 0;
};

struct GpuDriver {
  std::string release{};  ///< "550.54.15"; empty if unknown
  int cuda = 0;           ///< 12040: the newest CUDA that it serves
  std::vector<GpuFacts> gpus{};
  bool has_peer_access = false;  ///< every GPU reaches every other's memory
  std::string problem{};         ///< one sentence where there is no GPU to use
};

/// Opens no GPU.
GpuDriver ask_gpu_driver();

/// Versions that the CUDA module was made with.
struct CudaModuleFacts {
  int toolkit = 0;                       ///< 13000: CUDA's version
  int cublaslt = 0;                      ///< 130101: the version that was loaded
  int nccl_header = 0;                   ///< 22703; 0: without NCCL
  std::array<char, 64> architectures{};  ///< "sm_80 sm_90"
};

struct CudaModule {
  std::string path{}, problem{};  ///< the problem in one sentence where it cannot be loaded
  CudaModuleFacts facts{};
};

CudaModule ask_cuda_module();

/// 22703 of libnccl.so.2, where there is one, or 0.
int nccl_version();

/// The module's entry: 0 if `version` is the module's own.
inline constexpr const char* kCudaFactsEntry = "nanovllm_cuda_facts";
using CudaFactsFunction = int(const char* version, CudaModuleFacts* facts);

}  // namespace nanovllm
