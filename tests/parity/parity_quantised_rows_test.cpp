// Products that quantise the rows of x as well (docs/contract.md), against that definition.
#include <algorithm>
#include <limits>
#include <random>

#include <fmt/format.h>

#include "parity/quantised_rows.h"

namespace nanovllm::parity {
namespace {

TEST_P(QuantisedRowsParity, MatchesFloat64) {
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 16, 128},
                                {1, 48, 384},
                                {2, 33, 256},
                                {3, 8, 1024},
                                {4, 130, 640},
                                {5, 64, 512},
                                {17, 72, 1152},
                                {39, 50, 96},
                                {33, 16, 192},
                                {70, 24, 256},
                                {1, 7, 33},
                                {6, 40, 200},
                                {140, 264, 384},
                                {140, 384, 256},
                                {530, 16, 128}})
    for (const WeightFormat format : formats(k))
      for (const DType y_type : {DType::bf16, DType::f32}) expect_right(format, m, n, k, y_type);
}

// Rows so few or many, narrow or wide, that a GPU quantises them in each of its ways.
TEST_P(QuantisedRowsParity, RowsOfEveryWidthMatchFloat64) {
  for (const auto& [m, k] : {std::array<int64_t, 2>{2, 4096},
                             {2, 5120},
                             {2, 12800},
                             {300, 1280},
                             {260, 3072},
                             {260, 12800}})
    expect_right({WeightFormat::int8, k, Rows::token}, m, 8, k, DType::f32);
}

// Every scale that bf16 numbers can make, and sums that leave 24 bits.
TEST_P(QuantisedRowsParity, MatchesFloat64OverTheRangeOfNumbers) {
  for (const double spread : {1e-30, 1e-9, 1e4, 1e30})
    for (const WeightFormat format : formats(256))
      expect_right(format, 2, 16, 256, DType::f32, spread);
  expect_right({WeightFormat::int8, 1 << 17, Rows::token}, 1, 8, 1 << 17, DType::f32);
}

/// Products of integers whose sum has 31 bits: exact to the last.
TEST_P(QuantisedRowsParity, SumsOfIntegersAreExact) {
  constexpr int64_t k = 1 << 17;
  const WeightFormat format(WeightFormat::int8, k, Rows::token);
  if (!ops().keeps(format, 8, k)) GTEST_SKIP() << "no rows as long";
  QuantizedRows rows;
  rows.numbers.assign(8 * k, -128);
  // Every block's sum has a last place that a sum in f32 would round, always upwards.
  for (int64_t c = 0; c < k; c += 128) rows.numbers[static_cast<size_t>(c)] = -127;
  rows.scales.assign(8, 1);
  const Kept w = load(format, 8, k, std::move(rows));
  const Operand x(ops(), DType::bf16, {1, k}, Values(k, 127.0)), y(ops(), DType::f32, {1, 8});
  ops().gemm(y, x, w.view);
  ops().synchronize();
  const double all = -128.0 * 127 * k;
  Values want(8, static_cast<float>(all));
  want[0] = static_cast<float>(all + 127.0 * (k / 128));
  expect_equal(y.get(), want, "sums");
}

/// Numbers at the ends of their ranges, in any number of rows and columns.
TEST_P(QuantisedRowsParity, ProductsOfTheLargestIntegersAreExact) {
  constexpr int kRows[] = {127, -127, 126, 127, -1};
  // One number in `one_in` is near the end of its range, the others are from -120 to 120.
  const auto expect_exact = [&](WeightFormat format, int64_t m, int64_t n, int64_t k,
                                uint32_t one_in = 1) {
    if (!ops().keeps(format, n, k)) return;
    std::mt19937 random(static_cast<uint32_t>(k));
    const bool all_large = k % 2 == 1, is_int4 = format.numbers == WeightFormat::int4;
    const int least = is_int4 ? -8 : -128, most = is_int4 ? 7 : 127, large = is_int4 ? most : least;
    const int weights[] = {least, least + 1, most, least, 1, 0, -1};
    QuantizedRows rows;
    for (int64_t i = 0; i < n * k; ++i)
      rows.numbers.push_back(static_cast<int8_t>(all_large ? large : weights[random() % 7]));
    rows.scales.assign(static_cast<size_t>(n * format.groups(k)), 1);
    Values x, want;
    for (int64_t i = 0; i < m * k; ++i)
      x.push_back(all_large                ? (i / k % 2 ? 127 : -127)
                  : random() % one_in == 0 ? kRows[random() % 5]
                                           : static_cast<int>(random() % 241) - 120);
    for (int64_t i = 0; i < m; ++i) {
      x[static_cast<size_t>(i * k)] = 127;  // the largest magnitude: scales are 1
      for (int64_t j = 0; j < n; ++j) {
        int64_t sum = 0;
        for (int64_t c = 0; c < k; ++c)
          sum += static_cast<int64_t>(x[static_cast<size_t>(i * k + c)]) *
                 rows.numbers[static_cast<size_t>(j * k + c)];
        want.push_back(static_cast<float>(sum));
      }
    }
    const Kept w = load(format, n, k, std::move(rows));
    const Operand x_operand(ops(), DType::bf16, {m, k}, x, Layout{.lead = 8, .trail = 16}),
        y(ops(), DType::f32, {m, n}, Layout{.lead = 8, .trail = 8});
    ops().gemm(y, x_operand, w.view);
    ops().synchronize();
    expect_equal(y.get(), want, fmt::format("{} bits, {} x {} x {}", format.bits(), m, n, k));
    y.expect_guards("y");
  };
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 17, 1},
                                {2, 16, 2},
                                {3, 33, 3},
                                {4, 5, 5},
                                {5, 16, 31},
                                {6, 48, 130},
                                {7, 16, 127},
                                {40, 33, 65},
                                {53, 100, 1003},
                                {7, 40, 128},
                                {300, 264, 1152},
                                {3, 4, (1 << 17) - 1}}) {
    expect_exact({WeightFormat::int8, k, Rows::token}, m, n, k);
    expect_exact({WeightFormat::int4, k, Rows::token}, m, n, k);
  }
  // Groups' sums in f32 are exact below 2^24.
  for (const int64_t group : {32, 64, 128})
    for (const int64_t m : {1, 2, 3, 4, 5, 35})
      expect_exact({WeightFormat::int4, group, Rows::token}, m, 50, 3 * group);
  // Rows of which a CPU's tiles have none, few and many such numbers, and rows behind the tiles.
  for (const int64_t m : {64, 131, 203})
    for (const uint32_t one_in : {1, 20, 100, 1 << 20})
      expect_exact({WeightFormat::int4, 128, Rows::token}, m, 40 + m % 2 * 60, 512, one_in);
}

TEST_P(QuantisedRowsParity, ARowHasTheSameBitsInAnyProduct) {
  constexpr int64_t m = 531, n = 256, k = 384;  // blocks of rows and columns, the last cut
  for (const WeightFormat format : formats(k)) {
    if (!ops().keeps(format, n, k)) continue;
    const Kept w = random_weight(format, n, k);
    const Operand x(ops(), DType::bf16, {m, k}, random_values(DType::bf16, m * k, 9));
    const Operand all(ops(), DType::bf16, {m, n});
    ops().gemm(all, x, w.view);
    ops().synchronize();
    const auto want = all.bits();
    for (const int64_t rows : {1, 2, 3, 4, 5, 16, 33, 64, 65, 100, 128, 129, 200, 300})
      for (const int64_t first : {int64_t{0}, int64_t{3}, int64_t{200}, m - rows}) {
        const Operand some(ops(), DType::bf16, {rows, n});
        ops().gemm(some, x.view().rows(first, first + rows), w.view);
        ops().synchronize();
        const auto got = some.bits();
        ASSERT_TRUE(std::equal(got.begin(), got.end(), want.begin() + first * n * 2))
            << rows << " rows from " << first << ", " << format.bits() << " bits, groups of "
            << format.group << ", rows are " << static_cast<int>(format.rows);
      }
  }
}

// Of halves of k each is a product of its own, and y is their sum (docs/contract.md).
TEST_P(QuantisedRowsParity, InHalvesAProductIsTheSumOfBothHalvesProducts) {
  const WeightFormat format(WeightFormat::e4m3, kRowGroup, Rows::group);
  for (const auto& [n, k] :
       {std::array<int64_t, 2>{8, 256}, {72, 512}, {264, 1280}, {1024, 3072}, {4096, 1536}}) {
    if (n > 264 && !is_gpu()) continue;
    if (!ops().keeps(format, n, k)) GTEST_SKIP() << ops().name() << " has no such product";
    WeightFormat in_halves = format;
    in_halves.in_halves = true;
    const Kept both = random_weight(in_halves, n, k);
    std::vector<Kept> half;
    for (int64_t i = 0; i < 2; ++i) {
      const auto part = [&](const auto& from) {
        std::remove_cvref_t<decltype(from)> to;
        const int64_t columns = static_cast<int64_t>(from.size()) / n;
        for (int64_t c = 0; c < n * columns; ++c)
          if (c % columns / (columns / 2) == i) to.push_back(from[static_cast<size_t>(c)]);
        return to;
      };
      half.push_back(
          load(format, n, k / 2, {part(both.rows.numbers), part(both.rows.scales), {}, 0}));
    }
    const int64_t most = is_gpu() ? 531 : 65;
    const Operand x(ops(), DType::bf16, {most, k}, random_values(DType::bf16, most * k, 9));
    for (const DType y_type : {DType::bf16, DType::f32}) {
      const Operand want(ops(), y_type, {most, n}), second(ops(), y_type, {most, n});
      for (int64_t i = 0; i < 2; ++i) {
        const Values all = x.get();
        Values columns;
        for (int64_t c = 0; c < most * k; ++c)
          if (c % k / (k / 2) == i) columns.push_back(all[static_cast<size_t>(c)]);
        const Operand of_half(ops(), DType::bf16, {most, k / 2}, columns);
        ops().gemm(i == 0 ? want : second, of_half, half[static_cast<size_t>(i)].view);
        ops().synchronize();
      }
      ops().add(want, second);
      ops().synchronize();
      const Values sums = want.get();
      for (const int64_t m : {1, 3, 9, 16, 17, 40, 65, 100, 128, 129, 200, 256, 300, 531})
        for (const int64_t behind : {0, 1, 8}) {  // rows that begin anywhere, and on 16 bytes
          if (m > most || (y_type == DType::f32 && behind != 1)) continue;
          const Operand y(ops(), y_type, {m, n}, Layout{.lead = 8, .trail = behind});
          ops().gemm(y, x.view().rows(0, m), both.view);
          ops().synchronize();
          expect_equal(y.get(), Values(sums.begin(), sums.begin() + m * n),
                       fmt::format("{} rows, {} x {}, {}", m, n, k, behind));
          y.expect_guards("y");
        }
    }
  }
}

// The gate at a product's end gives what operations one after another give.
TEST_P(QuantisedRowsParity, GatedProductsHaveTheBitsOfSeparateOperations) {
  for (const int64_t n : {256, 1152, 96})
    for (const WeightFormat format : formats(384)) {
      if (!ops().keeps(format, n, 384)) continue;
      const Kept w = random_weight(format, n, 384);
      for (const int64_t m : {1, 7, 16, 40, 64, 130, 411}) {
        const Operand x(ops(), DType::bf16, {m, 384}, random_values(DType::bf16, m * 384, 2)),
            gate_up(ops(), DType::bf16, {m, n}), room(ops(), DType::bf16, {m, n}),
            want(ops(), DType::bf16, {m, n / 2}), y(ops(), DType::bf16, {m, n / 2});
        ops().gemm(gate_up, x, w.view);
        ops().silu_and_mul(want, gate_up);
        ops().gemm_silu_and_mul(y, room, x, w.view);
        ops().synchronize();
        ASSERT_EQ(y.bits(), want.bits()) << m << " rows, " << n << ", " << int(format.rows);
      }
    }
}

// A norm that knows the product of its rows gives it the rows that separate operations give.
TEST_P(QuantisedRowsParity, NormsForAReaderGiveTheBitsOfSeparateOperations) {
  constexpr int64_t n = 128;
  for (const auto& [m, k] : {std::array<int64_t, 2>{1, 4096},
                             {9, 384},
                             {9, 1024},
                             {130, 2048},
                             {40, 2560},
                             {300, 4096},
                             {9, 5120},
                             {40, 8192},
                             {1030, 1024},
                             {1030, 4096},
                             {1030, 5120},
                             {1030, 8192}}) {
    if (m * k > 2'000'000 && !is_gpu()) continue;
    Values x = random_values(DType::bf16, m * k, static_cast<uint32_t>(m));
    const Values stream(x.rbegin(), x.rend());
    if (m > 1) {
      std::fill_n(x.begin() + k, k, 0.0);
      x[static_cast<size_t>(3 * k + 200)] = std::numeric_limits<double>::infinity();
    }
    const Operand norm(ops(), DType::bf16, {k}, random_values(DType::bf16, k, 4));
    for (const WeightFormat format : formats(k)) {
      if (!ops().keeps(format, n, k)) continue;
      const Kept w = random_weight(format, n, k);
      const auto run = [&](const nanovllm::Weight& reader) {
        const Operand rows(ops(), DType::bf16, {m, k}, x), sum(ops(), DType::bf16, {m, k}, stream),
            y(ops(), DType::bf16, {m, n});
        ops().add_rms_norm(rows, sum, rows, norm, 1e-6f, reader);
        ops().gemm(y, rows, w.view);
        ops().synchronize();
        rows.expect_guards("x");
        sum.expect_guards("residual");
        return std::pair{y.bits(), sum.bits()};
      };
      ASSERT_TRUE(run(w.view) == run({})) << m << " rows of " << k << ", " << int(format.rows);
    }
  }
}

NANOVLLM_PARITY_BACKENDS(QuantisedRowsParity);

}  // namespace
}  // namespace nanovllm::parity
