// Paged causal attention against float64, and its exactness: a row's bits depend on its sequence
// and position alone.
#include "parity/attention_setting.h"

namespace nanovllm::parity {
namespace {

class AttentionParity : public ParityTest {
 protected:
  void expect_right(const Problem& problem, Layout layout = {}, bool in_place = false) {
    Setting setting(ops(), dtype(), problem, 7);
    if (ops().device().kind == Device::cuda && dtype() == DType::bf16) setting.allow(0x1p-8);
    setting.expect_right(setting.run(layout, in_place).get(), eps());
  }
};

TEST_P(AttentionParity, MatchesFloat64ForEveryHeadSize) {
  for (const int64_t d : {64, 80, 96, 128, 256})
    expect_right({4, 2, d, 16, {{1, 1}, {70, 70}, {131, 5}, {200, 1}}});
}

TEST_P(AttentionParity, MatchesFloat64ForEveryBlockSize) {
  for (const int64_t block : {8, 16, 32, 64, 128, 256})
    expect_right({2, 1, 64, block, {{300, 1}, {65, 65}, {8, 8}, {257, 40}}});
}

TEST_P(AttentionParity, MatchesFloat64ForEveryGroup) {
  for (const int64_t group : {1, 2, 3, 4, 5, 7, 8, 16, 20})
    expect_right({2 * group, 2, 64, 16, {{90, 90}, {140, 1}, {33, 3}}});
}

TEST_P(AttentionParity, MatchesFloat64InALargeBatch) {
  if (ops().device().kind != Device::cuda || dtype() != DType::bf16)
    GTEST_SKIP() << "only bf16 on a GPU has a kernel of its own for many rows";
  const std::vector<Sequence> sequences{{600, 600}, {500, 460}, {777, 1}, {70, 70}};
  expect_right({16, 4, 128, 16, sequences}, {.lead = 64, .trail = 256});
  expect_right({16, 2, 64, 64, sequences});
  expect_right({16, 8, 128, 64, sequences, 150}, {}, true);
}

TEST_P(AttentionParity, ReadsAndWritesStridedHeads) {
  expect_right({4, 2, 64, 16, {{40, 40}, {100, 3}}}, {.lead = 64, .trail = 256});
}

TEST_P(AttentionParity, MayOverwriteItsQueries) {
  expect_right({4, 2, 64, 16, {{40, 40}, {100, 3}}}, {}, true);
}

TEST_P(AttentionParity, SequencesWithoutRowsAreLegal) {
  expect_right({2, 1, 64, 16, {{5, 5}, {12, 0}, {9, 2}}});
}

TEST_P(AttentionParity, ARowHasTheSameBitsAloneAndInAnyBatch) {
  for (const int64_t d : {80, 128}) {
    const Sequence asked{333, 1};
    const Operand alone = Setting(ops(), dtype(), {8, 2, d, 16, {asked}}, 11, true, {5}).run();
    const std::vector<std::byte> want = alone.bits();
    const std::vector<Sequence> others{{100, 100}, asked, {64, 1}, {640, 7}};
    const std::vector<std::byte> all =
        Setting(ops(), dtype(), {8, 2, d, 16, others}, 11, true, {1, 5, 2, 3}).run().bits();
    const size_t row = want.size();
    EXPECT_TRUE(std::equal(want.begin(), want.end(), all.begin() + static_cast<int64_t>(100 * row)))
        << "head_dim " << d;
  }
}

TEST_P(AttentionParity, AChunkHasTheBitsOfTheWhole) {
  for (const int64_t d : {80, 128}) {
    const int64_t length = 210;
    const std::vector<std::byte> whole =
        Setting(ops(), dtype(), {6, 2, d, 16, {{length, length}}}, 13).run().bits();
    const size_t row = whole.size() / static_cast<size_t>(length);
    for (const Sequence chunk :
         {Sequence{1, 1}, {64, 64}, {65, 1}, {128, 27}, {200, 33}, {210, 1}, {210, 2}, {210, 17}}) {
      const std::vector<std::byte> got =
          Setting(ops(), dtype(), {6, 2, d, 16, {chunk}}, 13).run().bits();
      EXPECT_TRUE(std::equal(
          got.begin(), got.end(),
          whole.begin() +
              static_cast<int64_t>(static_cast<size_t>(chunk.context - chunk.rows) * row)))
          << chunk.rows << " rows up to " << chunk.context << ", head_dim " << d;
    }
  }
}

TEST_P(AttentionParity, AnInfiniteValueShowsOnlyInTheRowsThatSeeItsKey) {
  if (ops().device().kind != Device::cpu) GTEST_SKIP() << "writes to the cache by the host";
  constexpr int64_t kKey = 75, kLength = 100;
  for (const int64_t window : {0, 20}) {
    Setting setting(ops(), dtype(), {6, 2, 64, 16, {{kLength, kLength}}, window}, 13);
    const std::vector<std::byte> want = setting.run().bits();
    setting.make_infinite(kKey);
    const Operand run = setting.run();
    const std::vector<std::byte> got = run.bits();
    const Values values = run.get();
    const size_t row = got.size() / kLength;
    for (int64_t r = 0; r < kLength; ++r) {
      const int64_t at = r * static_cast<int64_t>(row);
      const bool sees = r >= kKey && (window == 0 || r < kKey + window);
      if (sees)
        EXPECT_FALSE(std::isfinite(values[static_cast<size_t>(r * 6 * 64)])) << "row " << r;
      else
        EXPECT_TRUE(std::equal(want.begin() + at, want.begin() + at + static_cast<int64_t>(row),
                               got.begin() + at))
            << "row " << r << ", window " << window;
    }
  }
}

TEST_P(AttentionParity, BlockSizeAndOrderDoNotShow) {
  const std::vector<Sequence> sequences{{150, 150}, {300, 1}};
  const std::vector<std::byte> want =
      Setting(ops(), dtype(), {4, 2, 128, 16, sequences}, 17).run().bits();
  for (const int64_t block : {8, 32, 64, 256})
    EXPECT_EQ(want,
              Setting(ops(), dtype(), {4, 2, 128, block, sequences}, 17, block != 32).run().bits())
        << "block size " << block;
}

TEST_P(AttentionParity, AWindowHidesWhatLiesBeforeIt) {
  for (const int64_t window : {1, 2, 17, 63, 64, 65, 100, 128, 500})
    expect_right({4, 2, 80, 16, {{1, 1}, {300, 1}, {200, 200}, {131, 5}, {129, 70}}, window});
  expect_right({2, 2, 128, 8, {{333, 40}, {64, 64}}, 20});
  for (const int64_t window : {63, 300, 511, 700})  // beyond a chunk of keys
    expect_right({4, 2, 64, 16, {{700, 1}, {513, 1}, {600, 70}, {33, 3}}, window});
  // Every sequence has one row: decode.
  for (const int64_t d : {64, 80, 96, 128, 256})
    for (const int64_t window : {1, 64, 300, 1000})
      expect_right({6, 2, d, 64, {{1, 1}, {64, 1}, {700, 1}, {1025, 1}}, window});
}

TEST_P(AttentionParity, AWindowedChunkHasTheBitsOfTheWhole) {
  const int64_t length = 210;
  for (const int64_t window : {5, 50, 64, 100}) {
    const std::vector<std::byte> whole =
        Setting(ops(), dtype(), {6, 2, 80, 16, {{length, length}}, window}, 13).run().bits();
    const size_t row = whole.size() / static_cast<size_t>(length);
    for (const Sequence chunk : {Sequence{64, 64}, {65, 1}, {128, 27}, {200, 33}, {210, 1}}) {
      const std::vector<std::byte> got =
          Setting(ops(), dtype(), {6, 2, 80, 64, {chunk}, window}, 13).run().bits();
      EXPECT_TRUE(std::equal(
          got.begin(), got.end(),
          whole.begin() +
              static_cast<int64_t>(static_cast<size_t>(chunk.context - chunk.rows) * row)))
          << chunk.rows << " rows up to " << chunk.context << ", window " << window;
    }
  }
}

TEST_P(AttentionParity, AWindowThatNothingOutgrowsDoesNotShow) {
  const std::vector<Sequence> sequences{{150, 150}, {300, 1}};
  EXPECT_EQ(Setting(ops(), dtype(), {4, 2, 64, 16, sequences, 300}, 17).run().bits(),
            Setting(ops(), dtype(), {4, 2, 64, 16, sequences}, 17).run().bits());
}

NANOVLLM_PARITY(AttentionParity);

}  // namespace
}  // namespace nanovllm::parity
