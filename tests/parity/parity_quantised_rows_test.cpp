// Products that quantise the rows of x as well (docs/contract.md), against that definition: numbers
// by search among all E4M3 numbers, sums in float64.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include <fmt/format.h>

#include "parity/e4m3.h"
#include "parity/harness.h"

namespace nanovllm::parity {
namespace {

using Rows = WeightFormat::Rows;

/// The nearest E4M3 number, ties to the even one, of at most 448.
double nearest_e4m3(float value) {
  const double magnitude = std::min(std::abs(double{value}), 448.0);
  uint8_t best = 0;
  for (uint8_t bits = 1; bits < 0x7f; ++bits) {
    const double now = std::abs(magnitude - e4m3_value(bits)),
                 before = std::abs(magnitude - e4m3_value(best));
    if (now < before || (now == before && bits % 2 == 0)) best = bits;
  }
  return std::copysign(e4m3_value(best), value);
}

/// A row's numbers, and the scale of each of its groups.
struct QuantisedRow {
  Values numbers;
  std::vector<float> scales;
};

QuantisedRow quantised(WeightFormat format, const Values& x, int64_t row, int64_t k,
                       float input_scale) {
  QuantisedRow out;
  const bool is_int8 = format.numbers != WeightFormat::e4m3;
  const int64_t group = format.rows == Rows::group ? format.group : k;
  for (int64_t first = 0; first < k; first += group) {
    const auto begin = static_cast<size_t>(row * k + first),
               end = static_cast<size_t>(row * k + std::min(first + group, k));
    float most = 0x1p-100f;
    for (size_t i = begin; i < end; ++i) most = std::max(most, std::abs(static_cast<float>(x[i])));
    const float scale = format.rows == Rows::tensor ? input_scale : most / (is_int8 ? 127 : 448);
    out.scales.push_back(scale);
    for (size_t i = begin; i < end; ++i) {
      const float quotient = static_cast<float>(x[i]) / scale;
      out.numbers.push_back(is_int8 ? std::nearbyint(double{quotient}) : nearest_e4m3(quotient));
    }
  }
  return out;
}

class QuantisedRowsParity : public BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (!IsSkipped() && !ops().keeps({WeightFormat::int8, 128, Rows::token}, 128, 128))
      GTEST_SKIP() << ops().name() << " does not quantise rows";
  }
  bool is_gpu() const { return ops().device().kind != Device::cpu; }

  /// A weight that the backend keeps.
  struct Kept {
    Buffer buffer;
    nanovllm::Weight view;
    QuantizedRows rows;
  };
  Kept load(WeightFormat format, int64_t n, int64_t k, QuantizedRows rows) {
    Kept w{ops().allocate(ops().weight_bytes(format, n, k)), {}, std::move(rows)};
    w.view = ops().weight_view(w.buffer.get(), format, n, k);
    ops().load_quantised(w.view, w.rows);
    return w;
  }
  Kept random_weight(WeightFormat format, int64_t n, int64_t k) {
    std::mt19937 random(static_cast<uint32_t>(n * 131 + k));
    QuantizedRows rows;
    for (int64_t i = 0; i < n * k; ++i) {
      const auto bits = static_cast<uint8_t>(random() >> 24);
      const bool is_nan = format.numbers == WeightFormat::e4m3 && (bits & 0x7f) == 0x7f,
                 is_int4 = format.numbers == WeightFormat::int4;
      rows.numbers.push_back(static_cast<int8_t>(is_nan ? 0 : is_int4 ? bits % 16 - 8 : bits));
    }
    std::uniform_real_distribution<float> exponent(-12, -4);
    const int64_t groups = format.groups(k);
    for (int64_t i = 0; i < n * groups; ++i)  // of blocks of 128 rows, where rows have groups
      rows.scales.push_back(format.rows == Rows::group && i / groups % 128 != 0
                                ? rows.scales[static_cast<size_t>(i - groups)]
                                : std::exp2(exponent(random)));
    if (format.rows == Rows::tensor) rows.input_scale = 0.011f;
    return load(format, n, k, std::move(rows));
  }
  /// k rows of k, a product with which shows the numbers of a row times their scale.
  Kept unit_matrix(WeightFormat format, int64_t k, float input_scale = 0) {
    QuantizedRows rows;
    rows.numbers.assign(static_cast<size_t>(k * k), 0);
    for (int64_t i = 0; i < k; ++i) rows.numbers[static_cast<size_t>(i * k + i)] = 0x38;  // 1
    rows.scales.assign(static_cast<size_t>(k), 1);
    rows.input_scale = input_scale;
    return load(format, k, k, std::move(rows));
  }
  static double number(WeightFormat format, int8_t q) {
    return format.numbers == WeightFormat::e4m3 ? e4m3_value(static_cast<uint8_t>(q)) : q;
  }

  /// Within a block of columns additions keep 24 bits on a CPU; in a GPU's tensor core 14 below the
  /// largest of what is added.
  double block_error() const { return 128 * (is_gpu() ? 0x1p-13 : 0x1p-24); }

  void expect_right(WeightFormat format, int64_t m, int64_t n, int64_t k, DType y_type,
                    double spread = 1) {
    if (!ops().keeps(format, n, k)) return;
    const Kept w = random_weight(format, n, k);
    const Values x = random_values(DType::bf16, m * k, static_cast<uint32_t>(m + k), spread);
    const Operand x_operand(ops(), DType::bf16, {m, k}, x, Layout{.lead = 8, .trail = 16});
    const Operand y(ops(), y_type, {m, n}, Layout{.lead = 8, .trail = 8});
    ops().gemm(y, x_operand, w.view);
    ops().synchronize();
    const bool is_e4m3 = format.numbers == WeightFormat::e4m3;
    const int64_t groups = format.groups(k), blocks = is_e4m3 ? (k + 127) / 128 : groups;
    const double rounding = y_type == DType::f32 ? 0x1p-24 : 0x1p-8;
    Values want, bound;
    for (int64_t i = 0; i < m; ++i) {
      const QuantisedRow row = quantised(format, x, i, k, w.rows.input_scale);
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, magnitude = 0;
        for (int64_t c = 0; c < k; ++c) {
          const auto g = static_cast<size_t>(c / format.group);
          const double term = row.numbers[static_cast<size_t>(c)] *
                              number(format, w.rows.numbers[static_cast<size_t>(j * k + c)]) *
                              row.scales[format.rows == Rows::group ? g : 0] *
                              w.rows.scales[static_cast<size_t>(j * groups) + g];
          sum += term;
          magnitude += std::abs(term);
        }
        want.push_back(sum);
        // Sums of integers are exact, but float64's of scaled ones; f32 rounds each group's or
        // block's, its scale, and the end.
        const double sums = is_e4m3      ? block_error() + 0x1p-24 * static_cast<double>(blocks)
                            : groups > 1 ? 0x1p-24 * static_cast<double>(blocks)
                                         : 0x1p-48;
        bound.push_back((rounding + 3 * 0x1p-24) * std::abs(sum) +
                        (sums + (groups > 1 ? 3 * 0x1p-24 : 0)) * magnitude + 1e-37);
      }
    }
    expect_close(
        y.get(), want, [&](size_t i) { return bound[i]; },
        fmt::format("{} bits {} x {} x {}, groups of {}, rows {}", format.bits(), m, n, k,
                    format.group, static_cast<int>(format.rows)));
    y.expect_guards("y");
    x_operand.expect_guards("x");
  }

  static std::vector<WeightFormat> formats(int64_t k) {
    std::vector<WeightFormat> list = {{WeightFormat::e4m3, k, Rows::token},
                                      {WeightFormat::e4m3, k, Rows::tensor},
                                      {WeightFormat::int8, k, Rows::token},
                                      {WeightFormat::int4, k, Rows::token}};
    if (k % 128 == 0) list.push_back({WeightFormat::e4m3, 128, Rows::group});
    for (const int64_t group : {32, 64, 128})
      if (k % group == 0 && k > group) list.push_back({WeightFormat::int4, group, Rows::token});
    return list;
  }
};

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
  const auto expect_exact = [&](WeightFormat format, int64_t m, int64_t n, int64_t k) {
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
      x.push_back(all_large ? (i / k % 2 ? 127 : -127) : kRows[random() % 5]);
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
}

TEST_P(QuantisedRowsParity, NumbersAreTheNearestOfE4M3) {
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
TEST_P(QuantisedRowsParity, QuotientsNearTheMiddleOfTwoNumbersAreThoseOfDivision) {
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

TEST_P(QuantisedRowsParity, ARowOfZerosGivesZerosAndAFaultStaysInItsRow) {
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
