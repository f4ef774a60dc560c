// Weights in the backend's own layout: load, gemm, embedding.
#include <cmath>

#include "parity/harness.h"

namespace nanovllm::parity {
namespace {

struct Shape {
  int64_t m, n, k;
};

class GemmParity : public ParityTest {
 protected:
  /// Products of f32 accumulate in f32: each of k additions rounds, in whatever order.
  static double accumulation(int64_t k) { return 0x1p-24 * static_cast<double>(k); }

  void expect_right(Shape s, DType y_type, Layout x_layout = {}, Layout y_layout = {}) {
    const Values x = random_values(dtype(), s.m * s.k, 1), w = random_values(dtype(), s.n * s.k, 2);
    const Operand x_operand(ops(), dtype(), {s.m, s.k}, x, x_layout);
    const Operand y(ops(), y_type, {s.m, s.n}, y_layout);
    ops().gemm(y, x_operand, Weight(ops(), dtype(), s.n, s.k, w));
    ops().synchronize();
    Values want(static_cast<size_t>(s.m * s.n)), bound(want.size());
    const double rounding = y_type == DType::f32 ? 0x1p-24 : 0x1p-8;
    for (int64_t i = 0; i < s.m; ++i)
      for (int64_t j = 0; j < s.n; ++j) {
        double sum = 0, magnitude = 0;
        for (int64_t c = 0; c < s.k; ++c) {
          const double term =
              x[static_cast<size_t>(i * s.k + c)] * w[static_cast<size_t>(j * s.k + c)];
          sum += term;
          magnitude += std::abs(term);
        }
        want[static_cast<size_t>(i * s.n + j)] = sum;
        bound[static_cast<size_t>(i * s.n + j)] =
            rounding * std::abs(sum) + accumulation(s.k) * magnitude;
      }
    expect_close(
        y.get(), want, [&](size_t i) { return bound[i]; },
        "gemm " + std::to_string(s.m) + " x " + std::to_string(s.n) + " x " + std::to_string(s.k));
    y.expect_guards("y");
    x_operand.expect_guards("x");
  }
};

TEST_P(GemmParity, MatchesFloat64) {
  for (const Shape s : {Shape{1, 1, 1},
                        {1, 16, 64},
                        {3, 7, 33},
                        {2, 33, 7},
                        {5, 130, 65},
                        {17, 77, 100},
                        {64, 128, 256},
                        {33, 300, 1000},
                        {50, 5, 4097},
                        {1, 1000, 512},
                        {100, 1, 64},
                        {49, 48, 80}})
    for (const DType y_type : {dtype(), DType::f32}) expect_right(s, y_type);
}

TEST_P(GemmParity, TakesStridedRowsAndLeavesTheirSurroundings) {
  for (const Shape s :
       {Shape{1, 64, 96}, {4, 64, 96}, {7, 24, 40}, {70, 136, 64}, {200, 72, 128}}) {
    expect_right(s, dtype(), {.lead = 16, .trail = 48}, {.lead = 64, .trail = 32});
    expect_right(s, DType::f32, {.lead = 8, .trail = 8}, {.lead = 8, .trail = 24});
  }
}

TEST_P(GemmParity, NoRowsAreNoWork) {
  const Operand x(ops(), dtype(), {1, 32}), y(ops(), dtype(), {1, 16});
  ops().gemm(y.view().rows(0, 0), x.view().rows(0, 0),
             Weight(ops(), dtype(), 16, 32, Values(16 * 32, 1.0)));
  ops().synchronize();
  y.expect_guards("y");
}

/// Rows that stand for all: the first, the last, and some between.
TEST_P(GemmParity, ARowHasTheSameBitsForEveryNumberOfRows) {
  constexpr int64_t kRows = 513;
  for (const auto& [n, k] : std::initializer_list<std::pair<int64_t, int64_t>>{{256, 128},
                                                                               {4096, 1024},
                                                                               {1024, 2048},
                                                                               {1024, 3072},
                                                                               {6144, 1024},
                                                                               {1, 64},
                                                                               {7, 33},
                                                                               {33, 7},
                                                                               {1, 1},
                                                                               {77, 100},
                                                                               {5, 4097},
                                                                               {300, 1000}}) {
    if (!std::get<0>(GetParam()).name.ends_with("cpu") && n * k > (1 << 20) &&
        ops().device().kind == Device::cpu)
      continue;
    const Operand x(ops(), dtype(), {kRows, k}, random_values(dtype(), kRows * k, 3));
    const Weight w(ops(), dtype(), n, k, random_values(dtype(), n * k, 4));
    for (const DType y_type : {dtype(), DType::f32}) {
      const Operand all(ops(), y_type, {kRows, n});
      ops().gemm(all, x, w);
      ops().synchronize();
      const std::vector<std::byte> want = all.bits();
      const size_t row = want.size() / static_cast<size_t>(kRows);
      for (const int64_t m : {1, 2, 3, 5, 8, 16, 17, 33, 64, 65, 100, 128, 136, 193, 256, 512})
        for (const int64_t first : {int64_t{0}, kRows - m}) {
          const Operand some(ops(), y_type, {m, n});
          ops().gemm(some, x.view().rows(first, first + m), w);
          ops().synchronize();
          const std::vector<std::byte> got = some.bits();
          EXPECT_TRUE(
              std::equal(got.begin(), got.end(), want.begin() + static_cast<int64_t>(row) * first))
              << m << " rows from " << first << ", n " << n << ", k " << k << ", y "
              << name_of(y_type);
        }
    }
  }
}

// Two ranks compute this, each with half of k: docs/contract.md.
TEST_P(GemmParity, AWeightInHalvesHasTheSumOfItsHalvesProducts) {
  for (const auto& [n, k] : std::initializer_list<std::pair<int64_t, int64_t>>{
           {7, 66}, {130, 1000}, {264, 1280}, {48, 2048}, {16, 4352}})
    for (const int64_t m : {1, 3, 9, 20, 64, 65, 150, 256, 257, 700})
      for (const DType y_type : {dtype(), DType::f32}) {
        const Values x = random_values(dtype(), m * k, 1), w = random_values(dtype(), n * k, 2);
        Values halves[2];
        for (size_t i = 0; i < w.size(); ++i)
          halves[static_cast<int64_t>(i) % k >= k / 2].push_back(w[i]);
        WeightFormat format = plain_format(dtype());
        format.in_halves = true;
        const Operand x_operand(ops(), dtype(), {m, k}, x), y(ops(), y_type, {m, n}),
            first(ops(), y_type, {m, n}), second(ops(), y_type, {m, n});
        ops().gemm(y, x_operand, Weight(ops(), format, n, k, w));
        // Of their own, as a rank's are: dense.
        for (int64_t half = 0; half < 2; ++half) {
          Values columns;
          for (size_t i = 0; i < x.size(); ++i)
            if (static_cast<int64_t>(i) % k / (k / 2) == half) columns.push_back(x[i]);
          ops().gemm(half == 0 ? first : second, Operand(ops(), dtype(), {m, k / 2}, columns),
                     Weight(ops(), dtype(), n, k / 2, halves[half]));
          ops().synchronize();
        }
        ops().add(first, second);
        ops().synchronize();
        EXPECT_EQ(y.bits(), first.bits())
            << m << " rows, n " << n << ", k " << k << ", y " << name_of(y_type);
        y.expect_guards("y");
      }
}

TEST_P(GemmParity, GatedProductIsItsBody) {
  for (const auto& [n, k] : std::initializer_list<std::pair<int64_t, int64_t>>{{8, 64},
                                                                               {24, 192},
                                                                               {100, 128},
                                                                               {7, 33},
                                                                               {1000, 320},
                                                                               {1400, 64},
                                                                               {24, 128},
                                                                               {520, 1280}})
    for (const int64_t m : {1, 8, 9, 33, 64, 65, 96, 130, 144, 181, 256})
      for (const Layout layout : {Layout{}, Layout{.lead = 8, .trail = 24}}) {
        const Operand x(ops(), dtype(), {m, k}, random_values(dtype(), m * k, 6), layout);
        // 20: gates of several hundred, where silu ends.
        const double spread = n == 24 ? 20.0 : 0.2;
        const Weight w(ops(), dtype(), 2 * n, k, random_values(dtype(), 2 * n * k, 7, spread));
        const Operand y(ops(), dtype(), {m, n}, layout), body(ops(), dtype(), {m, n}, layout),
            between(ops(), dtype(), {m, 2 * n});
        ops().gemm_silu_and_mul(y, between, x, w);
        ops().gemm(between, x, w);
        ops().silu_and_mul(body, between);
        ops().synchronize();
        EXPECT_EQ(y.bits(), body.bits()) << m << " rows, n " << n << ", k " << k;
        y.expect_guards("y");
        between.expect_guards("between");
      }
}

TEST_P(GemmParity, SampledProductIsItsParts) {
  constexpr int64_t kRows = 9, kVocab = 1008, kInner = 64;
  const Operand x(ops(), dtype(), {kRows, kInner}, random_values(dtype(), kRows * kInner, 6));
  const Weight w(ops(), dtype(), kVocab, kInner, random_values(dtype(), kVocab * kInner, 7, 0.2));
  const Operand temperature(ops(), DType::f32, {kRows}, Values(kRows, 0.8)),
      top_p(ops(), DType::f32, {kRows}, Values(kRows, 0.9)),
      zero(ops(), DType::f32, {kRows}, Values(kRows, 0)),
      none(ops(), DType::i32, {kRows}, Values(kRows, 0)),
      seed(ops(), DType::i64, {kRows}, Values(kRows, 3)),
      position = ints(ops(), {0, 1, 2, 3, 4, 5, 6, 7, 8});
  const Operand logits(ops(), DType::f32, {kRows, kVocab}), ids(ops(), DType::i32, {kRows}),
      want(ops(), DType::i32, {kRows});
  for (const bool filters : {false, true}) {
    SamplingBatch params{temperature, none, top_p, zero, seed, position};
    params.features = kSampleRandom | (filters ? uint32_t{kSampleFiltered} : 0u);
    ops().gemm_sample(ids, logits, x, w, params);
    ops().gemm(logits, x, w);
    ops().sample(want, logits, params);
    ops().synchronize();
    expect_equal(ids.get(), want.get(), filters ? "with filters" : "without filters");
    ids.expect_guards("ids");
    logits.expect_guards("logits");
  }
}

TEST_P(GemmParity, EmbeddingReadsRowsOutOfThePackedWeight) {
  for (const auto& [n, k] : std::initializer_list<std::pair<int64_t, int64_t>>{
           {1000, 64}, {77, 100}, {7, 33}, {130, 1024}, {1, 1}}) {
    const Values table = random_values(dtype(), n * k, 5);
    const int32_t last = static_cast<int32_t>(n) - 1;
    // Ids before, in and after the shard that starts at 10; -1 and a huge one.
    const std::vector<int32_t> ids{10, 10 + last, 9, 11 + last, 10 + last / 2, -1, 0x7fffffff, 10};
    for (const Layout layout : {Layout{}, Layout{.lead = 8, .trail = 16}}) {
      const Operand y(ops(), dtype(), {static_cast<int64_t>(ids.size()), k}, layout);
      ops().embedding(y, ints(ops(), ids), Weight(ops(), dtype(), n, k, table), 10);
      ops().synchronize();
      Values want;
      for (const int32_t id : ids)
        for (int64_t c = 0; c < k; ++c) {
          const int64_t row = int64_t{id} - 10;
          want.push_back(row >= 0 && row < n ? table[static_cast<size_t>(row * k + c)] : 0.0);
        }
      expect_equal(y.get(), want,
                   "embedding of [" + std::to_string(n) + ", " + std::to_string(k) + "]");
      y.expect_guards("y");
    }
  }
}

/// Host matrices of all float types, their rows apart and at odd addresses, stacked.
class HostPart {
 public:
  HostPart(DType dtype, std::vector<int64_t> shape, int64_t row_stride, size_t misalignment,
           uint32_t seed) {
    const int64_t rows = shape[0], columns = shape.size() > 1 ? shape[1] : 1;
    // Few bits, exact in bf16; in f16 too, being near 1.
    values = random_values(DType::bf16, rows * columns, seed);
    for (double& v : values) v = std::abs(v) < 0x1p-6 ? 0.0 : v;
    bytes_.resize(static_cast<size_t>(rows * row_stride) * size_of(dtype) + misalignment);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) {
        const float value = static_cast<float>(values[static_cast<size_t>(r * columns + c)]);
        std::byte* at =
            bytes_.data() + misalignment + static_cast<size_t>(r * row_stride + c) * size_of(dtype);
        if (dtype == DType::f32) std::memcpy(at, &value, 4);
        const bf16 half(value);
        if (dtype == DType::bf16) std::memcpy(at, &half, 2);
        const uint16_t f16_bits = to_f16(value);
        if (dtype == DType::f16) std::memcpy(at, &f16_bits, 2);
      }
    tensor = shape.size() > 1 ? Tensor(bytes_.data() + misalignment, dtype, {rows, columns})
                              : Tensor(bytes_.data() + misalignment, dtype, {rows});
    if (shape.size() > 1) tensor.stride[0] = row_stride;
  }
  Tensor tensor;
  Values values;

 private:
  /// Exact for normal f16 values of at most 11 bits.
  static uint16_t to_f16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    return value == 0
               ? uint16_t{0}
               : static_cast<uint16_t>(((u >> 16) & 0x8000u) |
                                       ((((u >> 23) & 0xffu) - 112u) << 10) | ((u >> 13) & 0x3ffu));
  }
  std::vector<std::byte> bytes_;
};

TEST_P(GemmParity, LoadStacksAndConvertsStridedParts) {
  constexpr int64_t k = 100;
  const HostPart a(DType::f32, {30, k}, 128, 4, 1), b(DType::bf16, {1, k}, k, 2, 2),
      c(DType::f16, {69, k}, 101, 2, 3);
  const std::vector<Tensor> parts{a.tensor, b.tensor, c.tensor};
  Values want = a.values;
  want.insert(want.end(), b.values.begin(), b.values.end());
  want.insert(want.end(), c.values.begin(), c.values.end());

  const WeightFormat format = plain_format(dtype());
  const Buffer buffer = ops().allocate(ops().weight_bytes(format, 100, k));
  const nanovllm::Weight packed = ops().weight_view(buffer.get(), format, 100, k);
  ops().load(packed.data, parts);
  std::vector<int32_t> rows(100);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
  const Operand read(ops(), dtype(), {100, k});
  ops().embedding(read, ints(ops(), rows), packed, 0);
  ops().synchronize();
  expect_equal(read.get(), want, "packed");

  const Operand plain(ops(), dtype(), {100, k});
  ops().load(plain, parts);
  ops().synchronize();
  expect_equal(plain.get(), want, "plain");
  plain.expect_guards("plain");
}

TEST_P(GemmParity, LoadStacksVectors) {
  const HostPart a(DType::f32, {5}, 1, 4, 1), b(DType::bf16, {3}, 1, 2, 2);
  const Operand dst(ops(), dtype(), {8});
  ops().load(dst, std::vector<Tensor>{a.tensor, b.tensor});
  ops().synchronize();
  Values want = a.values;
  want.insert(want.end(), b.values.begin(), b.values.end());
  expect_equal(dst.get(), want, "vector");
  dst.expect_guards("vector");
}

TEST_P(GemmParity, LoadRefusesWhatDoesNotFit) {
  const HostPart a(DType::f32, {5, 8}, 8, 0, 1);
  const Operand rows(ops(), dtype(), {6, 8}), columns(ops(), dtype(), {5, 9}),
      vector(ops(), dtype(), {40});
  for (const Operand* dst : {&rows, &columns, &vector})
    EXPECT_THROW(ops().load(*dst, {&a.tensor, 1}), Error);
}

NANOVLLM_PARITY(GemmParity);

}  // namespace
}  // namespace nanovllm::parity
