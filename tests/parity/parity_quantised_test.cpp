// Products with quantised weights: the bits of the product with the bf16 numbers that they stand
// for (docs/contract.md), which are computed here from that definition.

#include <fmt/format.h>

#include "parity/harness.h"
#include "parity/quantised.h"

namespace nanovllm::parity {
namespace {

class QuantisedParity : public BackendTest {
 protected:
  void expect_same_bits(WeightFormat format, int64_t n, int64_t k, Scales scales) {
    if (!ops().keeps(format, n, k)) return;
    ++kept_;
    const QuantizedRows rows = random_rows(format, n, k, scales);
    WeightFormat of_same = WeightFormat::bf16;
    of_same.in_halves = format.in_halves;
    const Buffer quantised = ops().allocate(ops().weight_bytes(format, n, k)),
                 plain = ops().allocate(ops().weight_bytes(of_same, n, k));
    const nanovllm::Weight w = ops().weight_view(quantised.get(), format, n, k),
                           same = ops().weight_view(plain.get(), of_same, n, k);
    ops().load_quantised(w, rows);
    std::vector<bf16> numbers = meaning_of(format, n, k, rows);
    const Tensor part(numbers.data(), DType::bf16, {n, k});
    ops().load(same.data, {&part, 1});
    for (const int64_t m : {1, 2, 3, 4, 5, 20, 32, 33, 65, 130, 256, 530}) {
      if (m > 5 && m * n * k > 30'000'000) continue;
      if (n % 16 == 0 && !format.in_halves) expect_same_gated(format, w, same, m);
      for (const DType y_type : {DType::bf16, DType::f32}) {
        // Dense rows have the fast kernels of a GPU.
        const Operand x(ops(), DType::bf16, {m, k}, random_values(DType::bf16, m * k, 1),
                        m % 2 == 0 ? Layout{} : Layout{.lead = m % 3, .trail = 5});
        const Operand got(ops(), y_type, {m, n}, Layout{.lead = 3, .trail = 1}),
            want(ops(), y_type, {m, n}, Layout{.lead = 3, .trail = 1});
        ops().gemm(got, x, w);
        ops().gemm(want, x, same);
        ops().synchronize();
        ASSERT_TRUE(got.bits() == want.bits())
            << fmt::format("{} bits, groups of {}, {} x {} x {}, {}{}", format.bits(), format.group,
                           m, n, k, scales.name, format.in_halves ? ", in halves" : "");
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
      kAll{"all scales", kLeastScale, kMostScale * 0.99f},
      kPlain{"bf16 scales", kLeastScale, kMostScale * 0.99f, true};
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
    for (const int64_t group : {32, 64, 256})
      for (const int64_t n : {16, 100, 256}) expect_same_bits({numbers, group}, n, 256, kPlain);
    expect_same_bits({numbers, 32}, 64, 256, kAll);
    expect_same_bits({numbers, 256}, 64, 256, kAll);
  }
  if (kept_ == 0) GTEST_SKIP() << ops().name() << " keeps no quantised weights";
}

// Of the plain weight's halves GemmParity shows what they are.
TEST_P(QuantisedParity, InHalvesItHasTheBitsOfThePlainWeightInHalves) {
  constexpr Scales kUsual{"usual scales", 1e-4f, 1e-1f},
      kPlain{"bf16 scales", kLeastScale, kMostScale * 0.99f, true};
  for (const auto numbers : {WeightFormat::int4, WeightFormat::int8, WeightFormat::e4m3})
    for (const auto& [n, k, group] : {std::tuple<int64_t, int64_t, int64_t>{8, 1024, 32},
                                      {40, 2048, 128},
                                      {77, 1024, 1024},
                                      {264, 3072, 128},
                                      {264, 3072, 3072},
                                      {24, 3072, 1024},
                                      {40, 2560, 128},
                                      {40, 1536, 32},
                                      {24, 1280, 128},  // an odd number of records in a half
                                      {1024, 1280, 64},
                                      {40, 1280, 1280},
                                      {264, 8960, 128},
                                      {1024, 1024, 256}})
      for (const Scales& scales : {kUsual, kPlain}) {
        WeightFormat format(numbers, group);
        format.in_halves = true;
        expect_same_bits(format, n, k, scales);
      }
  if (kept_ == 0) GTEST_SKIP() << ops().name() << " keeps no quantised weights";
}

NANOVLLM_PARITY_BACKENDS(QuantisedParity);

}  // namespace
}  // namespace nanovllm::parity
