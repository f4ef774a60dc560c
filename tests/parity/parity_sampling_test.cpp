// Sampling: the noise against published vectors, the choice against a plain float64 sampler and
// against probability theory.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "parity/sampling.h"

namespace nanovllm::parity {
namespace {

// Random123's known answers for philox4x32-10.
TEST(Philox, MatchesThePublishedVectors) {
  struct Known {
    Philox4 counter;
    uint32_t key0, key1;
    Philox4 want;
  };
  for (const Known& known :
       {Known{{{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}}},
        Known{{{~0u, ~0u, ~0u, ~0u}},
              ~0u,
              ~0u,
              {{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}}},
        Known{{{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}},
              0xa4093822u,
              0x299f31d0u,
              {{0xd16cfe09u, 0x94fdcceb, 0x5001e420u, 0x24126ea1u}}}}) {
    const Philox4 got = philox4x32_10(known.counter, known.key0, known.key1);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.x[i], known.want.x[i]) << "word " << i;
  }
}

TEST(Noise, StaysWithinItsBounds) {
  for (const uint32_t bits : {0u, ~0u}) {
    const float u = noise_uniform(bits), gumbel = -std::log(-std::log(u));
    EXPECT_GT(u, 0.0f);
    EXPECT_LT(u, 1.0f);
    EXPECT_GT(gumbel, kMinGumbel);
    EXPECT_LT(gumbel, kMaxGumbel);
  }
}

TEST_P(SamplingTest, MatchesThePlainSampler) {
  std::mt19937 generator(5);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  int compared = 0;
  for (const int64_t vocab : {1, 2, 5, 63, 64, 100, 1000, 5000}) {
    constexpr int64_t kRows = 60;
    Values logits = random_values(DType::f32, kRows * vocab, static_cast<uint32_t>(vocab), 3.0);
    std::vector<Row> rows;
    for (int64_t i = 0; i < kRows; ++i) {
      Row row{.temperature = round_to(DType::f32, 0.3 + 2 * unit(generator)),
              .seed = static_cast<int64_t>(generator()) << 20,
              .position = static_cast<int32_t>(generator() % 4000)};
      if (i % 7 == 0) row.temperature = 0;
      if (i % 2) row.top_k = static_cast<int32_t>(generator() % static_cast<uint32_t>(2 * vocab));
      if (i % 3) row.top_p = round_to(DType::f32, i % 9 == 1 ? 0.999 : unit(generator));
      if (i % 5 == 0) row.min_p = round_to(DType::f32, unit(generator) * 0.3);
      if (i % 4 == 0 && vocab > 2) logits[static_cast<size_t>(i * vocab + 1)] = -INFINITY;
      rows.push_back(row);
    }
    const std::vector<int32_t> got = sample(logits, vocab, rows, {.lead = 4, .trail = 12});
    for (size_t i = 0; i < rows.size(); ++i) {
      const Answer want = reference(logits.data() + i * static_cast<size_t>(vocab), vocab, rows[i]);
      if (want.margin < 1e-4) continue;
      ++compared;
      EXPECT_EQ(got[i], want.id) << "vocab " << vocab << ", row " << i;
    }
  }
  EXPECT_GT(compared, 400);
}

TEST_P(SamplingTest, SkipsNoTokenThatCouldWin) {
  // Without filters a kernel may rule tokens out before it computes their noise exactly: many rows,
  // so that a bound a little too tight shows.
  constexpr int64_t kVocab = 700, kRows = 3000;
  const Values logits = random_values(DType::f32, kRows * kVocab, 31, 2.0);
  std::vector<Row> rows;
  for (int32_t i = 0; i < kRows; ++i)
    rows.push_back({.temperature = i % 2 ? 1.0 : 0.5, .seed = i, .position = i / 3});
  const std::vector<int32_t> got = sample(logits, kVocab, rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Answer want = reference(logits.data() + i * kVocab, kVocab, rows[i]);
    if (want.margin >= 1e-4) {
      EXPECT_EQ(got[i], want.id) << "row " << i;
    }
  }
}

TEST_P(SamplingTest, MatchesThePlainSamplerOnALargeVocabulary) {
  constexpr int64_t kVocab = 151936;
  const Values logits = random_values(DType::f32, 11 * kVocab, 77, 2.5);
  const std::vector<Row> rows{
      {.seed = 1},
      {.temperature = 0.6, .top_p = 0.95, .seed = 2},
      {.temperature = 0.6, .top_k = 20, .top_p = 0.95, .seed = 3},
      {.temperature = 1.5, .top_p = 0.9, .seed = 4},
      {.min_p = round_to(DType::f32, 0.05), .seed = 5},
      {.temperature = 0},
      {.temperature = 100, .seed = 6},
      {.temperature = 1.5, .top_k = 900, .seed = 8},
      {.temperature = 1.5, .top_k = 5000, .top_p = 0.7, .seed = 9},
      {.temperature = 2, .top_p = 0.97, .min_p = round_to(DType::f32, 0.001), .seed = 10},
      {.temperature = 0.05, .seed = -7, .position = 0x7fffffff}};
  const std::vector<int32_t> got = sample(logits, kVocab, rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Answer want = reference(logits.data() + i * kVocab, kVocab, rows[i]);
    if (want.margin >= 1e-5) {
      EXPECT_EQ(got[i], want.id) << "row " << i;
    }
  }
}

TEST_P(SamplingTest, GreedyTakesTheLowestOfEquals) {
  Values logits(300, -1.0);
  for (const int i : {37, 64, 199}) logits[static_cast<size_t>(i)] = 2.5;
  EXPECT_EQ(sample(logits, 300, {{.temperature = 0}}), std::vector<int32_t>{37});
  EXPECT_EQ(sample(logits, 300, {{.temperature = 1, .top_k = 1}}), std::vector<int32_t>{37});
}

TEST_P(SamplingTest, ARowThatIsNotFiniteGivesMinusOneAndCostsTheOthersNothing) {
  constexpr int64_t kVocab = 100;
  Values logits = random_values(DType::f32, 6 * kVocab, 3);
  const std::vector<Row> rows(6, Row{.temperature = 0.8, .top_p = 0.9});
  const std::vector<int32_t> healthy = sample(logits, kVocab, rows);
  logits[1 * kVocab + 99] = NAN;
  logits[3 * kVocab + 0] = INFINITY;
  std::fill(logits.begin() + 4 * kVocab, logits.begin() + 5 * kVocab, -INFINITY);
  logits[3 * kVocab + 1] = -NAN;
  for (const double temperature : {0.0, 0.8}) {
    std::vector<Row> some = rows;
    for (const size_t i : {1, 3, 4}) some[i].temperature = temperature;
    const std::vector<int32_t> got = sample(logits, kVocab, some);
    EXPECT_EQ(got, (std::vector<int32_t>{healthy[0], -1, healthy[2], -1, -1, healthy[5]}));
  }
}

TEST_P(SamplingTest, ARowsTokenDoesNotDependOnTheBatch) {
  constexpr int64_t kVocab = 3000, kRows = 20;
  const Values logits = random_values(DType::f32, kRows * kVocab, 8, 2.0);
  std::vector<Row> rows;
  for (int32_t i = 0; i < kRows; ++i)
    rows.push_back({.temperature = i % 4 ? 0.9 : 0.0,
                    .top_k = i % 3 ? 0 : 50,
                    .top_p = i % 5 ? 1.0 : 0.8,
                    .seed = i,
                    .position = 3 * i});
  const std::vector<int32_t> all = sample(logits, kVocab, rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Values own(logits.begin() + static_cast<int64_t>(i) * kVocab,
                     logits.begin() + static_cast<int64_t>(i + 1) * kVocab);
    EXPECT_EQ(sample(own, kVocab, {rows[i]})[0], all[i]) << "row " << i;
  }
}

/// Pearson's chi-square of counts against expectations, as a standard normal score (Wilson and
/// Hilferty).
double chi_square_score(const std::vector<double>& counts, const std::vector<double>& expected) {
  double statistic = 0, degrees = -1;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (expected[i] == 0) {
      EXPECT_EQ(counts[i], 0) << "token " << i << " must never be drawn";
      continue;
    }
    statistic += (counts[i] - expected[i]) * (counts[i] - expected[i]) / expected[i];
    degrees += 1;
  }
  if (degrees == 0) return 0;
  const double v = 2.0 / (9.0 * degrees);
  return (std::cbrt(statistic / degrees) - (1 - v)) / std::sqrt(v);
}

TEST_P(SamplingTest, FrequenciesFollowTheDistribution) {
  Values logits{0.3, -1.0, 2.0, 0.0, -INFINITY, 1.2, 0.7, -0.4, 1.9, -2.5, 0.1};
  for (double& logit : logits) logit = round_to(DType::f32, logit);
  const int64_t vocab = static_cast<int64_t>(logits.size());
  constexpr int64_t kDraws = 20000;
  Values many;
  for (int64_t i = 0; i < kDraws; ++i) many.insert(many.end(), logits.begin(), logits.end());
  for (const Row& kind : {Row{}, Row{.temperature = 0.5}, Row{.temperature = 2.0, .top_k = 4},
                          Row{.top_p = 0.7}, Row{.min_p = 0.2}}) {
    for (const bool by_position : {true, false}) {
      std::vector<Row> rows(kDraws, kind);
      for (int32_t i = 0; i < kDraws; ++i) {
        Row& row = rows[static_cast<size_t>(i)];
        if (by_position)
          row.position = i;
        else
          row.seed = i;
      }
      std::vector<double> counts(logits.size()), expected(logits.size());
      for (const int32_t id : sample(many, vocab, rows)) ++counts[static_cast<size_t>(id)];
      // The tokens that the filters leave of this small distribution, from the definition.
      std::vector<int32_t> order(logits.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
      });
      const auto weight = [&](int32_t id) {
        return std::exp(logits[static_cast<size_t>(id)] / kind.temperature);
      };
      if (kind.top_k) order.resize(static_cast<size_t>(kind.top_k));
      double total = 0, mass = 0;
      for (const int32_t id : order) total += weight(id);
      std::vector<int32_t> kept;
      for (const int32_t id : order) {
        if (mass < kind.top_p * total && weight(id) >= kind.min_p * weight(order[0]))
          kept.push_back(id);
        mass += weight(id);
      }
      double left = 0;
      for (const int32_t id : kept) left += weight(id);
      for (const int32_t id : kept) expected[static_cast<size_t>(id)] = kDraws * weight(id) / left;
      EXPECT_LT(std::abs(chi_square_score(counts, expected)), 4.0)
          << "temperature " << kind.temperature << ", top_k " << kind.top_k << ", top_p "
          << kind.top_p << ", min_p " << kind.min_p
          << (by_position ? ", by position" : ", by seed");
    }
  }
}

TEST_P(SamplingTest, TokenMasksLeaveExactlyTheirTokens) {
  std::mt19937 generator(4);
  for (const int64_t vocab : {1, 31, 32, 33, 1000, 5003, 151936}) {
    const int64_t words = (vocab + 31) / 32;
    const std::vector<int32_t> mask_rows{2, -1, 0, 2, 1};
    std::vector<int32_t> masks(static_cast<size_t>(4 * words));
    for (int32_t& word : masks) word = static_cast<int32_t>(generator());
    masks.front() = 0;
    masks.back() = -1;
    const Values logits = random_values(DType::f32, 5 * vocab, 1);
    const Operand operand(ops(), DType::f32, {5, vocab}, logits, {.lead = 2, .trail = 6});
    const Operand rows = ints(ops(), mask_rows), list = ints(ops(), masks);
    ops().apply_token_masks(operand, rows, list.view().reshape({4, words}));
    ops().synchronize();
    Values want = logits;
    for (int64_t i = 0; i < 5; ++i)
      for (int64_t t = 0; t < vocab; ++t) {
        const int32_t row = mask_rows[static_cast<size_t>(i)];
        if (row < 0) continue;
        const int32_t word = masks[static_cast<size_t>(row * words + t / 32)];
        const bool is_allowed = (int64_t{word} & int64_t{1} << t % 32) != 0;
        if (!is_allowed) want[static_cast<size_t>(i * vocab + t)] = -INFINITY;
      }
    expect_equal(operand.get(), want, "apply_token_masks");
    operand.expect_guards("logits");
  }
}

NANOVLLM_PARITY_BACKENDS(SamplingTest);

}  // namespace
}  // namespace nanovllm::parity
