// A benchmark's question to the CUDA module: which of its kernels computes a product, and why
// others do not.
#pragma once

#include <string>

#include "ops/backend.h"

namespace nanovllm {

/// x[rows, k] w[n, k]^T; of a gated product w has the rows of both halves.
struct GemmQuestion {
  WeightFormat weight = WeightFormat::bf16;
  int64_t rows = 0, n = 0, k = 0;
  bool is_gated = false, f32_out = false;
};

/// One line: the kernel, its tile, and who declined; empty where `backend` is not the module's.
std::string explain_gemm(Backend& backend, const GemmQuestion& question);

/// The module's entry. Writes the line, cut to `size` bytes and always terminated.
inline constexpr const char* kExplainGemmEntry = "nanovllm_explain_gemm";
using ExplainGemmFunction = void(Backend* backend, const GemmQuestion* question, char* text,
                                 size_t size);

}  // namespace nanovllm
