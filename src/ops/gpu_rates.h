// A GPU's rates, with which benchmark figures are compared. The CUDA module measures them,
// independently of the engine's kernels.
#pragma once

#include <optional>
#include <string>

namespace nanovllm {

struct GpuRates {
  double bytes_per_second = 0;  ///< read from memory, by a stream over a buffer beyond the caches
  double flops = 0;             ///< of cuBLASLt's bf16 products of 8192 x 8192 x 8192
};

/// Measures the GPU that `device` names ("cuda:1", or a backend's whole name()) in about 0.1 s.
/// Nothing if there is no such GPU, or no 5 GB free on it.
std::optional<GpuRates> measure_gpu_rates(const std::string& device);

/// The module's entry: 0 if it measured.
inline constexpr const char* kCudaRatesEntry = "nanovllm_cuda_rates";
using CudaRatesFunction = int(int index, GpuRates* rates);

}  // namespace nanovllm
