// The same of quantised weights (gemm_choice_test.cpp).
#include <algorithm>

#include <gtest/gtest.h>

#include "ops/cuda/gemm/gemm_kernels.h"
#include "ops/cuda/quantised/fp8_kernels.h"
#include "ops/cuda/quantised/w8a8_kernels.h"
#include "unit/ops/gemm_problem.h"

namespace nanovllm {
namespace {

TEST(GemmChoice, OfQuantisedWeights) {
  for (const auto numbers : {WeightFormat::int4, WeightFormat::int8, WeightFormat::e4m3}) {
    const auto served = [&](GemmProblem problem) {
      problem.weight = {numbers, 128};
      return served_by(problem);
    };
    EXPECT_EQ(served(product(1, kLargeQkv)), "packed");
    EXPECT_EQ(served(product(64, kLargeGateUp, GemmEnd::gate)), "packed");
    EXPECT_EQ(served(product(256, kLargeQkv)), "packed");
    EXPECT_EQ(served(product(257, kLargeQkv)), "unpacked");
    EXPECT_EQ(served(product(2048, kLargeGateUp, GemmEnd::gate)), "unpacked");
    // No kernel of plain weights gates them: the weight is unpacked for the operation before.
    EXPECT_EQ(served(product(300, kSmallGateUp, GemmEnd::gate)), "separate operations");
    EXPECT_EQ(served(product(8, kLargeQkv, GemmEnd::store, DType::f32)), "unpacked");
    EXPECT_EQ(served(product(8, kLargeQkv, GemmEnd::heads)), "separate operations");
    EXPECT_EQ(served(product(128, {4096, 2048}, GemmEnd::send)), "separate operations");
    GemmProblem uneven = product(1, kLargeQkv);
    uneven.is_even = false;
    EXPECT_EQ(served(uneven), "unpacked");
  }
}

TEST(GemmChoice, OfQuantisedWeightsOnOtherGpus) {
  for (const GemmGpu& gpu : {kAmpere, kAda})
    for (const auto numbers : {WeightFormat::int4, WeightFormat::int8, WeightFormat::e4m3})
      for (const int64_t group : {32, 128, 4096}) {
        const auto served = [&](GemmProblem problem) {
          problem.weight = {numbers, group};
          return served_by(problem, gpu);
        };
        EXPECT_EQ(served(product(1, kLargeQkv)), "mma");
        EXPECT_EQ(served(product(256, kLargeGateUp, GemmEnd::gate)), "mma");
        EXPECT_EQ(served(product(257, kLargeQkv)), "unpacked");
        // No kernel of plain weights gates there.
        EXPECT_EQ(served(product(257, kLargeGateUp, GemmEnd::gate)), "separate operations");
        EXPECT_EQ(served(product(8, kLargeQkv, GemmEnd::store, DType::f32)), "unpacked");
        EXPECT_EQ(served(product(8, kLargeQkv, GemmEnd::heads)), "separate operations");
        EXPECT_EQ(served(product(8, {8, 4096})), "mma");
        GemmProblem uneven = product(1, kLargeQkv);
        uneven.is_even = false;
        EXPECT_EQ(served(uneven), "unpacked");
      }
}

// Weights of few rows get a warp for each eight of them, so that every SM has work; batches are cut
// where that gives more warps a part.
TEST(GemmChoice, OfTilesOfPackedWeights) {
  const auto explained = [](GemmProblem problem) {
    problem.weight = {WeightFormat::int4, 128};
    GemmGpu gpu = kAmpere;
    gpu.num_sms = 132;  // where its cycles were measured
    return explain_gemm(problem, gpu);
  };
  const std::string rest = "; not packed (needs sm_90a)";
  EXPECT_EQ(explained(product(1, {4096, 12288})),
            "mma, 4 warps by 8 rows of the weight by 8 rows, 1 blocks of rows" + rest);
  EXPECT_EQ(explained(product(1, kLargeQkv)),
            "mma, 3 warps by 16 rows of the weight by 8 rows, 1 blocks of rows" + rest);
  EXPECT_EQ(explained(product(64, {4096, 12288})),
            "mma, 4 warps by 16 rows of the weight by 32 rows, 2 blocks of rows" + rest);
  EXPECT_EQ(explained(product(64, kLargeGateUp, GemmEnd::gate)),
            "mma, 12 warps by 16 rows of the weight by 64 rows, 1 blocks of rows" + rest);
}

TEST(GemmChoice, OfQuantisedRows) {
  for (const auto rows : {WeightFormat::Rows::token, WeightFormat::Rows::group}) {
    const auto explained = [&](GemmProblem problem, bool is_even = true) {
      problem.weight = {WeightFormat::e4m3, 128, rows};
      problem.is_even = is_even;
      return explain_gemm(problem, kHopper);
    };
    EXPECT_EQ(explained(product(1, kLargeQkv)),
              "fp8, 64 rows of the weight by 8 rows, 1 blocks of rows");
    // Each tile more that an SM takes has a beginning and an end: a rank's half is one for 96 SMs.
    EXPECT_EQ(explained(product(64, kLargeGateUp, GemmEnd::gate)),
              "fp8, 128 rows of the weight by 64 rows, 1 blocks of rows");
    EXPECT_EQ(explained(product(32, {12288, 4096}, GemmEnd::gate)),
              "fp8, 128 rows of the weight by 128 rows, 1 blocks of rows");
    EXPECT_EQ(explained(product(8, kLargeQkv, GemmEnd::store, DType::f32)),
              "fp8, 64 rows of the weight by 8 rows, 1 blocks of rows");
    // 6144 rows of the weight are 128 tiles of 96 by 128, or by two blocks of 64 rows.
    EXPECT_EQ(explained(product(128, kLargeQkv)),
              "fp8, 96 rows of the weight by 64 rows, 2 blocks of rows");
    EXPECT_EQ(explained(product(256, kLargeQkv)),
              "fp8, 96 rows of the weight by 128 rows, 2 blocks of rows");
    EXPECT_EQ(explained(product(256, {4096, 12288})),
              "fp8, 128 rows of the weight by 64 rows, 4 blocks of rows");
    // The halves of such a tile are no pieces of 16 bytes.
    EXPECT_EQ(explained(product(128, kLargeQkv, GemmEnd::gate)),
              "fp8, 128 rows of the weight by 64 rows, 2 blocks of rows");
    EXPECT_EQ(explained(product(4096, kLargeQkv)),
              "fp8, 128 rows of the weight by 128 rows, 32 blocks of rows");
    // Scales that differ within 64 rows of the weight.
    EXPECT_EQ(explained(product(4096, kLargeQkv), false),
              "fp8, 64 rows of the weight by 32 rows, 128 blocks of rows");
    EXPECT_EQ(explained(product(8, kLargeQkv, GemmEnd::heads)), "separate operations");
    EXPECT_EQ(explained(product(96, {4096, 2048}, GemmEnd::send)),
              "separate operations; not fp8 (few rows)");
    EXPECT_EQ(explained(product(97, {4096, 2048}, GemmEnd::send)),
              "fp8, 64 rows of the weight by 64 rows, 2 blocks of rows");
    EXPECT_EQ(explained(product(97, {4096, 2048}, GemmEnd::send), false),
              "separate operations; not fp8 (scales within a group of rows)");
    // y of half the columns: halves whose scales do not begin on 16 bytes.
    EXPECT_EQ(explained(product(8, {96, 1024}, GemmEnd::gate)),
              "separate operations; not fp8 (columns not in 32s), w8a8 (its sums are not fp8's)");
  }
}

// Two blocks with half of k each have a chain half as long, which counts where tiles are few.
TEST(GemmChoice, OfQuantisedRowsInHalves) {
  const auto is_by_pairs = [](GemmProblem problem, bool in_halves = true) {
    problem.weight = {WeightFormat::e4m3, 128, WeightFormat::Rows::group};
    problem.weight.in_halves = in_halves;
    return explain_gemm(problem, kHopper).ends_with(", a half of k each");
  };
  for (const int64_t rows : {64, 96, 128, 192, 256}) {
    EXPECT_TRUE(is_by_pairs(product(rows, {4096, 12288}))) << rows;
    EXPECT_FALSE(is_by_pairs(product(rows, {4096, 12288}), false)) << rows;
    EXPECT_FALSE(is_by_pairs(product(rows, {4096, 12288}, GemmEnd::store, DType::f32))) << rows;
  }
  EXPECT_FALSE(is_by_pairs(product(16384, {4096, 12288})));
}

/// Rows of a weight whose scales a tile takes for the same have them within 64 rows, wherever the
/// tile begins.
TEST(GemmChoice, TilesOfQuantisedRowsTakeEachScaleFromItsOwn64Rows) {
  for (Fp8Tile tile : kFp8Tiles)
    for (const bool gated : {false, true}) {
      tile.gated = gated;
      if (!tile.has_rows_first() || (gated && !tile.can_be_gated())) continue;
      const int units = tile.columns / tile.parts() / kFp8Unit, even = tile.even_units(),
                of_64 = kFp8Height / kFp8Unit;
      EXPECT_EQ(units % even, 0);
      for (int at = 0; at < 16; ++at)
        for (int unit = 0; unit < units; ++unit)
          EXPECT_EQ((at * units + unit / even * even) / of_64, (at * units + unit) / of_64)
              << tile.columns << " columns, gated " << gated << ", eight " << unit;
    }
}

// The tiles that were the fastest, or within 3 % of it, of all on an H100.
TEST(GemmChoice, OfIntegersOnHopper) {
  const auto tiles = [](GemmProblem problem) {
    problem.weight = {WeightFormat::int8, problem.k, WeightFormat::Rows::token};
    const std::string text = explain_gemm(problem, kHopper);
    return text.starts_with("int8, ") ? text.substr(6) : text;
  };
  const Shape o{4096, 4096};
  EXPECT_EQ(tiles(product(1, kLargeQkv)), "64 rows of the weight by 8 rows, 1 blocks of rows");
  EXPECT_EQ(tiles(product(1, o)), "48 rows of the weight by 8 rows, 1 blocks of rows");
  EXPECT_EQ(tiles(product(16, {4096, 12288})),
            "48 rows of the weight by 16 rows, 1 blocks of rows");
  EXPECT_EQ(tiles(product(32, kLargeQkv)), "64 rows of the weight by 64 rows, 1 blocks of rows");
  EXPECT_EQ(tiles(product(96, o)), "64 rows of the weight by 64 rows, 2 blocks of rows");
  EXPECT_EQ(tiles(product(128, kLargeGateUp, GemmEnd::gate)),
            "64 rows of the weight by 128 rows, 1 blocks of rows");
  EXPECT_EQ(tiles(product(256, kLargeGateUp, GemmEnd::gate)),
            "128 rows of the weight by 128 rows, 2 blocks of rows");
  EXPECT_EQ(tiles(product(512, o)), "128 rows of the weight by 128 rows, 4 blocks of rows");
  EXPECT_EQ(tiles(product(512, kLargeGateUp, GemmEnd::gate)),
            "256 rows of the weight by 128 rows, 4 blocks of rows");
  EXPECT_EQ(tiles(product(16384, kLargeQkv)),
            "256 rows of the weight by 128 rows, 128 blocks of rows");
  // Pairs of blocks share rows, but for long ones.
  const auto items = [](GemmProblem problem) {
    problem.weight = {WeightFormat::int8, problem.k, WeightFormat::Rows::token};
    return choose_gemm(problem, kHopper).fp8.items;
  };
  EXPECT_EQ(items(product(16384, kLargeQkv)), 128 * 24 / 2);
  EXPECT_EQ(items(product(16384, {4096, 12288})), 128 * 16);
  EXPECT_EQ(items(product(1024, kLargeQkv)), 8 * 24);
  EXPECT_EQ(tiles(product(8, kLargeQkv, GemmEnd::store, DType::f32)),
            "64 rows of the weight by 8 rows, 1 blocks of rows");
  EXPECT_EQ(tiles(product(8, kLargeQkv, GemmEnd::heads)), "separate operations");
  EXPECT_EQ(tiles(product(8, {24, 1024}, GemmEnd::gate)),
            "separate operations; not int8 (columns not in eights), w8a8 (columns not in eights)");
}

// Without wgmma int8 everywhere, E4M3 where tensor cores take it: more rows, larger tiles.
TEST(GemmChoice, OfQuantisedRowsByTheOlderTensorCores) {
  const auto explained = [](GemmProblem problem, WeightFormat::Numbers numbers, GemmGpu gpu) {
    problem.weight = {numbers, problem.k, WeightFormat::Rows::token};
    gpu.num_sms = 132;
    return explain_gemm(problem, gpu);
  };
  GemmGpu ada = kAda;
  ada.has_e4m3 = true;
  for (const auto& [numbers, gpu, before] :
       {std::tuple(WeightFormat::int8, kAmpere, "; not int8 (needs sm_90a)"),
        {WeightFormat::e4m3, ada, "; not fp8 (needs sm_90a)"}}) {
    const auto tile = [&](GemmProblem problem) { return explained(problem, numbers, gpu); };
    const auto text = [&](const char* tiles) { return "w8a8, " + std::string(tiles) + before; };
    EXPECT_EQ(tile(product(1, kLargeQkv)),
              text("32 rows of the weight by 8 rows, 1 blocks of rows"));
    EXPECT_EQ(tile(product(9, kLargeGateUp, GemmEnd::gate)),
              text("32 rows of the weight by 16 rows, 1 blocks of rows"));
    EXPECT_EQ(tile(product(64, kLargeQkv, GemmEnd::store, DType::f32)),
              text("64 rows of the weight by 64 rows, 1 blocks of rows"));
    EXPECT_EQ(tile(product(64, {4096, 12288})),
              text("32 rows of the weight by 64 rows, 1 blocks of rows"));
    EXPECT_EQ(tile(product(64, kLargeGateUp, GemmEnd::gate)),
              text("128 rows of the weight by 64 rows, 1 blocks of rows"));
    EXPECT_EQ(tile(product(4096, kLargeQkv)),
              numbers == WeightFormat::int8
                  ? text("128 rows of the weight by 256 rows, 16 blocks of rows")
                  : text("128 rows of the weight by 128 rows, 32 blocks of rows"));
    EXPECT_EQ(tile(product(8, kLargeQkv, GemmEnd::heads)), "separate operations");
    GemmProblem halved = product(8, {24, 1024}, GemmEnd::gate);
    EXPECT_TRUE(tile(halved).ends_with("w8a8 (columns not in eights)")) << tile(halved);
  }
  EXPECT_EQ(explained(product(8, kLargeQkv), WeightFormat::e4m3, kAmpere),
            "separate operations; not fp8 (needs sm_90a), w8a8 (needs sm_89)");
}

TEST(GemmChoice, RingsOfQuantisedRowsFitEveryGpu) {
  for (const size_t shared_bytes : {99u, 163u, 227u})
    for (const W8a8Tile& tile : kW8a8Tiles) {
      const int stages = w8a8_stages(tile, shared_bytes * 1024);
      EXPECT_GE(stages, 2) << tile.columns << " x " << tile.rows << ", " << shared_bytes << " KB";
      EXPECT_LE(stages, kMostByteStages);
      EXPECT_LE(static_cast<size_t>(stages * tile.stage_bytes()), shared_bytes * 1024);
    }
}

/// A barrier's phase is taken for the next but one: whoever waits for a turn's stage must know that
/// the stage's turn before has been filled (a group) or read (a copier).
TEST(GemmChoice, StagesOfTurnsAreNeverARoundBehind) {
  for (int room = 1; room <= 20; ++room) {
    const int stages = turn_stages(room), copiers = std::min(kPackedCopiers, stages);
    EXPECT_LE(stages, kMostTurnStages) << room;
    // A group's turn before, and all before that, have ended; a copier has seen that one ended.
    EXPECT_LE(kMostPackedGroups, stages) << room;
    EXPECT_LE(copiers + stages, 2 * stages) << room;
  }
}

// A cluster's two blocks have all rows of a tile, and half of k each.
TEST(GemmChoice, OfTilesOfPackedWeightsInHalves) {
  const auto explained = [](int64_t rows, int num_sms) {
    GemmProblem problem = product(rows, {4096, 12288});
    problem.weight = {WeightFormat::int4, 128};
    problem.weight.in_halves = true;
    GemmGpu gpu = kHopper;
    gpu.num_sms = num_sms;
    return explain_gemm(problem, gpu);
  };
  EXPECT_EQ(explained(16, 132), "packed, 4 warps by 16 rows of the weight, 1 blocks of rows");
  EXPECT_EQ(explained(128, 132), "packed, 4 warps by 16 rows of the weight, 1 blocks of rows");
  EXPECT_EQ(explained(16, 128), explained(16, 132));
}

TEST(GemmChoice, OfPackedWeightsInHalves) {
  for (const auto numbers : {WeightFormat::int4, WeightFormat::int8, WeightFormat::e4m3}) {
    GemmProblem problem = product(1, {4096, 12288});
    problem.weight = WeightFormat(numbers, 128);
    problem.weight.in_halves = true;
    for (const int64_t k : {11008, 12288})
      for (const int64_t rows : {1, 16, 33, 256}) {
        problem.k = k;
        problem.rows = rows;
        EXPECT_EQ(served_by(problem, kHopper), "packed") << rows << " " << k;
        EXPECT_EQ(served_by(problem, kAmpere), "mma") << rows << " " << k;
      }
    problem.k = 1152;  // halves of four and a half records
    EXPECT_EQ(served_by(problem, kHopper), "unpacked");
    EXPECT_EQ(served_by(problem, kAmpere), "unpacked");
    problem.k = 12288;
    problem.y = DType::f32;
    EXPECT_EQ(served_by(problem, kHopper), "unpacked");
    problem.y = DType::bf16;
    problem.end = GemmEnd::gate;
    EXPECT_EQ(served_by(problem, kHopper), "separate operations");
  }
}

}  // namespace
}  // namespace nanovllm
