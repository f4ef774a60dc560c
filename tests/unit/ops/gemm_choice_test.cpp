// The choice of a product's kernel, without a GPU: the thresholds that measurements set
// (docs/performance/tried.md), at their edges, for the shapes of Qwen3-0.6B and -8B.
#include <algorithm>

#include <gtest/gtest.h>

#include "ops/cuda/gemm/choose.h"
#include "ops/cuda/gemm/gemm_kernels.h"
#include "ops/cuda/quantised/fp8_kernels.h"
#include "ops/cuda/quantised/w8a8_kernels.h"

namespace nanovllm {
namespace {

constexpr GemmGpu kHopper{
    .has_wgmma = true, .has_tma = true, .num_sms = 132, .shared_bytes = 227 * 1024};
constexpr GemmGpu kAmpere{.num_sms = 108, .shared_bytes = 163 * 1024},
    kAda{.num_sms = 128, .shared_bytes = 99 * 1024};

struct Shape {
  int64_t n, k;
};
// Of 8, 12, 48 and 192 MB.
constexpr Shape kSmallQkv{4096, 1024}, kSmallGateUp{6144, 1024}, kLargeQkv{6144, 4096},
    kLargeGateUp{24576, 4096};

GemmProblem product(int64_t rows, Shape w, GemmEnd end = GemmEnd::store, DType y = DType::bf16) {
  return {.end = end, .y = y, .rows = rows, .n = w.n, .k = w.k};
}
std::string served_by(const GemmProblem& problem, const GemmGpu& gpu = kHopper) {
  return name_of(choose_gemm(problem, gpu).kernel);
}
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
  EXPECT_EQ(by_rows(kSmallQkv, GemmEnd::store, 700), "skinny 1..64 mid 65..256 blas 257..700");
  EXPECT_EQ(by_rows(kSmallGateUp, GemmEnd::gate, 700),
            "skinny 1..64 mid 65..256 separate operations 257..700");
  EXPECT_EQ(by_rows(kLargeQkv, GemmEnd::store, 700),
            "skinny 1..8 mid 9..256 blas 257..700");  // no wide tile keeps enough SMs busy
  EXPECT_EQ(by_rows(kLargeGateUp, GemmEnd::gate, 128),
            "skinny 1..8 mid 9..64 wide 65..112 mid 113..128");
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
  gpu.share = SmShare::divided;
  gpu.own_sms = 32;
  EXPECT_EQ(by_rows(kSmallQkv, GemmEnd::heads, 300, gpu),
            "mid 1..256 separate operations 257..300");
  EXPECT_EQ(by_rows(kLargeGateUp, GemmEnd::gate, 256, gpu), "mid 1..256");
  gpu.share = SmShare::mixed;
  EXPECT_EQ(by_rows(kSmallQkv, GemmEnd::store, 256, gpu), "skinny 1..64 blas 65..256");
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

TEST(GemmChoice, OfQuantisedRows) {
  for (const auto rows : {WeightFormat::Rows::token, WeightFormat::Rows::group}) {
    const auto explained = [&](GemmProblem problem, bool is_even = true) {
      problem.weight = {WeightFormat::e4m3, 128, rows};
      problem.is_even = is_even;
      return explain_gemm(problem, kHopper);
    };
    EXPECT_EQ(explained(product(1, kLargeQkv)),
              "fp8, 64 rows of the weight by 8 rows, 1 blocks of rows");
    EXPECT_EQ(explained(product(64, kLargeGateUp, GemmEnd::gate)),
              "fp8, 64 rows of the weight by 64 rows, 1 blocks of rows");
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
    EXPECT_EQ(explained(product(8, {4096, 2048}, GemmEnd::send)), "separate operations");
    // y of half the columns: halves whose scales do not begin on 16 bytes.
    EXPECT_EQ(explained(product(8, {96, 1024}, GemmEnd::gate)),
              "separate operations; not fp8 (columns not in 32s), w8a8 (its sums are not fp8's)");
  }
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

TEST(GemmChoice, OfWeightsInHalves) {
  GemmProblem problem = product(1, {4096, 12288});
  const auto at = [&](int64_t rows, const GemmGpu& gpu = kHopper) {
    problem.rows = rows;
    return served_by(problem, gpu);
  };
  // As those of whole weights, but in place of cuBLASLt.
  for (const int64_t rows : {1, 8, 9, 128, 200, 256, 257, 767, 1024, 1536, 4096}) {
    problem.weight.in_halves = false;
    const std::string whole = at(rows);
    problem.weight.in_halves = true;
    EXPECT_EQ(at(rows), whole == "blas" ? "mid" : whole) << rows;
  }
  // The rows of skinny's tiles with either half are the 64 of one operand.
  int64_t most[2] = {};
  for (const bool in_halves : {false, true})
    for (int64_t n = 1024; n <= 4096; n += 1024)
      for (int64_t rows = 1; rows <= 64; ++rows) {
        GemmProblem small = product(rows, {n, 1024});
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

/// A barrier's phase is taken for the next but one: whoever waits for a turn's stage must know that
/// the stage's turn before has been filled (a group) or read (a copier).
TEST(GemmChoice, StagesOfTurnsAreNeverARoundBehind) {
  constexpr int kTurns = 64;
  for (const int chains : {1, 2})
    for (int room = 1; room <= 20; ++room) {
      const int stages = turn_stages(room, chains), copiers = std::min(kPackedCopiers, stages);
      ASSERT_TRUE(stages >= kMostPackedGroups && stages <= kMostTurnStages) << room;
      // ended[t]: the turns that have ended when turn t has, of its chain and of its group.
      std::vector<std::vector<bool>> ended(kTurns, std::vector<bool>(kTurns));
      for (int t = 0; t < kTurns; ++t) {
        ended[t][t] = true;
        for (const int before : {t - chains, t - kMostPackedGroups})
          for (int i = 0; before >= 0 && i < kTurns; ++i)
            if (ended[before][i]) ended[t][i] = true;
      }
      const auto knows = [&](int turn, int of) { return of < 0 || (turn >= 0 && ended[turn][of]); };
      for (int t = 0; t < kTurns; ++t) {
        EXPECT_TRUE(knows(t - kMostPackedGroups, t - stages)) << stages << " stages, turn " << t;
        EXPECT_TRUE(knows(t - copiers - stages, t - 2 * stages)) << stages << " stages, copy " << t;
      }
    }
}

TEST(GemmChoice, OfPackedWeightsInHalves) {
  for (const auto numbers : {WeightFormat::int4, WeightFormat::int8, WeightFormat::e4m3}) {
    GemmProblem problem = product(1, {4096, 12288});
    problem.weight = WeightFormat(numbers, 128);
    problem.weight.in_halves = true;
    for (const int64_t rows : {1, 16, 33, 256}) {
      problem.rows = rows;
      EXPECT_EQ(served_by(problem, kHopper), "packed") << rows;
      EXPECT_EQ(served_by(problem, kAmpere), "mma") << rows;
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
