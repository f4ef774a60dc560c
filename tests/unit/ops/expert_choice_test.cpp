// The choice of the kernel of a mixture's experts, without a GPU, at the edges of its thresholds,
// for the shape of Qwen3-30B-A3B.
#include <gtest/gtest.h>

#include "ops/cuda/gemm/choose.h"

namespace nanovllm {
namespace {

constexpr GemmGpu kHopper{
    .has_wgmma = true, .has_tma = true, .num_sms = 132, .shared_bytes = 227 * 1024};
constexpr GemmGpu kAmpere{.num_sms = 108, .shared_bytes = 163 * 1024};

ExpertProblem problem_of(int64_t tokens, WeightFormat weight = WeightFormat::bf16) {
  return {.weight = weight,
          .tokens = tokens,
          .per_token = 8,
          .experts = 128,
          .hidden = 2048,
          .inner = 768};
}

TEST(ExpertChoice, FollowsTheTokensOfAnExpert) {
  const auto kernel = [](int64_t tokens, const GemmGpu& gpu) {
    return choose_experts(problem_of(tokens), gpu);
  };
  EXPECT_EQ(kernel(2, kHopper).kernel, ExpertKernel::pairs);
  EXPECT_EQ(kernel(3, kHopper).kernel, ExpertKernel::blocks);
  EXPECT_EQ(kernel(3, kHopper).tile_tokens, 8);
  EXPECT_EQ(kernel(128, kHopper).tile_tokens, 16);  // 8 tokens of an expert
  EXPECT_EQ(kernel(129, kHopper).kernel, ExpertKernel::stream);
  EXPECT_EQ(kernel(352, kHopper).kernel, ExpertKernel::stream);
  EXPECT_EQ(kernel(353, kHopper).kernel, ExpertKernel::blocks);
  EXPECT_EQ(kernel(592, kHopper).kernel, ExpertKernel::blocks);
  EXPECT_EQ(kernel(593, kHopper).kernel, ExpertKernel::many);
  EXPECT_EQ(kernel(2, kAmpere).kernel, ExpertKernel::blocks);
  EXPECT_FALSE(kernel(2, kAmpere).is_sorted);
  EXPECT_EQ(kernel(2000, kAmpere).tile_tokens, 128);
  EXPECT_EQ(choose_experts({.tokens = 2, .per_token = 2, .experts = 4, .hidden = 60, .inner = 64},
                           kHopper)
                .kernel,
            ExpertKernel::plain);
  const auto fp8 = [](int64_t tokens, bool is_even, const GemmGpu& gpu = kHopper) {
    ExpertProblem problem =
        problem_of(tokens, {WeightFormat::e4m3, 128, WeightFormat::Rows::group});
    problem.is_even = is_even;
    return choose_experts(problem, gpu);
  };
  EXPECT_EQ(fp8(2, true).kernel, ExpertKernel::fp8);
  EXPECT_FALSE(fp8(2, true).is_sorted);
  EXPECT_EQ(fp8(40, true).tile_tokens, 8);
  EXPECT_EQ(fp8(2000, true).tile_tokens, 128);
  EXPECT_EQ(fp8(2000, false).tile_tokens, 32);  // its scales are not a lane's four
  EXPECT_EQ(fp8(2, true, kAmpere).kernel, ExpertKernel::w8a8);
  EXPECT_EQ(fp8(2000, false, kAmpere).tile_tokens, 128);
}

TEST(ExpertChoice, OfPackedWeightsAndManyTokensIsHoppersOwn) {
  const auto packed = [](int64_t tokens, bool is_even) {
    ExpertProblem problem = problem_of(tokens, {WeightFormat::int4, 32});
    problem.is_even = is_even;
    problem.unpacks_simply = false;
    return choose_experts(problem, kHopper);
  };
  EXPECT_EQ(packed(384, true).kernel, ExpertKernel::packed);
  EXPECT_EQ(packed(385, true).kernel, ExpertKernel::packed_many);
  EXPECT_EQ(packed(385, true).tile_tokens, 128);
  EXPECT_TRUE(packed(385, true).is_sorted);
  EXPECT_EQ(packed(385, false).kernel, ExpertKernel::packed);  // its registers unpack even weights
  EXPECT_EQ(packed(385, false).tile_tokens, 32);
}

TEST(ExpertChoice, OfPackedWeightsIsOneKernelOnOtherGpus) {
  const auto packed = [](int64_t tokens, size_t shared_bytes, bool unpacks_simply = true) {
    GemmGpu gpu = kAmpere;
    gpu.shared_bytes = shared_bytes;
    ExpertProblem problem = problem_of(tokens, {WeightFormat::int4, 128});
    problem.unpacks_simply = unpacks_simply;
    return choose_experts(problem, gpu);
  };
  constexpr size_t kA100 = 163 * 1024, kRtx4090 = 99 * 1024;
  for (const int64_t tokens : {1, 2, 3, 384, 385, 10'000})
    EXPECT_EQ(packed(tokens, kA100).kernel, ExpertKernel::packed) << tokens;
  EXPECT_FALSE(packed(2, kA100).is_sorted);
  EXPECT_TRUE(packed(3, kA100).is_sorted);
  EXPECT_EQ(packed(2, kA100).tile_tokens, 8);
  EXPECT_EQ(packed(40, kA100).tile_tokens, 8);
  EXPECT_EQ(packed(41, kA100).tile_tokens, 16);
  EXPECT_EQ(packed(64, kA100).tile_tokens, 16);
  EXPECT_EQ(packed(65, kA100).tile_tokens, 32);
  EXPECT_EQ(packed(384, kA100).tile_tokens, 32);
  EXPECT_EQ(packed(385, kA100).tile_tokens, 128);
  EXPECT_EQ(packed(385, kRtx4090).tile_tokens, 32);      // a tile of 128 has no room
  EXPECT_EQ(packed(385, kA100, false).tile_tokens, 32);  // its kernels have one scale for a record
  EXPECT_EQ(packed(41, kA100, false).tile_tokens, 16);
}

}  // namespace
}  // namespace nanovllm
