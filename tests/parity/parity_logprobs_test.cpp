// Log probabilities against float64.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "parity/harness.h"

namespace nanovllm::parity {
namespace {

using LogprobsTest = BackendTest;

TEST_P(LogprobsTest, TopLogprobsMatchFloat64) {
  for (const int64_t vocab : {5, 1000, 151936}) {
    for (const int64_t k : {0, 1, 5, 20, 1000}) {
      if (k > vocab) continue;
      constexpr int64_t kRows = 3;
      Values logits = random_values(DType::f32, kRows * vocab, 21, 4.0);
      logits[static_cast<size_t>(vocab + 1)] = logits[static_cast<size_t>(vocab + 3)];  // a tie
      logits[static_cast<size_t>(vocab + 4)] = -INFINITY;
      // A row of few different logits.
      for (int64_t i = 2 * vocab; i < 3 * vocab; ++i)
        logits[static_cast<size_t>(i)] = static_cast<double>(i * 7919 % 3) - 1;
      const std::vector<int32_t> chosen{2, 3, static_cast<int32_t>(vocab - 1)};
      const Operand operand(ops(), DType::f32, {kRows, vocab}, logits, {.lead = 4, .trail = 4});
      const Operand ids(ops(), DType::i32, {kRows, 1 + k}),
          logprobs(ops(), DType::f32, {kRows, 1 + k}), ranks(ops(), DType::i32, {kRows});
      ops().top_logprobs(ids, logprobs, ranks, operand, ints(ops(), chosen));
      ops().synchronize();
      Values want_ids, want_logprobs, want_ranks;
      for (int64_t r = 0; r < kRows; ++r) {
        const double* row = logits.data() + r * vocab;
        std::vector<int32_t> order(static_cast<size_t>(vocab));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return row[a] > row[b]; });
        double total = 0;
        for (int64_t i = 0; i < vocab; ++i) total += std::exp(row[i] - row[order[0]]);
        std::vector<int32_t> listed{chosen[static_cast<size_t>(r)]};
        listed.insert(listed.end(), order.begin(), order.begin() + k);
        for (const int32_t id : listed) {
          want_ids.push_back(id);
          want_logprobs.push_back(row[id] - row[order[0]] - std::log(total));
        }
        want_ranks.push_back(static_cast<double>(std::find(order.begin(), order.end(), listed[0]) -
                                                 order.begin() + 1));
      }
      expect_equal(ids.get(), want_ids, "ids");
      // f32 exponentials (2 ulp), f32 sums of a thousand at a time, and the result's own rounding.
      expect_close(
          logprobs.get(), want_logprobs,
          [&](size_t i) { return 0x1p-24 * (std::abs(want_logprobs[i]) + 64); }, "logprobs");
      expect_equal(ranks.get(), want_ranks, "ranks");
      for (const Operand* o : {&ids, &logprobs, &ranks}) o->expect_guards("result");
    }
  }
}

TEST_P(LogprobsTest, TopLogprobsOfAFailedRowAreNan) {
  Values logits = random_values(DType::f32, 2 * 100, 2);
  logits[120] = NAN;
  const Operand operand(ops(), DType::f32, {2, 100}, logits), ids(ops(), DType::i32, {2, 3}),
      logprobs(ops(), DType::f32, {2, 3}), ranks(ops(), DType::i32, {2});
  ops().top_logprobs(ids, logprobs, ranks, operand, ints(ops(), {4, -1}));
  ops().synchronize();
  const Values got = logprobs.get();
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(std::isnan(got[i]), i >= 3) << i;
}

TEST_P(LogprobsTest, AChosenIdOutsideTheVocabularyIsTakenAsZero) {
  constexpr int64_t kVocab = 100;
  const Values logits = random_values(DType::f32, 2 * kVocab, 6);
  const auto of = [&](const std::vector<int32_t>& chosen) {
    const Operand operand(ops(), DType::f32, {2, kVocab}, logits), ids(ops(), DType::i32, {2, 3}),
        logprobs(ops(), DType::f32, {2, 3}), ranks(ops(), DType::i32, {2});
    ops().top_logprobs(ids, logprobs, ranks, operand, ints(ops(), chosen));
    ops().synchronize();
    return std::tuple(ids.get(), logprobs.get(), ranks.get());
  };
  EXPECT_EQ(of({-1, kVocab}), of({0, 0}));
}

NANOVLLM_PARITY_BACKENDS(LogprobsTest);

}  // namespace
}  // namespace nanovllm::parity
