// Exactness on the GPU, bit for bit: a row's result depends on that row alone. Every test computes
// rows in company and in other ways, and compares bytes.
#include <gtest/gtest.h>

#include "gpu/gpu_test.h"

namespace nanovllm {
namespace {

class CudaInvariance : public GpuTest {};

int different_rows(const std::vector<std::byte>& a, const std::vector<std::byte>& b,
                   size_t row_bytes) {
  int different = a.size() == b.size() ? 0 : 1'000'000;
  for (size_t at = 0; at + row_bytes <= std::min(a.size(), b.size()); at += row_bytes)
    different += std::memcmp(a.data() + at, b.data() + at, row_bytes) != 0;
  return different;
}

struct GemmShape {
  const char* name;
  int64_t n, k;
  DType in, out;
};

TEST_F(CudaInvariance, GemmRowsDoNotDependOnTheNumberOfRows) {
  constexpr int64_t kMaxRows = 4096, kCompared = 48;
  const GemmShape shapes[] = {{"0.6B qkv", 4096, 1024, DType::bf16, DType::bf16},
                              {"0.6B o", 1024, 2048, DType::bf16, DType::bf16},
                              {"0.6B gate_up", 6144, 1024, DType::bf16, DType::bf16},
                              {"0.6B down", 1024, 3072, DType::bf16, DType::bf16},
                              {"0.6B lm_head", 151936, 1024, DType::bf16, DType::f32},
                              {"8B qkv", 6144, 4096, DType::bf16, DType::bf16},
                              {"8B o", 4096, 4096, DType::bf16, DType::bf16},
                              {"8B gate_up", 24576, 4096, DType::bf16, DType::bf16},
                              {"8B down", 4096, 12288, DType::bf16, DType::bf16},
                              {"odd", 331, 200, DType::bf16, DType::bf16},
                              {"odder", 77, 33, DType::bf16, DType::f32},
                              {"f32", 1024, 1024, DType::f32, DType::f32}};
  for (const GemmShape& shape : shapes) {
    Rig rig(*gpu_);
    const int64_t most = shape.n > 100'000 ? 512 : kMaxRows;
    const Tensor x = rig.upload(normal_values(most * shape.k, 1), shape.in, {most, shape.k});
    // Rows at any address.
    const Tensor odd = rig.padded(normal_values(most * shape.k, 1), shape.in, most, shape.k, 1);
    const Weight w =
        rig.weight(normal_values(shape.n * shape.k, 2, 0.03f), shape.in, shape.n, shape.k);
    const Tensor all = rig.empty(shape.out, {most, shape.n}),
                 some = rig.empty(shape.out, {most, shape.n});
    gpu_->gemm(all, x, w);
    const size_t row_bytes = static_cast<size_t>(shape.n) * size_of(shape.out);
    int wrong = 0, compared = 0;
    for (const int64_t m :
         {1,   2,   3,   5,   8,   13,  16,  17,  24,  31,  33,   48,   64,   65,   96,   100,
          128, 129, 192, 200, 256, 300, 384, 500, 512, 768, 1000, 1024, 1500, 2048, 3000, 4096}) {
      if (m > most) continue;
      for (const int64_t first : {int64_t{0}, (most - m) / 3, most - m}) {
        gpu_->gemm(some.rows(0, m), x.rows(first, first + m), w);
        const int64_t n = std::min(m, kCompared);
        wrong += different_rows(rig.bytes(some.rows(m - n, m)),
                                rig.bytes(all.rows(first + m - n, first + m)), row_bytes);
        compared += static_cast<int>(n);
      }
      const int64_t n = std::min(m, kCompared);
      gpu_->gemm(some.rows(0, m), odd.rows(0, m), w);
      wrong += different_rows(rig.bytes(some.rows(0, n)), rig.bytes(all.rows(0, n)), row_bytes);
      compared += static_cast<int>(n);
    }
    EXPECT_EQ(wrong, 0) << shape.name << ": of " << compared << " rows";
    std::printf("  gemm %-13s n %6ld k %5ld %s: %d rows of %d differ\n", shape.name,
                static_cast<long>(shape.n), static_cast<long>(shape.k),
                std::string(name_of(shape.out)).c_str(), wrong, compared);
  }
}

/// Few rows take kernels of their own; x at an odd address takes the one that defines the order.
TEST_F(CudaInvariance, FewRowsHaveTheBitsOfTheDefinition) {
  constexpr int64_t kRows = 264;
  for (const auto& [n, k] : std::initializer_list<std::pair<int64_t, int64_t>>{{1, 64},
                                                                               {7, 192},
                                                                               {12, 640},
                                                                               {17, 448},
                                                                               {20, 320},
                                                                               {33, 640},
                                                                               {1003, 1088},
                                                                               {1048, 320},
                                                                               {4096, 1024},
                                                                               {1024, 2048},
                                                                               {1024, 3072},
                                                                               {4104, 4096},
                                                                               {904, 4864},
                                                                               {8200, 192}})
    for (const DType out : {DType::bf16, DType::f32}) {
      Rig rig(*gpu_);
      auto values = normal_values(kRows * k, 5);
      std::fill_n(values.begin() + 3 * k, k, 0.0f);  // zeros times negative weights
      const Tensor x = rig.upload(values, DType::bf16, {kRows, k}),
                   odd = rig.padded(values, DType::bf16, kRows, k, 1);
      const Weight w = rig.weight(normal_values(n * k, 6), DType::bf16, n, k);
      const int64_t width = (n + 7) / 8 * 8;
      const Tensor want = rig.empty(out, {kRows, width}), y = rig.empty(out, {kRows, width}),
                   zeros = rig.upload(std::vector<float>(static_cast<size_t>(kRows * width)), out,
                                      {kRows, width});
      gpu_->copy(want, zeros);
      gpu_->gemm(want.cols(0, n), odd, w);
      const auto definition = rig.bytes(want);
      const size_t row = static_cast<size_t>(width) * size_of(out);
      int wrong = 0;
      for (int64_t m = 1; m <= kRows; m += n > 1000 && out == DType::f32 ? 7 : 1) {
        gpu_->copy(y, zeros);
        gpu_->gemm(y.rows(0, m).cols(0, n), x.rows(0, m), w);
        auto expected = definition;
        std::fill(expected.begin() + static_cast<std::ptrdiff_t>(row) * m, expected.end(),
                  std::byte{});
        wrong += different_rows(rig.bytes(y), expected, row);
      }
      EXPECT_EQ(wrong, 0) << "n " << n << ", k " << k << ", y " << name_of(out);
    }
}

/// Every kernel's sum of the products of both halves, among them those of many rows, and tiles with
/// edges on all sides.
TEST_F(CudaInvariance, WeightsInHalvesHaveTheBitsOfTheDefinition) {
  constexpr int64_t kRows = 2304;
  for (const auto& [n, k] : std::initializer_list<std::pair<int64_t, int64_t>>{{4096, 1024},
                                                                               {1000, 2048},
                                                                               {4096, 4096},
                                                                               {5120, 7168},
                                                                               {24, 3072},
                                                                               {2560, 9728},
                                                                               {1536, 1280},
                                                                               {2048, 11008},
                                                                               {2056, 12288}}) {
    Rig rig(*gpu_);
    const auto values = normal_values(kRows * k, 5);
    const Tensor x = rig.upload(values, DType::bf16, {kRows, k}),
                 odd = rig.padded(values, DType::bf16, kRows, k, 1);
    const auto weights = normal_values(n * k, 6, 0.1f);
    const Weight w = rig.weight(weights, DType::bf16, n, k, true),
                 plain = rig.weight(weights, DType::bf16, n, k);
    const auto half_of = [&](int64_t half) {
      return Weight{plain.data.cols(half * k / 2, (half + 1) * k / 2), WeightFormat::bf16};
    };
    const Tensor want = rig.empty(DType::bf16, {kRows, n}),
                 more = rig.empty(DType::bf16, {kRows, n}), y = rig.empty(DType::bf16, {kRows, n});
    gpu_->gemm(want, odd.cols(0, k / 2), half_of(0));
    gpu_->gemm(more, odd.cols(k / 2, k), half_of(1));
    gpu_->add(want, more);
    const auto definition = rig.bytes(want);
    const size_t row = static_cast<size_t>(n) * 2;
    int wrong = 0;
    for (int64_t m = 1; m <= kRows; m += m < 264    ? (n == 4096 && k == 4096) || m < 24 ? 1 : 7
                                         : m < 1000 ? 177
                                                    : 433) {
      gpu_->gemm(y.rows(0, m), x.rows(0, m), w);
      auto expected = definition;
      expected.resize(row * static_cast<size_t>(m));
      wrong += different_rows(rig.bytes(y.rows(0, m)), expected, row);
      if (m > 256) continue;
      gpu_->run_micro_batches(2, [&](int i) {
        if (i == 1) gpu_->gemm(y.rows(0, m), x.rows(0, m), w);
      });
      wrong += different_rows(rig.bytes(y.rows(0, m)), expected, row);
    }
    gpu_->gemm(y.rows(0, 300), odd.rows(0, 300), w);
    auto expected = definition;
    expected.resize(row * 300);
    wrong += different_rows(rig.bytes(y.rows(0, 300)), expected, row);
    EXPECT_EQ(wrong, 0) << "n " << n << ", k " << k;
  }
}

/// The activation in the product's own kernel, on gates of every size, zeros among them.
TEST_F(CudaInvariance, GatedRowsHaveTheBitsOfTheBody) {
  constexpr int64_t kRows = 264;
  for (const auto& [n, k] : std::initializer_list<std::pair<int64_t, int64_t>>{
           {3072, 1024}, {1048, 320}, {24, 64}, {12296, 704}, {6152, 1408}, {8808, 512}}) {
    Rig rig(*gpu_);
    auto values = normal_values(kRows * k, 5, 0.1f), weights = normal_values(2 * n * k, 6);
    for (int64_t i = 0; i < kRows; ++i) {
      const float scale = std::ldexp(1.0f, static_cast<int>(i % 23) * 12 - 132);
      if (i % 3 == 0)
        for (int64_t c = 0; c < k; ++c) values[static_cast<size_t>(i * k + c)] *= scale;
    }
    std::fill_n(values.begin() + 5 * k, k, 0.0f);
    std::fill_n(weights.begin() + 9 * k, k, -0.0f);
    const Weight w = rig.weight(weights, DType::bf16, 2 * n, k);
    const Tensor x = rig.upload(values, DType::bf16, {kRows, k}),
                 between = rig.empty(DType::bf16, {kRows, 2 * n}),
                 want = rig.empty(DType::bf16, {kRows, n}), y = rig.empty(DType::bf16, {kRows, n}),
                 zeros = rig.upload(std::vector<float>(static_cast<size_t>(kRows * n)), DType::bf16,
                                    {kRows, n});
    gpu_->gemm(between, x, w);
    gpu_->silu_and_mul(want, between);
    const auto body = rig.bytes(want);
    const size_t row = static_cast<size_t>(n) * 2;
    int wrong = 0;
    for (int64_t m = 1; m <= kRows; ++m) {
      gpu_->copy(y, zeros);
      gpu_->gemm_silu_and_mul(y.rows(0, m), between.rows(0, m), x.rows(0, m), w);
      auto expected = body;
      std::fill(expected.begin() + static_cast<std::ptrdiff_t>(row) * m, expected.end(),
                std::byte{});
      wrong += different_rows(rig.bytes(y), expected, row);
    }
    EXPECT_EQ(wrong, 0) << "n " << n << ", k " << k;
  }
}

/// Row i's gates are w's, because of x there is but one element that is not zero.
TEST_F(CudaInvariance, EveryGateIsActivatedAsInTheBody) {
  constexpr int64_t kGates = 65536, kDepth = 64, kRows = 130;
  Rig rig(*gpu_);
  std::vector<float> weights(static_cast<size_t>(2 * kGates * kDepth)), values(kRows * kDepth);
  for (int64_t i = 0; i < kGates; ++i) {
    bf16 gate;
    gate.bits = static_cast<uint16_t>(i);
    weights[static_cast<size_t>(i * kDepth)] = static_cast<float>(gate);
    weights[static_cast<size_t>((kGates + i) * kDepth)] = i % 2 == 0 ? 1.0f : -0.37f;
  }
  for (int64_t i = 0; i < kRows; ++i) values[static_cast<size_t>(i * kDepth)] = 1.0f;
  const Weight w = rig.weight(weights, DType::bf16, 2 * kGates, kDepth);
  const Tensor x = rig.upload(values, DType::bf16, {kRows, kDepth}),
               between = rig.empty(DType::bf16, {kRows, 2 * kGates}),
               body = rig.empty(DType::bf16, {kRows, kGates}),
               y = rig.empty(DType::bf16, {kRows, kGates});
  gpu_->gemm_silu_and_mul(y, between, x, w);
  gpu_->gemm(between, x, w);
  gpu_->silu_and_mul(body, between);
  const auto want = rig.bytes(body), got = rig.bytes(y);
  int wrong = 0;
  for (size_t i = 0; i < want.size(); i += 2)
    wrong += std::memcmp(want.data() + i, got.data() + i, 2) != 0;
  EXPECT_EQ(wrong, 0);
}

TEST_F(CudaInvariance, ChainsOfProductsWaitForOneAnother) {
  Rig rig(*gpu_);
  constexpr int64_t kWidth = 1024, kLinks = 60;
  const Weight w =
      rig.weight(normal_values(kWidth * kWidth, 7, 0.03f), DType::bf16, kWidth, kWidth);
  for (const int64_t m : {1, 16, 64, 65, 128, 256}) {
    const Tensor start = rig.upload(normal_values(m * kWidth, 8), DType::bf16, {m, kWidth}),
                 a = rig.empty(DType::bf16, {m, kWidth}), b = rig.empty(DType::bf16, {m, kWidth});
    const auto chain = [&](bool stop) {
      gpu_->copy(a, start);
      for (int64_t i = 0; i < kLinks; ++i) {
        gpu_->gemm(i % 2 == 0 ? b : a, i % 2 == 0 ? a : b, w);
        if (stop) gpu_->synchronize();
      }
    };
    chain(true);
    const auto want = rig.bytes(a);
    for (int run = 0; run < 5; ++run) {
      chain(false);
      EXPECT_EQ(rig.bytes(a), want) << m << " rows";
    }
    const auto graph = gpu_->capture([&] { chain(false); });
    for (int run = 0; run < 5; ++run) {
      graph->launch();
      EXPECT_EQ(rig.bytes(a), want) << m << " rows, in a graph";
    }
  }
}

TEST_F(CudaInvariance, NormRowsDoNotDependOnTheBatch) {
  Rig rig(*gpu_);
  constexpr int64_t kRows = 37;
  for (const int64_t n : {64, 100, 1024, 5000}) {
    const Tensor x = rig.upload(normal_values(kRows * n, 3), DType::bf16, {kRows, n}),
                 w = rig.upload(normal_values(n, 4), DType::bf16, {n});
    const Tensor all = rig.empty(DType::bf16, {kRows, n}), one = rig.empty(DType::bf16, {1, n});
    gpu_->rms_norm(all, x, w, 1e-6f);
    for (int64_t i = 0; i < kRows; ++i) {
      gpu_->rms_norm(one, x.rows(i, i + 1), w, 1e-6f);
      EXPECT_EQ(rig.bytes(one), rig.bytes(all.rows(i, i + 1))) << "row " << i << " of width " << n;
    }
  }
}

/// How row i of these tests is sampled.
SamplingBatch mixed_rules(Rig& rig, int64_t begin, int64_t end) {
  std::vector<float> temperature, top_p, min_p;
  std::vector<int32_t> top_k, position;
  std::vector<int64_t> seed;
  for (int64_t i = begin; i < end; ++i) {
    temperature.push_back(i % 5 == 0 ? 0.0f : 0.3f * static_cast<float>(i % 5));
    top_k.push_back(i % 3 == 0 ? 40 : i % 16 == 1 ? 3000 : 0);
    top_p.push_back(i % 4 == 0 ? 0.9f : 1.0f);
    min_p.push_back(i % 7 == 0 ? 0.05f : 0.0f);
    seed.push_back(i * 1'000'003);
    position.push_back(static_cast<int32_t>(i));
  }
  const int64_t n = end - begin;
  return SamplingBatch{.temperature = rig.upload(temperature, DType::f32, {n}),
                       .top_k = rig.upload(top_k, {n}),
                       .top_p = rig.upload(top_p, DType::f32, {n}),
                       .min_p = rig.upload(min_p, DType::f32, {n}),
                       .seed = rig.upload(seed, {n}),
                       .position = rig.upload(position, {n}),
                       .features = kSampleRandom | kSampleFiltered};
}

/// Rows of normal logits, every fourth of them nearly flat.
std::vector<float> mixed_logits(int64_t rows, int64_t vocab) {
  std::vector<float> logits = normal_values(rows * vocab, 5, 3.0f);
  for (int64_t i = 0; i < rows; i += 4)
    for (int64_t j = 0; j < vocab; ++j) logits[static_cast<size_t>(i * vocab + j)] *= 0.1f;
  return logits;
}

TEST_F(CudaInvariance, SampledTokensDoNotDependOnTheBatch) {
  for (const auto& [rows, vocab] : {std::pair<int64_t, int64_t>{37, 5003}, {150, 151936}}) {
    Rig rig(*gpu_);
    const Tensor logits = rig.upload(mixed_logits(rows, vocab), DType::f32, {rows, vocab});
    const Tensor all = rig.empty(DType::i32, {rows}), one = rig.empty(DType::i32, {1}),
                 plain = rig.empty(DType::i32, {rows});
    SamplingBatch rules = mixed_rules(rig, 0, rows);
    gpu_->sample(all, logits, rules);
    for (int64_t i = 0; i<rows; i += rows> 100 ? 7 : 1) {
      Rig own(*gpu_);
      gpu_->sample(one, logits.rows(i, i + 1), mixed_rules(own, i, i + 1));
      EXPECT_EQ(rig.bytes(one), rig.bytes(all.rows(i, i + 1))) << "row " << i << " of " << vocab;
    }
    // A row without filters gives the same token in a batch that knows no filters.
    rules.features = kSampleRandom;
    gpu_->sample(plain, logits, rules);
    int64_t compared = 0;
    for (int64_t i = 0; i < rows; ++i) {
      if (i % 3 == 0 || i % 16 == 1 || i % 4 == 0 || i % 7 == 0) continue;
      ++compared;
      EXPECT_EQ(rig.bytes(plain.rows(i, i + 1)), rig.bytes(all.rows(i, i + 1))) << "row " << i;
    }
    EXPECT_GT(compared, rows / 5);
  }
}

TEST_F(CudaInvariance, LogProbabilitiesDoNotDependOnTheBatch) {
  constexpr int64_t kTop = 20;
  for (const auto& [rows, vocab] : {std::pair<int64_t, int64_t>{37, 5003}, {150, 151936}}) {
    Rig rig(*gpu_);
    const Tensor logits = rig.upload(mixed_logits(rows, vocab), DType::f32, {rows, vocab});
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < rows; ++i) tokens.push_back(static_cast<int32_t>(i * 7919 % vocab));
    const Tensor chosen = rig.upload(tokens, {rows}), ids = rig.empty(DType::i32, {rows, 1 + kTop}),
                 logprobs = rig.empty(DType::f32, {rows, 1 + kTop}),
                 ranks = rig.empty(DType::i32, {rows}),
                 own_ids = rig.empty(DType::i32, {1, 1 + kTop}),
                 own_logprobs = rig.empty(DType::f32, {1, 1 + kTop}),
                 own_rank = rig.empty(DType::i32, {1});
    gpu_->top_logprobs(ids, logprobs, ranks, logits, chosen);
    for (int64_t i = 0; i<rows; i += rows> 100 ? 7 : 1) {
      gpu_->top_logprobs(own_ids, own_logprobs, own_rank, logits.rows(i, i + 1),
                         chosen.rows(i, i + 1));
      EXPECT_EQ(rig.bytes(own_ids), rig.bytes(ids.rows(i, i + 1))) << "row " << i;
      EXPECT_EQ(rig.bytes(own_logprobs), rig.bytes(logprobs.rows(i, i + 1))) << "row " << i;
      EXPECT_EQ(rig.bytes(own_rank), rig.bytes(ranks.rows(i, i + 1))) << "row " << i;
    }
  }
}

}  // namespace
}  // namespace nanovllm
