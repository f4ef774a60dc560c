// Shared by the tests of sampling: a fixture that samples rows, and the sampler in plain float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/noise.h"
#include "parity/harness.h"

namespace nanovllm::parity {

struct Row {
  double temperature = 1.0;
  int32_t top_k = 0;
  double top_p = 1.0, min_p = 0.0;
  int64_t seed = 1;
  int32_t position = 0;
};

class SamplingTest : public BackendTest {
 protected:
  std::vector<int32_t> sample(const Values& logits, int64_t vocab, const std::vector<Row>& rows,
                              Layout layout = {}) {
    const int64_t n = static_cast<int64_t>(rows.size());
    const auto column = [&](DType dtype, auto field) {
      Values values;
      for (const Row& row : rows) values.push_back(static_cast<double>(field(row)));
      return Operand(ops(), dtype, {n}, values);
    };
    const Operand temperature = column(DType::f32, [](const Row&r) { return r.temperature; }),
                  top_p = column(DType::f32, [](const Row&r) { return r.top_p; }),
                  min_p = column(DType::f32, [](const Row&r) { return r.min_p; }),
                  top_k = column(DType::i32, [](const Row&r) { return r.top_k; }),
                  seed = column(DType::i64, [](const Row&r) { return r.seed; }),
                  position = column(DType::i32, [](const Row&r) { return r.position; });
    SamplingBatch batch{temperature, top_k, top_p, min_p, seed, position};
    for (const Row& r : rows) {
      if (r.temperature == 0) continue;
      batch.features |= kSampleRandom;
      if (r.top_k > 0 || r.top_p < 1 || r.min_p > 0) batch.features |= kSampleFiltered;
    }
    const Operand operand(ops(), DType::f32, {n, vocab}, logits, layout),
        ids(ops(), DType::i32, {n});
    ops().sample(ids, operand, batch);
    ops().synchronize();
    expect_equal(operand.get(), logits, "logits are only read");
    operand.expect_guards("logits");
    ids.expect_guards("ids");
    const Values got = ids.get();
    return {got.begin(), got.end()};
  }
};

/// The specification, plainly: sort, cut, add noise, take the largest. Also tells how far the
/// winner is ahead, and how far the nearest cut is: where rounding could decide, the answer is not
/// compared.
struct Answer {
  int32_t id;
  double margin;
};
inline Answer reference(const double* logits, int64_t vocab, const Row& row) {
  std::vector<int32_t> order(static_cast<size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  const double top = logits[order[0]];
  if (row.temperature == 0) return {order[0], 1.0};
  const auto weight = [&](int32_t id) { return std::exp((logits[id] - top) / row.temperature); };
  double margin = 1.0;
  if (row.top_k > 0 && static_cast<size_t>(row.top_k) < order.size())
    order.resize(static_cast<size_t>(row.top_k));
  if (row.top_p < 1) {
    double total = 0, mass = 0;
    for (const int32_t id : order) total += weight(id);
    size_t kept = 0;
    while (kept < order.size() && mass < row.top_p * total) {
      mass += weight(order[kept++]);
      margin = std::min(margin, std::abs(mass / total - row.top_p));
    }
    order.resize(std::max<size_t>(kept, 1));
  }
  if (row.min_p > 0) {
    std::vector<int32_t> left;
    for (const int32_t id : order) {
      if (weight(id) >= row.min_p) left.push_back(id);
      margin = std::min(margin, std::abs(weight(id) - row.min_p));
    }
    order = left;
  }
  double best = -INFINITY, second = -INFINITY;
  int32_t winner = -1;
  for (const int32_t id : order) {
    if (logits[id] == -INFINITY) continue;
    const Philox4 bits =
        noise_bits(static_cast<uint64_t>(row.seed), static_cast<uint32_t>(row.position),
                   static_cast<uint32_t>(id / 4));
    const double score = logits[id] / row.temperature -
                         std::log(-std::log(static_cast<double>(noise_uniform(bits.x[id % 4]))));
    if (score > best)
      second = best, best = score, winner = id;
    else
      second = std::max(second, score);
  }
  return {winner, std::min(margin, best - second)};
}

}  // namespace nanovllm::parity
