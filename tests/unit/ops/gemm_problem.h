// Products and GPUs of the tests of which kernel serves a product: the shapes of Qwen3-0.6B and
// -8B.
#pragma once

#include <string>

#include "ops/cuda/gemm/choose.h"

namespace nanovllm {

inline constexpr GemmGpu kHopper{
    .has_wgmma = true, .has_tma = true, .num_sms = 132, .shared_bytes = 227 * 1024};
inline constexpr GemmGpu kAmpere{.num_sms = 108, .shared_bytes = 163 * 1024},
    kAda{.num_sms = 128, .shared_bytes = 99 * 1024};

struct Shape {
  int64_t n, k;
};
// Of 8, 12, 48 and 192 MB.
inline constexpr Shape kSmallQkv{4096, 1024}, kSmallGateUp{6144, 1024}, kLargeQkv{6144, 4096},
    kLargeGateUp{24576, 4096};

inline GemmProblem product(int64_t rows, Shape w, GemmEnd end = GemmEnd::store,
                           DType y = DType::bf16) {
  return {.end = end, .y = y, .rows = rows, .n = w.n, .k = w.k};
}
inline std::string served_by(const GemmProblem& problem, const GemmGpu& gpu = kHopper) {
  return name_of(choose_gemm(problem, gpu).kernel);
}

}  // namespace nanovllm
