// Which kernel multiplies a mixture's experts: the rule beside choose.cpp's table.
#include <algorithm>

#include "ops/cuda/gemm/choose.h"
#include "ops/cuda/gemm/gemm_kernels.h"

namespace nanovllm {
namespace {

/// Tokens so few that each of their pairs is a unit of its own.
constexpr int64_t kUnsortedTokens = 2;
/// Tokens of an expert, on average: from the last of these on wgmma's tiles are faster, and between
/// the first two the blocks of moe_gemm.cuh are as fast as streams. Measured on an H200.
constexpr int64_t kFewestStreamed = 8, kMostStreamed = 22, kFewestMany = 37;
/// The same of packed weights: above, tiles of many tokens unpack them less often, and so do tiles
/// of 32 before where tokens gather at some experts.
constexpr int64_t kMostFewPacked = 24, kMostSixteenPacked = 4;

}  // namespace

ExpertChoice choose_experts(const ExpertProblem& p, const GemmGpu& gpu) {
  const int64_t pairs = p.tokens * p.per_token;
  // By the weights' shape alone: the two kinds of kernel do not give the same bits.
  if (p.weight == WeightFormat::f32 || p.hidden % 8 != 0 || p.inner % 8 != 0)
    return {ExpertKernel::plain, 1};
  const bool has_slices = p.hidden % kSliceWidth == 0 && p.inner % kSliceWidth == 0,
             is_sorted = p.tokens > kUnsortedTokens;
  const int tokens = 2 * pairs <= 5 * p.experts ? 8
                     : pairs <= 8 * p.experts   ? 16
                     : pairs <= 22 * p.experts  ? 32
                     : pairs <= 56 * p.experts  ? 64
                                                : 128;
  const int most = p.unpacks_simply ? 128 : kMostAnyPackedTokens;
  if (p.weight.quantises_rows()) {
    const int most_even = p.is_even || !gpu.has_wgmma ? 128 : 32;
    return {gpu.has_wgmma ? ExpertKernel::fp8 : ExpertKernel::w8a8,
            !is_sorted ? 8 : std::min({tokens, most, most_even}), is_sorted};
  }
  if (p.weight.is_quantised()) {
    const bool is_many = pairs > kMostFewPacked * p.experts && gpu.shared_bytes >= kManyPackedBytes;
    if (is_many && gpu.has_wgmma && p.is_even) return {ExpertKernel::packed_many, 128, true};
    const int tile = is_many ? 128 : pairs > kMostSixteenPacked * p.experts ? 32 : tokens;
    return {ExpertKernel::packed, !is_sorted ? 8 : std::min(tile, most), is_sorted};
  }
  if (gpu.has_wgmma && has_slices && pairs > kFewestMany * p.experts)
    return {ExpertKernel::many, 128};
  if (gpu.has_tma && has_slices && !is_sorted &&
      SumCut::shared_bytes(p.inner, p.per_token) <= gpu.shared_bytes)
    return {ExpertKernel::pairs, 1};
  if (gpu.has_tma && has_slices && is_sorted && pairs > kFewestStreamed * p.experts &&
      pairs <= kMostStreamed * p.experts)
    return {ExpertKernel::stream, 32};
  return {ExpertKernel::blocks, tokens, is_sorted};
}

}  // namespace nanovllm
