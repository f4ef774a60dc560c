// Products with quantised weights: the bits of the plain product with the numbers that they stand
// for, whether registers unpack them (few rows) or the whole weight is unpacked first, recorded or
// not. Those numbers are computed here, from the definition (docs/contract.md).
#include <bit>
#include <cmath>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gpu/gpu_test.h"
#include "parity/e4m3.h"

namespace nanovllm {
namespace {

/// The scales of a checkpoint, and whether its integers have zero points.
struct Kind {
  const char* name;
  DType scales;
  bool has_zeros;
  float least = 0.002f;  // of the scales; the largest are 16 times that
};
constexpr Kind kKinds[] = {{"bf16 scales", DType::bf16, false},
                           {"bf16 scales below 2^-5", DType::bf16, false, 0x1p-9f * 0.96f},
                           {"f16 scales, zero points", DType::f16, true},
                           {"f32 scales", DType::f32, false},
                           {"f32 scales, zero points", DType::f32, true}};

float rounded(float x, DType dtype) {
  if (dtype == DType::bf16) return static_cast<float>(bf16(x));
  if (dtype == DType::f16)  // 11 significant bits
    return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xffffe000u);
  return x;
}

/// A quantised weight on the GPU, and its numbers as a plain one.
struct Pair {
  Buffer memory;
  Weight quantised, plain;

  Pair(Rig& rig, WeightFormat format, int64_t n, int64_t k, const Kind& kind) {
    std::mt19937 random(static_cast<uint32_t>(n * 131 + k));
    const bool is_int4 = format.numbers == WeightFormat::int4;
    QuantizedRows rows;
    std::vector<float> values;
    for (int64_t i = 0; i < n * format.groups(k); ++i) {
      const float spread = static_cast<float>(random() >> 8) * 0x1p-24f;
      rows.scales.push_back(rounded(kind.least * std::exp2(4 * spread), kind.scales));
      if (format.has_zeros())
        rows.zeros.push_back(static_cast<int8_t>(!kind.has_zeros ? 0
                                                 : is_int4       ? random() % 16 - 8
                                                                 : random() >> 24));
    }
    for (int64_t i = 0; i < n * k; ++i) {
      const auto bits = static_cast<uint8_t>(random() >> 24);
      const auto q = is_int4 ? static_cast<int8_t>(bits % 16 - 8)
                             : static_cast<int8_t>((bits & 0x7f) == 0x7f ? 0 : bits);
      const auto at = static_cast<size_t>(i / k * format.groups(k) + i % k / format.group);
      rows.numbers.push_back(q);
      const float number = format.numbers == WeightFormat::e4m3
                               ? e4m3_value(static_cast<uint8_t>(q))
                               : static_cast<float>(q) - static_cast<float>(rows.zeros[at]);
      values.push_back(rows.scales[at] * number);  // an upload rounds it to bf16
    }
    memory = rig.backend.allocate(rig.backend.weight_bytes(format, n, k));
    quantised = rig.backend.weight_view(memory.get(), format, n, k);
    rig.backend.load_quantised(quantised, rows);
    plain = rig.weight(values, DType::bf16, n, k);
  }
};

struct Shape {
  int64_t n, k, group;  // group 0: of whole rows
};

class CudaQuantised : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (gpu_ && !gpu_->keeps({WeightFormat::int4, 128}, 1024, 1024))
      GTEST_SKIP() << gpu_->name() << " keeps no quantised weights";
  }
  /// Both products of m rows, from strided rows into strided rows whose gaps must stay.
  void expect_same(Rig& rig, const Pair& pair, int64_t m, const std::string& what) {
    const int64_t n = pair.plain.n(), k = pair.plain.k();
    const Tensor x = rig.padded(normal_values(m * k, static_cast<uint32_t>(m)), DType::bf16, m, k,
                                m % 2 ? 8 : 0);
    const auto run = [&](const Weight& w, DType dtype, bool gated) {
      const int64_t columns = gated ? n / 2 : n;
      const std::vector<float> before(static_cast<size_t>(m * columns), 7.0f);
      const Tensor y = rig.padded(before, dtype, m, columns, 8);
      const Tensor room = rig.empty(DType::bf16, {m, n});
      if (gated)
        gpu_->gemm_silu_and_mul(y, room, x, w);
      else
        gpu_->gemm(y, x, w);
      return rig.bytes(y);
    };
    EXPECT_TRUE(run(pair.quantised, DType::bf16, false) == run(pair.plain, DType::bf16, false))
        << what;
    if (n % 16 == 0) {
      EXPECT_TRUE(run(pair.quantised, DType::bf16, true) == run(pair.plain, DType::bf16, true))
          << what << ", gated";
    }
    if (m % 16 == 1) {
      EXPECT_TRUE(run(pair.quantised, DType::f32, false) == run(pair.plain, DType::f32, false))
          << what << ", f32";
    }
  }
};

constexpr WeightFormat::Numbers kNumbers[] = {WeightFormat::int4, WeightFormat::int8,
                                              WeightFormat::e4m3};

TEST_F(CudaQuantised, ProductsHaveTheBitsOfTheWeightsThatTheyStandFor) {
  for (const auto numbers : kNumbers)
    for (const Shape& s : {Shape{8, 128, 0},
                           {200, 384, 128},
                           {1536, 1024, 32},
                           {2560, 512, 64},
                           {1024, 2048, 0},
                           {6144, 768, 128},
                           {4096, 1024, 256},
                           {24576, 256, 128}})
      for (const Kind& kind : kKinds) {
        Rig rig(*gpu_);
        const WeightFormat format(numbers, s.group == 0 ? s.k : s.group);
        ASSERT_TRUE(gpu_->keeps(format, s.n, s.k));
        const Pair pair(rig, format, s.n, s.k, kind);
        for (const int64_t m : {1, 2, 7, 8, 9, 16, 17, 25, 32, 33, 48, 63, 64, 65, 129, 300})
          expect_same(rig, pair, m,
                      fmt::format("{} of {} x {} bits, groups of {}, {} x {}", m, format.bits(),
                                  format.numbers == WeightFormat::e4m3 ? "float" : "integer",
                                  format.group, s.n, s.k) +
                          ", " + kind.name);
      }
}

/// One product unpacks its weight where the one before it, still running, has unpacked another.
TEST_F(CudaQuantised, ProductsThatAreRecordedDoNotDisturbEachOther) {
  constexpr int64_t kSize = 2048, kRows = 100;
  Rig rig(*gpu_);
  const Pair first(rig, {WeightFormat::int4, 128}, kSize, kSize, kKinds[0]),
      second(rig, {WeightFormat::e4m3, kSize}, kSize, kSize, kKinds[2]);
  const Tensor x = rig.upload(normal_values(kRows * kSize, 1), DType::bf16, {kRows, kSize});
  const auto chain = [&](const Weight& a, const Weight& b, bool recorded) {
    const Tensor y = rig.empty(DType::bf16, {kRows, kSize}),
                 z = rig.empty(DType::bf16, {kRows, kSize});
    const auto body = [&] {
      for (const int64_t rows : {kRows, int64_t{3}}) {
        gpu_->gemm(y.rows(0, rows), x.rows(0, rows), a);
        gpu_->gemm(z.rows(0, rows), y.rows(0, rows), b);
        gpu_->gemm(y.rows(0, rows), z.rows(0, rows), a);
      }
    };
    const auto graph = recorded ? gpu_->capture(body) : nullptr;
    if (recorded)
      graph->launch();
    else
      body();
    return rig.bytes(y);
  };
  const auto want = chain(first.plain, second.plain, false);
  EXPECT_TRUE(chain(first.quantised, second.quantised, false) == want);
  EXPECT_TRUE(chain(first.quantised, second.quantised, true) == want);
}

}  // namespace
}  // namespace nanovllm
