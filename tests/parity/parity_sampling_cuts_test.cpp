// Sampling where a kernel that takes short cuts could go wrong: rows that no short cut fits, and
// the exact place of each filter's cut.
#include "parity/sampling.h"

namespace nanovllm::parity {
namespace {

using SamplingCutsTest = SamplingTest;

/// Rows that defeat every short cut: they are exact all the same.
struct Adversary {
  const char* name;
  std::function<double(int64_t id, int64_t vocab)> logit;
};

TEST_P(SamplingCutsTest, AwkwardRowsAreExactToo) {
  const double inf = INFINITY;
  const Adversary adversaries[] = {
      {"all equal", [](int64_t, int64_t) { return -3.0; }},
      {"zeros of both signs", [](int64_t id, int64_t) { return id % 3 ? 0.0 : -0.0; }},
      {"many share the top", [](int64_t id, int64_t) { return id % 5 == 2 ? 4.0 : 0.25; }},
      {"nearly all masked",
       [=](int64_t id, int64_t) { return id % 97 == 3 ? static_cast<double>(id % 11) : -inf; }},
      {"one is left", [=](int64_t id, int64_t vocab) { return id == vocab - 1 ? -2.0 : -inf; }},
      {"a huge outlier",
       [](int64_t id, int64_t) { return id == 77 ? 1e30 : 0.1 * static_cast<double>(id % 64); }},
      {"from end to end",
       [](int64_t id, int64_t) { return id == 5   ? 3e38
                                        : id == 9 ? 2e38
                                                  : -3e38; }},
      {"very small", [](int64_t id, int64_t) { return static_cast<double>(id % 50) * 0x1p-140; }},
      {"a slope",
       [](int64_t id, int64_t vocab) {
         return 20.0 * static_cast<double>(id) / static_cast<double>(vocab);
       }},
      {"the best in one chunk",
       [](int64_t id, int64_t) {
         return id < 64 ? 12.0 + 0.125 * static_cast<double>(id % 8) : 0.0;
       }},
  };
  int compared = 0;
  for (const int64_t vocab : {130, 4096, 20001}) {
    const double half =
        (std::floor(static_cast<double>(vocab) / 2) + 0.5) / static_cast<double>(vocab);
    std::vector<Row> rules;
    for (const double temperature : {0.0, 1.0, 0.25, 30.0})
      rules.push_back({.temperature = temperature});
    for (const int32_t k : {1, 3, 50, 600, 1500, 15000}) rules.push_back({.top_k = k});
    for (const double p : {0.001, half, 0.995}) rules.push_back({.top_p = round_to(DType::f32, p)});
    rules.push_back({.top_k = 40, .top_p = round_to(DType::f32, 0.87)});
    rules.push_back({.top_k = 2000, .top_p = round_to(DType::f32, 0.9001)});
    rules.push_back({.min_p = round_to(DType::f32, 0.3)});
    rules.push_back({.temperature = 2.0, .min_p = round_to(DType::f32, 1e-4)});
    rules.push_back({.top_k = 100, .min_p = round_to(DType::f32, 0.01)});
    for (const Adversary& adversary : adversaries) {
      Values row;
      for (int64_t id = 0; id < vocab; ++id)
        row.push_back(round_to(DType::f32, adversary.logit(id, vocab)));
      Values logits;
      for (size_t i = 0; i < rules.size(); ++i) {
        rules[i].seed = static_cast<int64_t>(i) - 3;
        logits.insert(logits.end(), row.begin(), row.end());
      }
      // One more element in front of each row: none but every fourth lies on 16 bytes.
      const std::vector<int32_t> got =
          sample(logits, vocab, rules, {.lead = 1, .trail = vocab % 4});
      for (size_t i = 0; i < rules.size(); ++i) {
        const Answer want = reference(row.data(), vocab, rules[i]);
        if (!(want.margin >= 1e-4)) continue;
        ++compared;
        EXPECT_EQ(got[i], want.id) << adversary.name << ", vocab " << vocab << ", temperature "
                                   << rules[i].temperature << ", top_k " << rules[i].top_k
                                   << ", top_p " << rules[i].top_p << ", min_p " << rules[i].min_p;
      }
    }
  }
  EXPECT_GT(compared, 380);
}

TEST_P(SamplingCutsTest, FiltersCutExactly) {
  // So many draws from tokens of nearly the same weight that each of those that are kept wins
  // sometimes: one too many or too few shows.
  constexpr int64_t kVocab = 4100, kRows = 1500;
  const auto scattered = [](int64_t id) { return id * 7919 % kVocab; };
  struct Kind {
    const char* name;
    std::function<double(int64_t id)> logit;
    Row rule;
    int64_t kept;  // by rank
  };
  const auto good = [&](int64_t id) {  // a hundred good ones
    return scattered(id) < 100 ? 8.0 - 0.0078125 * static_cast<double>(scattered(id)) : -6.0;
  };
  const auto slope = [&](int64_t id) { return 0.0009765625 * static_cast<double>(-scattered(id)); };
  const auto equal = [](int64_t) { return 1.5; };
  const auto share = [&](const std::function<double(int64_t)>& logit, int64_t kept) {
    std::vector<double> weights;
    for (int64_t id = 0; id < kVocab; ++id) weights.push_back(std::exp(logit(id)));
    std::sort(weights.begin(), weights.end(), std::greater<>());
    const auto end = weights.begin() + kept;
    const double mass = std::accumulate(weights.begin(), end, 0.0) - 0.5 * *(end - 1);
    return round_to(DType::f32,
                    mass / std::accumulate(end, weights.end(), mass + 0.5 * *(end - 1)));
  };
  for (const Kind& kind :
       {Kind{"good", good, {.top_k = 37}, 37}, Kind{"good", good, {.top_p = share(good, 41)}, 41},
        Kind{"good", good, {.top_k = 60, .top_p = round_to(DType::f32, 0.5)}, 0},
        Kind{"good", good, {.min_p = round_to(DType::f32, std::exp(-0.0078125 * 29.5))}, 30},
        Kind{"slope", slope, {.top_k = 50}, 50},
        Kind{"slope", slope, {.top_p = share(slope, 43)}, 43},
        Kind{"equal", equal, {.top_k = 40}, 40},
        Kind{"equal", equal, {.top_p = share(equal, 45)}, 45}}) {
    Values row;
    for (int64_t id = 0; id < kVocab; ++id) row.push_back(kind.logit(id));
    std::vector<int32_t> order(kVocab);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return row[static_cast<size_t>(a)] > row[static_cast<size_t>(b)];
    });
    int64_t kept = kind.kept;
    if (kept == 0) {  // top_k, then top_p within what it left
      double total = 0, mass = 0;
      for (int64_t i = 0; i < kind.rule.top_k; ++i)
        total += std::exp(row[static_cast<size_t>(order[static_cast<size_t>(i)])]);
      while (mass < kind.rule.top_p * total)
        mass += std::exp(row[static_cast<size_t>(order[static_cast<size_t>(kept++)])]);
    }
    std::vector<int32_t> want(order.begin(), order.begin() + kept);
    std::sort(want.begin(), want.end());
    Values logits;
    std::vector<Row> rules(kRows, kind.rule);
    for (size_t i = 0; i < rules.size(); ++i) {
      rules[i].seed = static_cast<int64_t>(i);
      logits.insert(logits.end(), row.begin(), row.end());
    }
    std::vector<int32_t> got = sample(logits, kVocab, rules);
    std::sort(got.begin(), got.end());
    got.erase(std::unique(got.begin(), got.end()), got.end());
    EXPECT_EQ(got, want) << kind.name << ", top_k " << kind.rule.top_k << ", top_p "
                         << kind.rule.top_p << ", min_p " << kind.rule.min_p;
  }
}

// The weights of equal logits and their sums are exact in any precision: the mass of two of four is
// half of all, and the second token brings it there.
TEST_P(SamplingCutsTest, MassThatIsReachedExactlyNeedsNoFurtherToken) {
  constexpr int64_t kRows = 200;
  for (const int32_t top_k : {0, 4}) {
    std::vector<Row> rows(kRows, Row{.top_k = top_k, .top_p = 0.5});
    Values logits;
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].seed = static_cast<int64_t>(i);
      logits.insert(logits.end(), {-9.0, 2.0, 2.0, 2.0, 2.0});
    }
    for (size_t i = 0; i < logits.size(); i += 5) logits[i] = -INFINITY;
    std::vector<int32_t> got = sample(logits, 5, rows);
    std::sort(got.begin(), got.end());
    got.erase(std::unique(got.begin(), got.end()), got.end());
    EXPECT_EQ(got, (std::vector<int32_t>{1, 2})) << "top_k " << top_k;
  }
}

TEST_P(SamplingCutsTest, ATemperatureThatOverflowsTheLogitsTakesTheLargestUnderFiltersToo) {
  Values logits{1.0, 2e38, 3e38, -3e38};
  for (double& logit : logits) logit = round_to(DType::f32, logit);
  for (const Row& row :
       {Row{.temperature = 1e-4}, Row{.temperature = 1e-4, .top_k = 3},
        Row{.temperature = 1e-4, .top_p = 0.5}, Row{.temperature = 1e-4, .min_p = 0.25}})
    EXPECT_EQ(sample(logits, 4, {row}), std::vector<int32_t>{2})
        << "top_k " << row.top_k << ", top_p " << row.top_p << ", min_p " << row.min_p;
}

NANOVLLM_PARITY_BACKENDS(SamplingCutsTest);

}  // namespace
}  // namespace nanovllm::parity
