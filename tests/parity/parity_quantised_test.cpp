// Products with quantised weights: the bits of the product with the bf16 numbers that they stand
// for (docs/contract.md), which are computed here from that definition.
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include <fmt/format.h>

#include "parity/e4m3.h"
#include "parity/harness.h"

namespace nanovllm::parity {
namespace {

struct Scales {
  const char* name;
  float low, high;
};

QuantizedRows random_rows(WeightFormat format, int64_t n, int64_t k, Scales scales) {
  std::mt19937 random(static_cast<uint32_t>(n * 131 + k));
  QuantizedRows rows;
  const bool is_int4 = format.numbers == WeightFormat::int4;
  for (int64_t i = 0; i < n * k; ++i) {
    const auto bits = static_cast<uint8_t>(random() >> 24);
    rows.numbers.push_back(is_int4 ? static_cast<int8_t>(bits % 16 - 8)
                                   : static_cast<int8_t>((bits & 0x7f) == 0x7f ? 0 : bits));
  }
  std::uniform_real_distribution<float> exponent(std::log2(scales.low), std::log2(scales.high));
  for (int64_t i = 0; i < n * format.groups(k); ++i) {
    float scale = std::exp2(exponent(random));
    // Half of them with few bits, as f16 and bf16 scales are: their products meet ties.
    if (i % 2) scale = static_cast<float>(bf16(scale));
    rows.scales.push_back(scale);
    if (format.has_zeros())
      rows.zeros.push_back(static_cast<int8_t>(is_int4 ? random() % 16 - 8 : random() >> 24));
  }
  return rows;
}

/// bf16(scale * (q - zero)), row-major.
std::vector<bf16> meaning_of(WeightFormat format, int64_t n, int64_t k, const QuantizedRows& rows) {
  std::vector<bf16> out;
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < k; ++c) {
      const int8_t q = rows.numbers[static_cast<size_t>(r * k + c)];
      const auto at = static_cast<size_t>(r * format.groups(k) + c / format.group);
      const float number = format.numbers == WeightFormat::e4m3
                               ? e4m3_value(static_cast<uint8_t>(q))
                               : static_cast<float>(q) - static_cast<float>(rows.zeros[at]);
      // The product of two f32 numbers is exact in double, and rounded once to f32.
      out.emplace_back(static_cast<float>(static_cast<double>(rows.scales[at]) * number));
    }
  return out;
}

class QuantisedParity : public BackendTest {
 protected:
  void expect_same_bits(WeightFormat format, int64_t n, int64_t k, Scales scales) {
    if (!ops().keeps(format, n, k)) return;
    ++kept_;
    const QuantizedRows rows = random_rows(format, n, k, scales);
    const Buffer quantised = ops().allocate(ops().weight_bytes(format, n, k)),
                 plain = ops().allocate(ops().weight_bytes(WeightFormat::bf16, n, k));
    const nanovllm::Weight w = ops().weight_view(quantised.get(), format, n, k),
                           same = ops().weight_view(plain.get(), WeightFormat::bf16, n, k);
    ops().load_quantised(w, rows);
    std::vector<bf16> numbers = meaning_of(format, n, k, rows);
    const Tensor part(numbers.data(), DType::bf16, {n, k});
    ops().load(same.data, {&part, 1});
    for (const int64_t m : {1, 2, 3, 4, 5, 33, 65, 130, 256, 530}) {
      if (m > 5 && m * n * k > 30'000'000) continue;
      if (n % 16 == 0) expect_same_gated(format, w, same, m);
      for (const DType y_type : {DType::bf16, DType::f32}) {
        const Operand x(ops(), DType::bf16, {m, k}, random_values(DType::bf16, m * k, 1),
                        Layout{.lead = m % 3, .trail = 5});
        const Operand got(ops(), y_type, {m, n}, Layout{.lead = 3, .trail = 1}),
            want(ops(), y_type, {m, n}, Layout{.lead = 3, .trail = 1});
        ops().gemm(got, x, w);
        ops().gemm(want, x, same);
        ops().synchronize();
        ASSERT_TRUE(got.bits() == want.bits())
            << fmt::format("{} bits, groups of {}, {} x {} x {}, {}", format.bits(), format.group,
                           m, n, k, scales.name);
        got.expect_guards("y");
      }
    }
  }
  /// Of a weight of gates and ups.
  void expect_same_gated(WeightFormat format, const nanovllm::Weight& w,
                         const nanovllm::Weight& same, int64_t m) {
    const int64_t n = w.n() / 2, k = w.k();
    const Operand x(ops(), DType::bf16, {m, k}, random_values(DType::bf16, m * k, 2)),
        room(ops(), DType::bf16, {m, 2 * n}), got(ops(), DType::bf16, {m, n}),
        want(ops(), DType::bf16, {m, n});
    ops().gemm_silu_and_mul(got, room, x, w);
    ops().gemm_silu_and_mul(want, room, x, same);
    ops().synchronize();
    ASSERT_TRUE(got.bits() == want.bits()) << fmt::format(
        "gated, {} bits, groups of {}, {} x {} x {}", format.bits(), format.group, m, 2 * n, k);
  }
  int kept_ = 0;
};

TEST_P(QuantisedParity, HasTheBitsOfTheWeightsThatItStandsFor) {
  constexpr Scales kUsual{"usual scales", 1e-4f, 1e-1f},
      kAll{"all scales", kLeastScale, kMostScale * 0.99f};
  for (const auto numbers : {WeightFormat::int4, WeightFormat::int8, WeightFormat::e4m3}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 64},
                               {16, 128},
                               {33, 192},
                               {48, 160},
                               {77, 224},
                               {130, 1056},
                               {256, 1024},
                               {300, 3072}})
      for (const int64_t group : {32, 64, 128})
        if (k % group == 0) expect_same_bits({numbers, group}, n, k, kUsual);
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{5, 33}, {40, 8}, {64, 200}, {100, 1001}})
      expect_same_bits({numbers, k}, n, k, kUsual);
    expect_same_bits({numbers, 32}, 64, 256, kAll);
    expect_same_bits({numbers, 256}, 64, 256, kAll);
  }
  if (kept_ == 0) GTEST_SKIP() << ops().name() << " keeps no quantised weights";
}

NANOVLLM_PARITY_BACKENDS(QuantisedParity);

}  // namespace
}  // namespace nanovllm::parity
