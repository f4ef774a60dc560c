// Requests of tests to the CUDA module beyond the catalogue of operations: to behave like a lesser
// GPU, and to tell its verdicts on cuBLASLt.
#pragma once

#include <cstdint>

namespace nanovllm {

class Backend;

/// For one of the module's backends, before its first operation.
struct CudaLimits {
  int num_sms = 0;                          ///< the SMs that it knows of; 0: all
  uint32_t last_epoch = 0;                  ///< of decoder_layers(); 0: as ever
  bool fails_cooperative_launches = false;  ///< they are refused, as on a GPU that is shared
  bool lacks_cooperative_launches = false;  ///< and are not asked for
  bool has_uneven_weights = false;          ///< whatever its quantised weights are
};
inline constexpr const char* kLimitCudaEntry = "nanovllm_limit_cuda";
using LimitCudaFunction = void(Backend* backend, const CudaLimits* limits);

/// Algorithms of cuBLASLt for some products, compared bit by bit with the module's own kernel.
struct GemmComparison {
  int used = 0, used_differ = 0;      ///< those that the backend chooses among
  int others = 0, others_differ = 0;  ///< those that it never uses
};
inline constexpr const char* kCompareGemmEntry = "nanovllm_compare_gemm";
/// Nonzero if the comparison failed.
using CompareGemmFunction = int(Backend* backend, GemmComparison* comparison);

}  // namespace nanovllm
