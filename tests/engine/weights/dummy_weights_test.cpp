// Random weights: of the seed alone, of the right spread, and the same matrices for all ranks.
#include <cmath>

#include <gtest/gtest.h>

#include "engine/weights/weight_loader_rig.h"
#include "layers/linear.h"

namespace nanovllm {
namespace {

TEST_F(WeightLoaderTest, RandomWeightsAreTheSeedsAndOfTheRightSpread) {
  const auto draw = [&](uint64_t seed) {
    RecordingBackend backend;
    std::vector<std::byte> storage(1 << 20);
    WeightLoader loader(backend, DType::f32, {}, storage.data());
    find_architecture(config_.architecture).make(config_, {loader, {}});
    loader.load_dummy(seed, {});
    return backend.loaded;
  };
  const auto first = draw(1);
  EXPECT_EQ(draw(1), first);
  EXPECT_NE(draw(2), first);
  double sum = 0, squares = 0, count = 0;
  for (const auto& tensor : first) {
    if (tensor.shape.size() == 1) continue;
    for (const float x : tensor.values) sum += x, squares += static_cast<double>(x) * x, ++count;
  }
  ASSERT_GT(count, 1000);
  // Normal with sigma 0.02: five standard errors of the mean and of the variance.
  EXPECT_NEAR(sum / count, 0, 5 * 0.02 / std::sqrt(count));
  EXPECT_NEAR(squares / count, 0.0004, 5 * 0.0004 * std::sqrt(2 / count));
  EXPECT_EQ(first[1].values, std::vector<float>(6, 1.0f));   // a norm
  EXPECT_EQ(first[3].values, std::vector<float>(48, 0.0f));  // the biases of q, k and v
}

TEST_F(WeightLoaderTest, RanksHaveSlicesOfTheSameRandomMatrices) {
  constexpr int64_t kRows = 12, kColumns = 10;
  const auto draw = [&](Shard shard, int64_t row_begin, int64_t row_end, int64_t col_begin,
                        int64_t col_end, int64_t rows) {
    RecordingBackend backend;
    std::vector<std::byte> storage(1 << 12);
    WeightLoader loader(backend, DType::f32, shard, storage.data());
    loader.matrix({{"a.weight", {kRows, kColumns}, row_begin, row_end, col_begin, col_end}}, rows,
                  (col_end < 0 ? kColumns : col_end) - col_begin);
    loader.load_dummy(5, {});
    return backend.loaded.at(0).values;
  };
  const auto whole = draw({}, 0, -1, 0, -1, kRows);
  const auto lower = draw({1, 2}, 5, kRows, 0, -1, kRows - 5);
  EXPECT_EQ(lower, std::vector<float>(whole.begin() + 5 * kColumns, whole.end()));
  const auto right = draw({1, 2}, 0, -1, 4, kColumns, kRows);
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t c = 4; c < kColumns; ++c)
      EXPECT_EQ(right[static_cast<size_t>(row * 6 + c - 4)],
                whole[static_cast<size_t>(row * kColumns + c)]);
  const auto padded = draw({1, 2}, 8, kRows, 0, -1, 8);
  EXPECT_EQ(padded[0], whole[8 * kColumns]);
  EXPECT_EQ(padded[4 * kColumns], 0.0f);
}

}  // namespace
}  // namespace nanovllm
