// A KV cache of E4M3 numbers against its definition in float64 (docs/contract.md), and attention's
// exactness over it.
#include "parity/attention_setting.h"

namespace nanovllm::parity {
namespace {

constexpr auto kOwn = Problem::own_scales, kStatic = Problem::static_scales;

class E4m3CacheParity : public ParityTest {
 protected:
  void SetUp() override {
    ParityTest::SetUp();
    if (!IsSkipped() && !ops().has_e4m3_cache()) GTEST_SKIP() << "no cache of E4M3 here";
  }
  void expect_right(Problem problem, Layout layout = {}, bool in_place = false) {
    for (const auto cache : {kOwn, kStatic}) {
      problem.cache = cache;
      Setting setting(ops(), dtype(), problem, 7);
      if (ops().device().kind == Device::cuda && dtype() == DType::bf16) setting.allow(0x1p-8);
      setting.expect_right(setting.run(layout, in_place).get(), eps());
    }
  }
  std::vector<std::byte> bits(Problem problem, uint32_t seed, std::vector<uint32_t> ids = {}) {
    problem.cache = kOwn;
    return Setting(ops(), dtype(), problem, seed, true, std::move(ids)).run().bits();
  }
};

TEST_P(E4m3CacheParity, MatchesFloat64ForEveryHeadSize) {
  for (const int64_t d : {64, 80, 96, 128, 256})
    expect_right({4, 2, d, 16, {{1, 1}, {70, 70}, {131, 5}, {200, 1}}});
}

TEST_P(E4m3CacheParity, MatchesFloat64InALargeBatch) {
  if (ops().device().kind != Device::cuda || dtype() != DType::bf16)
    GTEST_SKIP() << "only bf16 on a GPU has a kernel of its own for many rows";
  const std::vector<Sequence> sequences{{600, 600}, {500, 460}, {777, 1}, {70, 70}};
  for (const int64_t d : {64, 128}) {
    expect_right({16, 4, d, 16, sequences}, {.lead = 64, .trail = 256});
    expect_right({16, 4, d, 64, sequences, 100}, {.lead = 64, .trail = 256});
  }
}

TEST_P(E4m3CacheParity, MatchesFloat64ForEveryBlockSizeAndGroup) {
  for (const int64_t block : {8, 16, 32, 64, 128, 256})
    expect_right({2, 1, 64, block, {{300, 1}, {65, 65}, {8, 8}, {257, 40}}});
  for (const int64_t group : {1, 2, 3, 4, 5, 7, 8, 16, 20})
    expect_right({2 * group, 2, 64, 16, {{90, 90}, {140, 1}, {33, 3}}});
}

TEST_P(E4m3CacheParity, MatchesFloat64WithinAWindow) {
  for (const int64_t window : {1, 17, 64, 65, 128, 500})
    expect_right({4, 2, 80, 16, {{1, 1}, {300, 1}, {200, 200}, {131, 5}, {129, 70}}, window});
}

TEST_P(E4m3CacheParity, TakesStridedHeadsAndMayOverwriteItsQueries) {
  expect_right({4, 2, 64, 16, {{40, 40}, {100, 3}}}, {.lead = 64, .trail = 256});
  expect_right({4, 2, 64, 16, {{40, 40}, {100, 3}}}, {}, true);
}

TEST_P(E4m3CacheParity, ARowHasTheSameBitsAloneInAnyBatchAndInAnyChunk) {
  for (const int64_t d : {80, 128}) {
    const Sequence asked{333, 1};
    const auto want = bits({8, 2, d, 16, {asked}}, 11, {5}),
               all = bits({8, 2, d, 16, {{100, 100}, asked, {64, 1}, {640, 7}}}, 11, {1, 5, 2, 3});
    EXPECT_TRUE(
        std::equal(want.begin(), want.end(), all.begin() + static_cast<int64_t>(100 * want.size())))
        << "head_dim " << d;
    for (const int64_t window : {0, 50}) {
      const int64_t length = 210;
      const auto whole = bits({6, 2, d, 16, {{length, length}}, window}, 13);
      const auto row = static_cast<int64_t>(whole.size()) / length;
      for (const Sequence chunk :
           {Sequence{1, 1}, {64, 64}, {65, 1}, {128, 27}, {200, 33}, {210, 2}}) {
        const auto got = bits({6, 2, d, 16, {chunk}, window}, 13);
        EXPECT_TRUE(
            std::equal(got.begin(), got.end(), whole.begin() + (chunk.context - chunk.rows) * row))
            << chunk.rows << " rows up to " << chunk.context << ", head_dim " << d << ", window "
            << window;
      }
    }
  }
}

TEST_P(E4m3CacheParity, BlockSizeAndOrderDoNotShow) {
  const std::vector<Sequence> sequences{{150, 150}, {300, 1}};
  const auto want = bits({4, 2, 128, 16, sequences}, 17);
  for (const int64_t block : {8, 32, 64, 256})
    EXPECT_EQ(want, bits({4, 2, 128, block, sequences}, 17)) << "block size " << block;
}

TEST_P(E4m3CacheParity, ARowThatIsNotFiniteShowsOnlyInTheRowsThatSeeItsKey) {
  constexpr int64_t kKey = 75, kLength = 100;
  for (const auto cache : {kOwn, kStatic})
    for (const int64_t window : {0, 20}) {
      Setting setting(ops(), dtype(), {6, 2, 64, 16, {{kLength, kLength}}, window, cache}, 13);
      const std::vector<std::byte> want = setting.run().bits();
      setting.store_infinity(kKey);
      const Operand run = setting.run();
      const std::vector<std::byte> got = run.bits();
      const Values values = run.get();
      const auto row = static_cast<int64_t>(got.size()) / kLength;
      for (int64_t r = 0; r < kLength; ++r)
        if (r >= kKey && (window == 0 || r < kKey + window))
          EXPECT_TRUE(std::isnan(values[static_cast<size_t>(r * 6 * 64)])) << "row " << r;
        else
          EXPECT_TRUE(std::equal(want.begin() + r * row, want.begin() + (r + 1) * row,
                                 got.begin() + r * row))
              << "row " << r << ", window " << window;
    }
}

NANOVLLM_PARITY(E4m3CacheParity);

}  // namespace
}  // namespace nanovllm::parity
