// The choice of a product's kernel, without a GPU: the thresholds that measurements set
// (docs/performance/tried.md), at their edges.
#include <algorithm>

#include <gtest/gtest.h>

#include "ops/cuda/gemm/gemm_kernels.h"
#include "unit/ops/gemm_problem.h"

namespace nanovllm {
namespace {

/// "mid 1..256 blas 257..767": who serves each number of rows.
std::string by_rows(Shape w, GemmEnd end, int64_t most, const GemmGpu& gpu = kHopper) {
  std::string text, before;
  int64_t first = 1;
  for (int64_t rows = 1; rows <= most + 1; ++rows) {
    const std::string now = rows > most ? "" : served_by(product(rows, w, end), gpu);
    if (now != before && rows > 1) {
      text += (text.empty() ? "" : " ") + before + " " + std::to_string(first) + ".." +
              std::to_string(rows - 1);
      first = rows;
    }
    before = now;
  }
  return text;
}

TEST(GemmChoice, OfAStepsProductsOnHopper) {
  EXPECT_EQ(by_rows(kSmallQkv, GemmEnd::store, 700), "skinny 1..32 mid 33..256 blas 257..700");
  EXPECT_EQ(by_rows(kSmallGateUp, GemmEnd::gate, 700),
            "skinny 1..64 mid 65..256 separate operations 257..700");
  EXPECT_EQ(by_rows(kLargeQkv, GemmEnd::store, 700),
            "skinny 1..8 mid 9..256 blas 257..700");  // no wide tile keeps enough SMs busy
  EXPECT_EQ(by_rows(kLargeGateUp, GemmEnd::gate, 128),
            "skinny 1..8 mid 9..64 wide 65..112 mid 113..128");
}

// Shapes of Qwen2.5-0.5B, -1.5B and -7B, Llama 3.1 8B and Qwen3-1.7B: tiles of mid would leave many
// SMs without work, or with a last tile that all wait for.
TEST(GemmChoice, OfWeightsThatMidDividesBadly) {
  const auto tiles = [](int64_t rows, Shape w, GemmEnd end = GemmEnd::store) {
    const std::string text = explain_gemm(product(rows, w, end), kHopper);
    return text.substr(0, text.find(';'));
  };
  EXPECT_EQ(by_rows({1536, 8960}, GemmEnd::store, 128), "skinny 1..64 mid 65..128");
  EXPECT_EQ(tiles(16, {1536, 8960}), "skinny, 16 columns by 16 rows");
  EXPECT_EQ(tiles(32, {1536, 8960}), "skinny, 16 columns by 32 rows");
  EXPECT_EQ(tiles(64, {1536, 8960}), "skinny, 24 columns by 32 rows");
  EXPECT_EQ(tiles(16, {17920, 1536}, GemmEnd::gate), "skinny, 48 columns by 16 rows");
  EXPECT_EQ(tiles(64, {28672, 4096}, GemmEnd::gate), "skinny, 64 columns by 64 rows");
  EXPECT_EQ(tiles(16, {37888, 3584}, GemmEnd::gate),
            "mid, 96 columns by 1 x 16 rows, 1 blocks of rows");
  EXPECT_EQ(by_rows({12288, 2048}, GemmEnd::gate, 64), "skinny 1..8 mid 9..64");
  EXPECT_EQ(by_rows({1152, 896}, GemmEnd::store, 64), "skinny 1..4 mid 5..64");
  GemmGpu gpu = kHopper;
  gpu.own_sms = 32;
  EXPECT_EQ(by_rows({28672, 4096}, GemmEnd::gate, 64, gpu), "mid 1..64");
}

TEST(GemmChoice, OfManyRowsOnHopper) {
  EXPECT_EQ(served_by(product(767, kLargeGateUp, GemmEnd::gate)), "separate operations");
  EXPECT_EQ(served_by(product(16384, kLargeGateUp, GemmEnd::gate)), "large");
  EXPECT_EQ(served_by(product(16384, kLargeQkv)), "large");
  // 4 by 3 pairs of tiles for 66 clusters: the last wave is not full.
  EXPECT_EQ(served_by(product(1024, {768, 1024})), "blas");
}

TEST(GemmChoice, OfLogits) {
  const auto logits = [](int64_t rows) {
    return served_by(product(rows, {151936, 1024}, GemmEnd::store, DType::f32));
  };
  EXPECT_EQ(logits(32), "skinny");
  EXPECT_EQ(logits(33), "mid");
  EXPECT_EQ(logits(256), "mid");
  EXPECT_EQ(logits(257), "blas");
  EXPECT_EQ(served_by(product(256, {151936, 1024}, GemmEnd::scan)), "sample");
  EXPECT_EQ(served_by(product(8, {151936, 4096}, GemmEnd::scan)), "separate operations");
  EXPECT_EQ(served_by(product(9, {151936, 4096}, GemmEnd::scan)), "sample");
}

TEST(GemmChoice, OfMicroBatches) {
  GemmGpu gpu = kHopper;
  gpu.own_sms = 32;
  EXPECT_EQ(by_rows(kSmallQkv, GemmEnd::heads, 300, gpu),
            "mid 1..256 separate operations 257..300");
  EXPECT_EQ(by_rows(kLargeGateUp, GemmEnd::gate, 256, gpu), "mid 1..256");
}

TEST(GemmChoice, OfPartsThatAreSent) {
  EXPECT_EQ(by_rows({4096, 2048}, GemmEnd::send, 257),
            "separate operations 1..96 mid 97..256 separate operations 257..257");
}

TEST(GemmChoice, OfOtherGpusAndShapes) {
  EXPECT_EQ(by_rows(kSmallQkv, GemmEnd::store, 300, kAmpere), "blas 1..300");
  EXPECT_EQ(served_by(product(16, {1024, 1000})), "in_order");
  EXPECT_EQ(served_by(product(300, {12, 1024})), "in_order");
  EXPECT_EQ(served_by(product(300, {8, 1024})), "in_order");
  GemmProblem problem = product(16, kSmallQkv);
  problem.is_aligned = false;
  EXPECT_EQ(served_by(problem), "in_order");
  problem = product(16, kSmallQkv, GemmEnd::store, DType::f32);
  problem.weight = WeightFormat::f32;
  EXPECT_EQ(served_by(problem), "in_order");
  EXPECT_EQ(served_by(product(0, kSmallQkv)), "separate operations");
}

// Few rows of a gated product; the other products of plain weights are cuBLASLt's.
TEST(GemmChoice, OfPlainWeightsOnOtherGpus) {
  for (const GemmGpu& gpu : {kAmpere, kAda}) {
    EXPECT_EQ(by_rows(kSmallGateUp, GemmEnd::gate, 300, gpu),
              "mma 1..64 separate operations 65..300");
    EXPECT_EQ(by_rows(kLargeGateUp, GemmEnd::gate, 300, gpu),
              "mma 1..64 separate operations 65..300");
    EXPECT_EQ(by_rows(kSmallQkv, GemmEnd::store, 300, gpu), "blas 1..300");
    for (const Shape w : {Shape{16, 128}, Shape{24, 64}, Shape{8, 128}, Shape{6144, 960}})
      EXPECT_EQ(served_by(product(8, w, GemmEnd::gate), gpu),
                w.n == 16 ? "mma" : "separate operations")
          << w.n << " " << w.k;
  }
  GemmGpu gpu = kAmpere;  // as where its cycles were measured
  gpu.num_sms = 132;
  gpu.shared_bytes = 227 * 1024;
  const auto explained = [&](int64_t rows, Shape w) {
    const std::string text = explain_gemm(product(rows, w, GemmEnd::gate), gpu);
    return text.substr(0, text.find(';'));
  };
  EXPECT_EQ(explained(1, kSmallGateUp),
            "mma, 3 warps by 16 rows of the weight by 8 rows, 1 blocks of rows");
  EXPECT_EQ(explained(32, kSmallGateUp),
            "mma, 6 warps by 16 rows of the weight by 16 rows, 2 blocks of rows");
  EXPECT_EQ(explained(32, kLargeGateUp),
            "mma, 12 warps by 16 rows of the weight by 32 rows, 1 blocks of rows");
  EXPECT_EQ(explained(64, kLargeGateUp),
            "mma, 12 warps by 16 rows of the weight by 64 rows, 1 blocks of rows");
}

// A block asks for no more shared memory than the GPU has: a plan that needs more would fail where
// it is launched.
TEST(GemmChoice, RingsOfFewRowsFitEveryGpu) {
  const auto expect_fit = [](WeightFormat weight, int64_t rows, size_t shared_bytes) {
    GemmGpu gpu = kAda;
    gpu.shared_bytes = shared_bytes * 1024;
    GemmProblem problem = product(rows, kLargeGateUp, GemmEnd::gate);
    problem.weight = weight;
    const MmaPlan plan = choose_gemm(problem, gpu).mma;
    ASSERT_GE(plan.eights * 8 * plan.row_blocks, rows);
    const MmaRings rings(plan.warps, plan.units, plan.eights, rows,
                         mma_record_bytes(weight, problem.k), gpu.shared_bytes);
    EXPECT_GT(rings.stages, 0) << rows << " rows, " << shared_bytes << " KB";
    EXPECT_LE(rings.bytes, gpu.shared_bytes);
  };
  for (const size_t shared_bytes : {99u, 163u, 227u}) {
    for (int64_t rows = 1; rows <= 64; ++rows) expect_fit(WeightFormat::bf16, rows, shared_bytes);
    for (const auto numbers : {WeightFormat::int4, WeightFormat::int8})
      for (int64_t rows = 1; rows <= 256; ++rows) expect_fit({numbers, 32}, rows, shared_bytes);
  }
}

TEST(GemmChoice, OfWeightsInHalves) {
  GemmProblem problem;
  const auto at = [&](int64_t rows, const GemmGpu& gpu = kHopper) {
    problem.rows = rows;
    return served_by(problem, gpu);
  };
  // As those of whole weights, but in place of cuBLASLt.
  for (const Shape w : {Shape{4096, 11008}, Shape{4096, 12288}})
    for (const int64_t rows : {1, 8, 9, 128, 200, 256, 257, 767, 1024, 1536, 4096}) {
      problem = product(1, w);
      const std::string whole = at(rows);
      problem.weight.in_halves = true;
      EXPECT_EQ(at(rows), whole == "blas" ? "mid" : whole) << rows << " " << w.k;
    }
  // The rows of skinny's tiles with either half are the 64 of one operand.
  int64_t most[2] = {};
  for (const bool in_halves : {false, true})
    for (const int64_t k : {1024, 11264})
      for (int64_t rows = 1; rows <= 64; ++rows) {
        GemmProblem small = product(rows, {2048, k});
        small.weight.in_halves = in_halves;
        const GemmChoice choice = choose_gemm(small, kHopper);
        if (choice.kernel == GemmKernel::skinny)
          most[in_halves] = std::max<int64_t>(most[in_halves], choice.skinny.block_rows);
      }
  EXPECT_GT(most[0], 32);
  EXPECT_EQ(most[1], 32);
  problem.rows = 700;  // 4 by 32 tiles
  EXPECT_TRUE(explain_gemm(problem, kHopper)
                  .starts_with("mid, 128 columns by 3 x 64 rows, 4 blocks of rows;"))
      << explain_gemm(problem, kHopper);
  EXPECT_EQ(at(1, kAmpere), "blas");
  problem.y = DType::f32;
  EXPECT_EQ(at(1), "blas");
  problem.y = DType::bf16;
  problem.end = GemmEnd::gate;
  EXPECT_EQ(at(1), "separate operations");
  problem = product(1, {4096, 1088});  // halves of eight and a half slices
  problem.weight.in_halves = true;
  EXPECT_EQ(at(1), "in_order");
  problem.k = 1024;  // large takes sixteen slices at least
  EXPECT_EQ(at(4096), "mid");
}

// Shapes of Qwen3-8B, -14B and -4B, Qwen2.5-1.5B and Qwen3-0.6B.
TEST(GemmChoice, HalvesOfALargeWeightHaveABlockEach) {
  const auto tiles = [](int64_t rows, Shape w, const GemmGpu& gpu = kHopper) {
    GemmProblem problem = product(rows, w);
    problem.weight.in_halves = true;
    const std::string text = explain_gemm(problem, gpu);
    return text.substr(0, text.find(';'));
  };
  EXPECT_EQ(tiles(9, {4096, 12288}),
            "mid, 64 columns by 1 x 16 rows, 1 blocks of rows, a half of k each");
  EXPECT_EQ(tiles(64, {4096, 4096}),
            "mid, 64 columns by 1 x 64 rows, 1 blocks of rows, a half of k each");
  EXPECT_EQ(tiles(65, {4096, 4096}), "mid, 64 columns by 1 x 40 rows, 2 blocks of rows");
  EXPECT_EQ(tiles(33, {5120, 17408}),
            "mid, 96 columns by 1 x 40 rows, 1 blocks of rows, a half of k each");
  EXPECT_EQ(tiles(64, {2560, 9728}),
            "mid, 48 columns by 1 x 64 rows, 1 blocks of rows, a half of k each");
  // A quarter of the SMs would have no block; a small weight.
  EXPECT_EQ(tiles(16, {1536, 8960}), "skinny, 16 columns by 16 rows");
  EXPECT_EQ(tiles(64, {1024, 3072}), "mid, 32 columns by 1 x 64 rows, 1 blocks of rows");
  GemmGpu gpu = kHopper;
  gpu.own_sms = 32;
  EXPECT_EQ(tiles(64, {4096, 4096}, gpu).find("half"), std::string::npos);
}

TEST(GemmChoice, ASmallerGpuTakesTilesThatFillIt) {
  for (const int sms : {2, 16, 78, 114, 132})
    for (const int64_t rows : {1, 8, 64, 65, 200, 256, 1024}) {
      GemmGpu gpu = kHopper;
      gpu.num_sms = sms;
      for (const Shape w : {kSmallQkv, kLargeGateUp, Shape{151936, 1024}})
        EXPECT_NE(choose_gemm(product(rows, w), gpu).kernel, GemmKernel::none)
            << sms << " " << rows;
    }
}

TEST(GemmChoice, IsExplained) {
  EXPECT_EQ(explain_gemm(product(8, kSmallQkv), kHopper),
            "skinny, 32 columns by 8 rows; not wide (few rows), mid (few rows for such a weight)");
  EXPECT_EQ(explain_gemm(product(65, kSmallGateUp, GemmEnd::gate), kAmpere),
            "separate operations; not wide (needs sm_90a), mid (needs sm_90a), skinny (needs "
            "sm_90a), large (needs sm_90a), mma (many rows)");
}

}  // namespace
}  // namespace nanovllm
