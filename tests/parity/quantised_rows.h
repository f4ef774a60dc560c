// Products that quantise the rows of x as well, by docs/contract.md's definition: numbers by search
// among all E4M3 numbers, sums in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>

#include <fmt/format.h>

#include "parity/e4m3.h"
#include "parity/harness.h"

namespace nanovllm::parity {

using Rows = WeightFormat::Rows;

/// The nearest E4M3 number, ties to the even one, of at most 448.
inline double nearest_e4m3(float value) {
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

inline QuantisedRow quantised(WeightFormat format, const Values& x, int64_t row, int64_t k,
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

}  // namespace nanovllm::parity
