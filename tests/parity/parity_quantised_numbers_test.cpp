// The numbers and scales of rows that a product quantises (docs/contract.md), against that
// definition: a product with the unit matrix shows them.
#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "parity/quantised_rows.h"

namespace nanovllm::parity {
namespace {

class QuantisedNumbersParity : public QuantisedRowsParity {};

TEST_P(QuantisedNumbersParity, NumbersAreTheNearestOfE4M3) {
  constexpr int64_t k = 128;
  const WeightFormat format(WeightFormat::e4m3, k, Rows::tensor);
  if (!ops().keeps(format, k, k)) GTEST_SKIP() << ops().name() << " quantises no rows to E4M3";
  const Kept w = unit_matrix(format, k, 1);
  // (x, its number), from OCP's table of E4M3: largest 448, least normal 2^-6, least 2^-9.
  const std::vector<std::pair<double, double>> known = {{0, 0},
                                                        {1, 1},
                                                        {-1.5, -1.5},
                                                        {1.0625, 1},
                                                        {1.1875, 1.25},
                                                        {1.3125, 1.25},
                                                        {17, 16},
                                                        {19, 20},
                                                        {-19, -20},
                                                        {240, 240},
                                                        {432, 448},
                                                        {424, 416},
                                                        {447, 448},
                                                        {448, 448},
                                                        {464, 448},
                                                        {500, 448},
                                                        {-1e4, -448},
                                                        {3e38, 448},
                                                        {0x1p-6, 0x1p-6},
                                                        {0x1p-9, 0x1p-9},
                                                        {0x1p-10, 0},
                                                        {0x1.8p-9, 0x1p-8},
                                                        {0x1.4p-8, 0x1p-8},
                                                        {0x1.cp-8, 0x1p-7},
                                                        {0x1.1p-10, 0x1p-9},
                                                        {-0x1p-10, 0},
                                                        {0x1p-11, 0},
                                                        {1e-38, 0},
                                                        {0x1.fp-7, 0x1p-6},
                                                        {0x1.dp-7, 0x1.cp-7}};
  Values x = random_values(DType::bf16, 40 * k, 5, 3), want;
  for (size_t i = 0; i < known.size(); ++i) x[i] = round_to(DType::bf16, known[i].first);
  for (const double v : x) want.push_back(nearest_e4m3(static_cast<float>(v)));
  for (size_t i = 0; i < known.size(); ++i) EXPECT_EQ(want[i], known[i].second) << known[i].first;
  const Operand x_operand(ops(), DType::bf16, {40, k}, x), y(ops(), DType::f32, {40, k});
  ops().gemm(y, x_operand, w.view);
  ops().synchronize();
  expect_equal(y.get(), want, "numbers");
}

// Quotients that are nearly halfway between two numbers: of every mantissa of a row's largest, and
// by scales that are as near as f32 has them to what makes it the middle.
TEST_P(QuantisedNumbersParity, QuotientsNearTheMiddleOfTwoNumbersAreThoseOfDivision) {
  constexpr int64_t k = 128;
  const auto compare = [&](Rows rows_are, const Values& x, float input_scale) {
    const WeightFormat format(WeightFormat::e4m3, k, rows_are);
    if (!ops().keeps(format, k, k)) return;
    const Kept w = unit_matrix(format, k, input_scale);
    const int64_t m = static_cast<int64_t>(x.size()) / k;
    Values want;
    for (int64_t i = 0; i < m; ++i) {
      const QuantisedRow row = quantised(format, x, i, k, input_scale);
      for (const double q : row.numbers) want.push_back(static_cast<float>(q) * row.scales[0]);
    }
    const Operand x_operand(ops(), DType::bf16, {m, k}, x), y(ops(), DType::f32, {m, k});
    ops().gemm(y, x_operand, w.view);
    ops().synchronize();
    expect_equal(y.get(), want, fmt::format("numbers times scales, {}", input_scale));
  };
  // A middle for each column, from 2^-7 to 992.
  const auto middle = [](int64_t c) {
    return std::ldexp(17 + 2 * static_cast<double>(c % 8), static_cast<int>(c / 8 % 16) - 11);
  };
  Values x;
  for (int64_t i = 0; i < 128; ++i) {
    const double most = std::ldexp(128 + static_cast<double>(i), static_cast<int>(i % 40) - 20);
    x.push_back(most);
    for (int64_t c = 1; c < k; ++c)
      x.push_back(round_to(DType::bf16, std::min(middle(c) * most / 448, most) * (c % 2 ? 1 : -1)));
  }
  for (const Rows rows_are : {Rows::token, Rows::group}) compare(rows_are, x, 0);
  for (int64_t i = 0; i < 128; i += 5) {
    const double number = std::ldexp(128 + static_cast<double>(i), static_cast<int>(i % 40) - 30);
    const auto nearest = static_cast<float>(number / middle(i % 8 + 64));
    for (const float scale :
         {std::nextafter(nearest, 0.0f), nearest, std::nextafter(nearest, 1e30f)}) {
      Values row;
      for (int64_t c = 0; c < k; ++c)
        row.push_back(c % 2 ? std::ldexp(number, static_cast<int>(c / 2 % 12) - 4)
                            : round_to(DType::bf16, middle(c) * double{scale}));
      compare(Rows::tensor, row, scale);
    }
  }
}

TEST_P(QuantisedNumbersParity, ARowOfZerosGivesZerosAndAFaultStaysInItsRow) {
  constexpr int64_t m = 13, n = 72, k = 256;  // tiles of many rows and of few, the last panel cut
  const double infinity = std::numeric_limits<double>::infinity(),
               nan = std::numeric_limits<double>::quiet_NaN();
  for (const WeightFormat format : formats(k)) {
    if (!ops().keeps(format, n, k)) continue;
    const Kept w = random_weight(format, n, k);
    Values x = random_values(DType::bf16, m * k, 3);
    const Operand whole(ops(), DType::bf16, {m, k}, x), sound(ops(), DType::f32, {m, n});
    ops().gemm(sound, whole, w.view);
    std::fill_n(x.begin() + 1 * k, k, 0.0);
    x[2 * k + 200] = infinity;
    x[4 * k] = nan;
    x[5 * k + 130] = -infinity;
    const Operand faulty(ops(), DType::bf16, {m, k}, x), y(ops(), DType::f32, {m, n});
    ops().gemm(y, faulty, w.view);
    const Operand short_y(ops(), DType::bf16, {m, n});
    ops().gemm(short_y, faulty, w.view);
    ops().synchronize();
    const Values got = y.get(), before = sound.get(), rounded = short_y.get();
    for (int64_t r = 0; r < m; ++r)
      for (int64_t c = 0; c < n; ++c) {
        const auto at = static_cast<size_t>(r * n + c);
        if (r == 1)
          EXPECT_EQ(got[at], 0);
        else if (r == 2 || r == 4 || r == 5)
          EXPECT_TRUE(std::isnan(got[at])) << "row " << r << " has " << got[at];
        else
          EXPECT_EQ(got[at], before[at]) << "row " << r;
        if (std::isnan(got[at]))
          EXPECT_TRUE(std::isnan(rounded[at])) << "row " << r << " has " << rounded[at];
        else
          EXPECT_EQ(rounded[at], round_to(DType::bf16, got[at])) << "row " << r;
      }
  }
}

NANOVLLM_PARITY_BACKENDS(QuantisedNumbersParity);

}  // namespace
}  // namespace nanovllm::parity
