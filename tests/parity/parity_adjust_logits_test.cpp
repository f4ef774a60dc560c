// Changes of logits before they are sampled, against the definitions in plain float64.
#include <bit>
#include <cmath>
#include <map>

#include "parity/harness.h"

namespace nanovllm::parity {
namespace {

class AdjustLogitsTest : public BackendTest {};

TEST_P(AdjustLogitsTest, BiasesAndMasksAreThoseOfTheRowAndOfTheTokenBefore) {
  const Values logits = random_values(DType::f32, 4 * 50, 1);
  const Operand operand(ops(), DType::f32, {4, 50}, logits, {.lead = 2, .trail = 6});
  // The first of these rows is the step's fifth; what others get, and padding, means nothing.
  const auto masked = std::bit_cast<int32_t>(-INFINITY), up = std::bit_cast<int32_t>(2.5f),
             down = std::bit_cast<int32_t>(-100.0f);
  const std::vector<int32_t> entries{
      4, 0,  masked, -1,                     // without a condition
      7, 49, masked, 17,                     // the row's own token is 17: masked
      7, 48, masked, 18,                     // and not 18
      6, 7,  masked, -1, 6, 7,  up,     -1,  // masked whatever else it gets, in both orders
      6, 8,  up,     -1, 6, 8,  masked, -1,  //
      5, 0,  up,     -1, 5, 49, down,   -1,  //
      3, 5,  masked, -1, 8, 5,  masked, -1, -1, -1, -1, -1};
  const Operand list = ints(ops(), entries), tokens = ints(ops(), {3, 17, 5, 18}),
                rows = ints(ops(), {0, 0, 0, 0, 3, 2, 0, 1});
  Batch batch;
  batch.tokens = tokens;
  batch.logits_rows = rows;
  ops().bias_logits(operand, list.view().reshape({12, 4}), batch, 4);
  ops().synchronize();
  Values want = logits;
  for (const size_t i : {0, 3 * 50 + 49, 2 * 50 + 7, 2 * 50 + 8}) want[i] = -INFINITY;
  want[50] = static_cast<float>(logits[50]) + 2.5f;
  want[50 + 49] = static_cast<float>(logits[50 + 49]) - 100.0f;
  expect_equal(operand.get(), want, "bias_logits");
  operand.expect_guards("logits");
}

/// A row and the sequence that it samples for.
struct Case {
  double repetition, frequency, presence;
  std::vector<int32_t> tokens;
  int32_t prompt;  // so many of them
};

/// The penalties by their definitions: each token by itself.
Values penalised(Values logits, int64_t vocab, const std::vector<Case>& cases) {
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    std::map<int32_t, int> count;  // in the answer
    for (size_t p = 0; p < c.tokens.size(); ++p) count[c.tokens[p]] += p >= size_t(c.prompt);
    for (const auto& [id, times] : count) {
      if (id < 0) continue;
      double& logit = logits[i * static_cast<size_t>(vocab) + static_cast<size_t>(id)];
      logit = logit > 0 ? logit / c.repetition : logit * c.repetition;
      if (times > 0) logit -= c.frequency * times + c.presence;
    }
  }
  return logits;
}

class Penalised {
 public:
  /// Cuts the sequences into blocks that lie scattered, and penalises their rows.
  Penalised(Backend& ops, Values logits, int64_t vocab, const std::vector<Case>& cases,
            int64_t block_size, Layout layout = {}) {
    const auto rows = std::ssize(cases);
    int64_t columns = 1;
    for (const Case& c : cases)
      columns = std::max(columns, (std::ssize(c.tokens) + block_size - 1) / block_size);
    const int64_t blocks = rows * columns;
    std::vector<int32_t> slots(static_cast<size_t>(blocks * block_size), 1), tables;
    Values repetition, frequency, presence;
    std::vector<int32_t> position, prompt, sequence;
    for (int64_t i = 0; i < rows; ++i) {
      // Row i is of sequence rows - 1 - i.
      const Case& c = cases[static_cast<size_t>(rows - 1 - i)];
      for (int64_t b = 0; b < columns; ++b)
        tables.push_back(static_cast<int32_t>((i * columns + b) * 7 % blocks));
      for (size_t p = 0; p < c.tokens.size(); ++p) {
        const int32_t block = tables[static_cast<size_t>(i * columns) + p / size_t(block_size)];
        slots[static_cast<size_t>(block * block_size) + p % size_t(block_size)] = c.tokens[p];
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      const Case& c = cases[static_cast<size_t>(i)];
      repetition.push_back(c.repetition);
      frequency.push_back(c.frequency);
      presence.push_back(c.presence);
      position.push_back(static_cast<int32_t>(c.tokens.size()));
      prompt.push_back(c.prompt);
      sequence.push_back(static_cast<int32_t>(rows - 1 - i));
    }
    const auto floats = [&](const Values& column) {
      return Operand(ops, DType::f32, {rows}, column);
    };
    const Operand operand(ops, DType::f32, {rows, vocab}, logits, layout),
        r = floats(repetition), f = floats(frequency), p = floats(presence),
        at = ints(ops, position), from = ints(ops, prompt), of = ints(ops, sequence),
        slot_tokens = ints(ops, slots), block_tables = ints(ops, tables);
    SamplingBatch params;
    params.features = kSamplePenalised;
    params.repetition_penalty = r;
    params.frequency_penalty = f;
    params.presence_penalty = p;
    params.position = at;
    params.num_prompt_tokens = from;
    params.sequence = of;
    ops.apply_penalties(operand, params, slot_tokens.view().reshape({blocks, block_size}),
                        block_tables.view().reshape({rows, columns}));
    ops.synchronize();
    operand.expect_guards("logits");
    values = operand.get();
  }
  Values values;
};

std::vector<int32_t> random_tokens(std::mt19937& random, int64_t vocab, int64_t length) {
  std::vector<int32_t> tokens;
  // A third of them from few ids, so that they repeat.
  for (int64_t i = 0; i < length; ++i)
    tokens.push_back(static_cast<int32_t>(random() % uint64_t(i % 3 ? vocab : vocab / 20 + 1)));
  return tokens;
}

TEST_P(AdjustLogitsTest, PenaltiesAreThoseOfTheirDefinitions) {
  std::mt19937 random(3);
  for (const int64_t vocab : {1, 50, 12288, 12289, 151936}) {
    std::vector<Case> cases;
    for (const int64_t length : {1, 2, 63, 64, 600, 5000}) {
      Case c{1, 0, 0, random_tokens(random, vocab, length), static_cast<int32_t>(length / 2)};
      const auto kind = cases.size();
      if (kind % 2 == 0) c.repetition = 0.5 + 0.25 * static_cast<double>(kind);
      if (kind % 3 != 1) c.frequency = 0.5;
      if (kind % 4 != 2) c.presence = -1.25;
      cases.push_back(std::move(c));
    }
    cases.push_back({1, 0, 0, {0}, 1});     // nothing is asked for
    cases.push_back({1.5, 1, 1, {}, 0});    // padding has no tokens
    cases.push_back({2, 1, 1, {-1}, 0});    // a row that failed
    cases.push_back({2, 1, 1, {0, 0}, 2});  // a prompt alone
    const Values logits =
        random_values(DType::f32, std::ssize(cases) * vocab, static_cast<uint32_t>(vocab), 5.0);
    for (const int64_t block_size : {8, 64}) {
      const Penalised got(ops(), logits, vocab, cases, block_size, {.lead = 2, .trail = 6});
      const Values want = penalised(logits, vocab, cases);
      ASSERT_EQ(got.values.size(), want.size());
      // Some thousand times 0.5 comes off: what rounds is a f32 of that size.
      for (size_t i = 0; i < want.size(); ++i)
        ASSERT_NEAR(got.values[i], want[i], 1e-5 + 1e-6 * std::abs(want[i]))
            << "vocab " << vocab << " row " << i / static_cast<size_t>(vocab) << " id "
            << i % static_cast<size_t>(vocab);
    }
  }
}

TEST_P(AdjustLogitsTest, ARowsPenaltiesDoNotDependOnTheBatchOrTheBlocks) {
  std::mt19937 random(8);
  constexpr int64_t kVocab = 13000;
  std::vector<Case> cases;
  for (int i = 0; i < 9; ++i)
    cases.push_back({1.1, 0.3, 0.2 * i, random_tokens(random, kVocab, 300 * i), 100 * i});
  const Values logits = random_values(DType::f32, 9 * kVocab, 4, 3.0);
  const Penalised all(ops(), logits, kVocab, cases, 32);
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto own = [&](const Values& values) {
      return Values(values.begin() + static_cast<int64_t>(i) * kVocab,
                    values.begin() + static_cast<int64_t>(i + 1) * kVocab);
    };
    expect_equal(Penalised(ops(), own(logits), kVocab, {cases[i]}, 8).values, own(all.values),
                 "row");
  }
}

NANOVLLM_PARITY_BACKENDS(AdjustLogitsTest);

}  // namespace
}  // namespace nanovllm::parity
