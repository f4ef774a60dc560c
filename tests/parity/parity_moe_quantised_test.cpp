// Experts with quantised weights: the bits of experts with the bf16 numbers that they stand for or,
// where rows are quantised too (docs/contract.md), those of the operations one after another, and
// float64.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include <fmt/format.h>

#include "parity/harness.h"
#include "parity/quantised.h"

namespace nanovllm::parity {
namespace {

using Rows = WeightFormat::Rows;
constexpr Scales kUsual{"usual scales", 1e-3f, 1e-2f};

/// A stack of weights in the backend's own layout.
class Stack {
 public:
  Stack(Backend& ops, WeightFormat format, int64_t count, int64_t n, int64_t k) {
    const size_t bytes = (ops.weight_bytes(format, n, k) + 255) / 256 * 256;
    buffer_ = ops.allocate(bytes * static_cast<size_t>(count));
    view_ = stack_of(ops.weight_view(buffer_.get(), format, n, k), count, bytes);
  }
  const nanovllm::Weight& view() const { return view_; }

 private:
  Buffer buffer_;
  nanovllm::Weight view_;
};

struct Shape {
  int64_t h, n, experts;
};

class QuantisedExperts : public BackendTest {
 protected:
  bool keeps(const Shape& s, WeightFormat gate_up, WeightFormat down) const {
    return ops().keeps(gate_up, 2 * s.n, s.h, true) && ops().keeps(down, s.h, s.n, true);
  }
  /// Random experts. `usual`: all with scales of f16's bits, and zero points beside four bits
  /// alone; else only every second one is such.
  static void fill(WeightFormat format, int64_t count, int64_t n, int64_t k,
                   std::vector<QuantizedRows>& stored, bool usual) {
    stored.clear();
    for (int64_t e = 0; e < count; ++e) {
      stored.push_back(random_rows(format, n, k, kUsual, static_cast<uint32_t>(1 + e)));
      QuantizedRows& rows = stored.back();
      if (usual || e % 2 == 0) {
        for (float& scale : rows.scales)
          scale = std::bit_cast<float>(std::bit_cast<uint32_t>(scale) & 0xffffe000u);
        if (format.numbers == WeightFormat::int8) std::ranges::fill(rows.zeros, int8_t{0});
      }
      // Blocks share scales: as in a checkpoint or, where rows are few, as a rank may have them.
      const int64_t groups = format.groups(k), together = n % 128 == 0 ? 128 : 8;
      if (format.rows == Rows::group)
        for (int64_t i = 0; i < n * groups; ++i)
          rows.scales[static_cast<size_t>(i)] = rows.scales[static_cast<size_t>(
              i / groups / together * together * groups + i % groups)];
    }
  }
  Stack quantised_stack(WeightFormat format, int64_t n, int64_t k,
                        const std::vector<QuantizedRows>& stored) {
    Stack stack(ops(), format, std::ssize(stored), n, k);
    for (size_t e = 0; e < stored.size(); ++e)
      ops().load_quantised(stack.view()[static_cast<int64_t>(e)], stored[e]);
    return stack;
  }
  Stack random_stack(WeightFormat format, int64_t count, int64_t n, int64_t k,
                     std::vector<QuantizedRows>& stored, bool usual = false) {
    fill(format, count, n, k, stored, usual);
    return quantised_stack(format, n, k, stored);
  }
  /// The same as bf16 numbers.
  Stack plain_stack(WeightFormat format, int64_t n, int64_t k,
                    const std::vector<QuantizedRows>& stored) {
    Stack stack(ops(), WeightFormat::bf16, std::ssize(stored), n, k);
    for (size_t e = 0; e < stored.size(); ++e) {
      std::vector<bf16> numbers = meaning_of(format, n, k, stored[e]);
      const Tensor part(numbers.data(), DType::bf16, {n, k});
      ops().load(stack.view()[static_cast<int64_t>(e)].data, {&part, 1});
    }
    return stack;
  }

  /// Tokens [first, first + count), each of which has its own values, `k` experts and weights.
  Operand run(const Shape& s, const Stack& gate_up, const Stack& down, int64_t first, int64_t count,
              int64_t k) {
    Values x, weights;
    std::vector<int32_t> ids;
    for (int64_t token = first; token < first + count; ++token) {
      const Values row = row_of(s, token),
                   share = uniform_values(DType::f32, k, static_cast<uint32_t>(token), .1, .5);
      x.insert(x.end(), row.begin(), row.end());
      weights.insert(weights.end(), share.begin(), share.end());
      for (int64_t i = 0; i < k; ++i) ids.push_back(expert_of(s, token, i));
    }
    if (k == 1) std::fill(weights.begin(), weights.end(), 1.0);
    const int64_t pairs = count * k;
    const Operand x_operand(ops(), DType::bf16, {count, s.h}, x),
        weights_operand(ops(), DType::f32, {count, k}, weights),
        ids_operand = ints(ops(), ids), act(ops(), DType::bf16, {pairs, s.n}),
        out(ops(), DType::bf16, {pairs, s.h}),
        plan(ops(), DType::i32, {moe_plan_size(pairs, s.experts)});
    Operand y(ops(), DType::bf16, {count, s.h});
    ops().moe_mlp(y, x_operand, weights_operand, ids_operand.view().reshape({count, k}),
                  gate_up.view(), down.view(), {act, out, plan});
    ops().synchronize();
    for (const Operand* o : {&std::as_const(y), &act, &out, &plan}) o->expect_guards("an operand");
    return y;
  }
  static Values row_of(const Shape& s, int64_t token) {
    return random_values(DType::bf16, s.h, static_cast<uint32_t>(1000 + token));
  }
  /// Some experts are chosen by many tokens; the last one by none.
  static int32_t expert_of(const Shape& s, int64_t token, int64_t i) {
    return static_cast<int32_t>((token * token / 3 + i) % (s.experts - 1));
  }

  static std::vector<WeightFormat> plain_row_formats(int64_t k) {
    std::vector<WeightFormat> list;
    for (const auto numbers : {WeightFormat::int4, WeightFormat::int8, WeightFormat::e4m3})
      for (const int64_t group : {int64_t{32}, int64_t{128}, k})
        if (k % group == 0 && (group != 128 || k != 128)) list.emplace_back(numbers, group);
    return list;
  }
  static std::vector<WeightFormat> quantised_row_formats(int64_t k) {
    std::vector<WeightFormat> list = {{WeightFormat::e4m3, k, Rows::token},
                                      {WeightFormat::e4m3, k, Rows::tensor},
                                      {WeightFormat::int8, k, Rows::token},
                                      {WeightFormat::int4, 32, Rows::token}};
    if (k % 128 == 0) list.push_back({WeightFormat::e4m3, 128, Rows::group});
    return list;
  }
};

constexpr Shape kShapes[] = {{128, 64, 5}, {256, 96, 7}, {160, 256, 12}, {384, 256, 6}};

TEST_P(QuantisedExperts, HaveTheBitsOfTheNumbersThatTheyStandFor) {
  int kept = 0;
  for (const Shape& s : kShapes) {
    const auto downs = plain_row_formats(s.n);
    for (size_t i = 0; const WeightFormat in : plain_row_formats(s.h)) {
      const WeightFormat out = downs[i++ * 5 % downs.size()];  // of another kind, mostly
      const bool keeps_in = ops().keeps(in, 2 * s.n, s.h, true),
                 keeps_out = ops().keeps(out, s.h, s.n, true);
      if (!keeps_in && !keeps_out) continue;
      ++kept;
      for (const bool usual : {false, true}) {
        std::vector<QuantizedRows> ins, outs;
        // A weight that is not kept is plain beside the other.
        const auto stack = [&](WeightFormat format, bool is_kept, int64_t n, int64_t k,
                               auto& stored) {
          fill(format, s.experts, n, k, stored, usual);
          return is_kept ? quantised_stack(format, n, k, stored)
                         : plain_stack(format, n, k, stored);
        };
        const Stack gate_up = stack(in, keeps_in, 2 * s.n, s.h, ins),
                    down = stack(out, keeps_out, s.h, s.n, outs),
                    plain_in = plain_stack(in, 2 * s.n, s.h, ins),
                    plain_out = plain_stack(out, s.h, s.n, outs);
        for (const int64_t tokens : {1, 2, 3, 20, 70, 200}) {
          if (!usual && tokens > 1 && tokens < 70) continue;
          ASSERT_TRUE(run(s, gate_up, down, 0, tokens, 3).bits() ==
                      run(s, plain_in, plain_out, 0, tokens, 3).bits())
              << fmt::format("{} and {} bits, groups of {} and {}, {} tokens of {}, usual: {}",
                             in.bits(), out.bits(), in.group, out.group, tokens, s.h, usual);
        }
      }
    }
  }
  if (kept == 0) GTEST_SKIP() << ops().name() << " keeps no quantised experts";
}

// Kernels whose blocks stay have more than one unit of work each.
TEST_P(QuantisedExperts, OfManyTokensHaveTheBitsOfTheNumbersThatTheyStandFor) {
  const Shape s{512, 256, 40};
  constexpr int64_t kTokens = 2000, kChosen = 3;
  int kept = 0;
  for (const auto numbers : {WeightFormat::int4, WeightFormat::int8, WeightFormat::e4m3}) {
    const WeightFormat format(numbers, 128);
    if (!keeps(s, format, format)) continue;
    ++kept;
    std::vector<QuantizedRows> ins, outs;
    const Stack gate_up = random_stack(format, s.experts, 2 * s.n, s.h, ins, true),
                down = random_stack(format, s.experts, s.h, s.n, outs, true),
                plain_in = plain_stack(format, 2 * s.n, s.h, ins),
                plain_out = plain_stack(format, s.h, s.n, outs);
    EXPECT_TRUE(run(s, gate_up, down, 0, kTokens, kChosen).bits() ==
                run(s, plain_in, plain_out, 0, kTokens, kChosen).bits())
        << fmt::format("{} bits", format.bits());
  }
  if (kept == 0) GTEST_SKIP() << ops().name() << " keeps no quantised experts";
}

// Roundings may fall to the other side of a tie: that changes single numbers by a little.
TEST_P(QuantisedExperts, AreNearFloat64) {
  const Shape s{384, 256, 6};
  constexpr int64_t kTokens = 60, kChosen = 3;
  int kept = 0;
  for (const auto numbers : {WeightFormat::int4, WeightFormat::int8, WeightFormat::e4m3}) {
    const WeightFormat in(numbers, 128), out(numbers, 32);
    if (!keeps(s, in, out)) continue;
    ++kept;
    std::vector<QuantizedRows> ins, outs;
    const Stack gate_up = random_stack(in, s.experts, 2 * s.n, s.h, ins, true),
                down = random_stack(out, s.experts, s.h, s.n, outs, true);
    std::vector<std::vector<bf16>> in_numbers, out_numbers;
    for (size_t e = 0; e < ins.size(); ++e) {
      in_numbers.push_back(meaning_of(in, 2 * s.n, s.h, ins[e]));
      out_numbers.push_back(meaning_of(out, s.h, s.n, outs[e]));
    }
    const auto product = [](const std::vector<bf16>& w, const std::vector<double>& x) {
      std::vector<double> y;
      for (size_t r = 0; r < w.size() / x.size(); ++r) {
        double sum = 0;
        for (size_t c = 0; c < x.size(); ++c)
          sum += x[c] * static_cast<double>(static_cast<float>(w[r * x.size() + c]));
        y.push_back(round_to(DType::bf16, sum));
      }
      return y;
    };
    const Values got = run(s, gate_up, down, 0, kTokens, kChosen).get();
    double error = 0, size = 0;
    for (int64_t token = 0; token < kTokens; ++token) {
      const Values x = row_of(s, token),
                   share =
                       uniform_values(DType::f32, kChosen, static_cast<uint32_t>(token), .1, .5);
      std::vector<double> want(static_cast<size_t>(s.h));
      for (int64_t i = 0; i < kChosen; ++i) {
        const auto e = static_cast<size_t>(expert_of(s, token, i));
        const auto both = product(in_numbers[e], x);
        std::vector<double> act;
        for (size_t j = 0; j < both.size() / 2; ++j)
          act.push_back(round_to(DType::bf16,
                                 both[j] / (1 + std::exp(-both[j])) * both[j + both.size() / 2]));
        const auto y = product(out_numbers[e], act);
        for (size_t j = 0; j < y.size(); ++j) want[j] += share[static_cast<size_t>(i)] * y[j];
      }
      for (size_t j = 0; j < want.size(); ++j) {
        const double difference = got[static_cast<size_t>(token * s.h) + j] - want[j];
        error += difference * difference;
        size += want[j] * want[j];
      }
    }
    EXPECT_LE(std::sqrt(error / size), 0x1p-8) << fmt::format("{} bits", in.bits());
    EXPECT_GT(size, 0);
  }
  if (kept == 0) GTEST_SKIP() << ops().name() << " keeps no quantised experts";
}

TEST_P(QuantisedExperts, ATokenHasTheSameBitsAloneAndInAnyBatch) {
  int kept = 0;
  for (const Shape& s : kShapes)
    for (auto formats : {plain_row_formats(s.h), quantised_row_formats(s.h)})
      for (const WeightFormat in : formats) {
        const bool has_blocks = in.rows == Rows::group && s.n % kRowGroup == 0;
        const WeightFormat out =
            has_blocks
                ? in
                : WeightFormat(in.numbers, s.n, in.rows == Rows::group ? Rows::token : in.rows);
        if (!keeps(s, in, out)) continue;
        ++kept;
        std::vector<QuantizedRows> stored;
        const Stack gate_up = random_stack(in, s.experts, 2 * s.n, s.h, stored),
                    down = random_stack(out, s.experts, s.h, s.n, stored);
        const auto all = run(s, gate_up, down, 0, 300, 3).bits();
        for (const int64_t count : {1, 2, 5, 40})
          for (const int64_t first : {int64_t{0}, int64_t{17}, 300 - count}) {
            const auto some = run(s, gate_up, down, first, count, 3).bits();
            ASSERT_TRUE(std::equal(some.begin(), some.end(), all.begin() + first * s.h * 2))
                << fmt::format("{} tokens from {}, {} bits, rows {}", count, first, in.bits(),
                               static_cast<int>(in.rows));
          }
      }
  if (kept == 0) GTEST_SKIP() << ops().name() << " keeps no quantised experts";
}

// Rows are quantised before each of an expert's products by the rule of gemm().
TEST_P(QuantisedExperts, AnExpertIsItsProductsAndTheGateBetween) {
  int kept = 0;
  for (const Shape& s : kShapes) {
    const auto downs = quantised_row_formats(s.n);
    for (size_t i = 0; const WeightFormat in : quantised_row_formats(s.h)) {
      const WeightFormat out = downs[i++ % downs.size()];
      const bool keeps_in = ops().keeps(in, 2 * s.n, s.h, true),
                 keeps_out = ops().keeps(out, s.h, s.n, true);
      if (!keeps_in && !keeps_out) continue;
      ++kept;
      std::vector<QuantizedRows> stored;
      // A weight that is not kept is plain beside the other.
      const auto stack = [&](WeightFormat format, bool is_kept, int64_t n, int64_t k) {
        if (is_kept) return random_stack(format, s.experts, n, k, stored);
        stored.assign(static_cast<size_t>(s.experts), random_rows(format, n, k, kUsual));
        return plain_stack(format, n, k, stored);
      };
      const Stack gate_up = stack(in, keeps_in, 2 * s.n, s.h),
                  down = stack(out, keeps_out, s.h, s.n);
      constexpr int64_t kTokens = 30;
      const auto got = run(s, gate_up, down, 0, kTokens, 1).bits();
      for (int64_t token = 0; token < kTokens; ++token) {
        const int64_t e = expert_of(s, token, 0);
        const Operand x(ops(), DType::bf16, {1, s.h}, row_of(s, token)),
            both(ops(), DType::bf16, {1, 2 * s.n}), act(ops(), DType::bf16, {1, s.n}),
            y(ops(), DType::bf16, {1, s.h});
        ops().gemm(both, x, gate_up.view()[e]);
        ops().silu_and_mul(act, both);
        ops().gemm(y, act, down.view()[e]);
        ops().synchronize();
        const auto want = y.bits();
        ASSERT_TRUE(std::equal(want.begin(), want.end(), got.begin() + token * s.h * 2))
            << "token " << token << ", rows " << static_cast<int>(in.rows);
      }
    }
  }
  if (kept == 0) GTEST_SKIP() << ops().name() << " quantises no experts' rows";
}

/// x's numbers and scale by the definition, with scales of tokens and int8.
float quantise_int8(const std::vector<double>& x, std::vector<double>& numbers) {
  float most = 0x1p-100f;
  for (const double v : x) most = std::max(most, std::abs(static_cast<float>(v)));
  const float scale = most / 127;
  numbers.clear();
  for (const double v : x) numbers.push_back(std::nearbyint(double{static_cast<float>(v) / scale}));
  return scale;
}

// Sums of int8 are exact, and so is each step in float64; but for the gate, whose exponential may
// fall to the other side of a tie: that changes single elements of a token's row.
TEST_P(QuantisedExperts, OfInt8HaveTheNumbersOfTheDefinition) {
  const Shape s{128, 128, 5};
  const WeightFormat in(WeightFormat::int8, s.h, Rows::token),
      out(WeightFormat::int8, s.n, Rows::token);
  if (!keeps(s, in, out)) GTEST_SKIP() << ops().name() << " quantises no experts' rows";
  std::vector<QuantizedRows> ins, outs;
  const Stack gate_up = random_stack(in, s.experts, 2 * s.n, s.h, ins),
              down = random_stack(out, s.experts, s.h, s.n, outs);
  const auto product = [](const QuantizedRows& w, int64_t rows, const std::vector<double>& q,
                          float scale) {
    std::vector<double> y;
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0;
      for (size_t c = 0; c < q.size(); ++c)
        sum += q[c] * w.numbers[static_cast<size_t>(r) * q.size() + c];
      const float value = static_cast<float>(sum) * (scale * w.scales[static_cast<size_t>(r)]);
      y.push_back(round_to(DType::bf16, value));
    }
    return y;
  };
  constexpr int64_t kTokens = 50;
  const Values got = run(s, gate_up, down, 0, kTokens, 1).get();
  int64_t unlike = 0;
  for (int64_t token = 0; token < kTokens; ++token) {
    const auto e = static_cast<size_t>(expert_of(s, token, 0));
    std::vector<double> q, act;
    float scale = quantise_int8(row_of(s, token), q);
    const auto both = product(ins[e], 2 * s.n, q, scale);
    for (int64_t i = 0; i < s.n; ++i) {
      const double gate = both[static_cast<size_t>(i)];
      act.push_back(
          round_to(DType::bf16, gate / (1 + std::exp(-gate)) * both[static_cast<size_t>(s.n + i)]));
    }
    scale = quantise_int8(act, q);
    const auto want = product(outs[e], s.h, q, scale);
    for (int64_t j = 0; j < s.h; ++j) {
      const double y = got[static_cast<size_t>(token * s.h + j)];
      unlike += y != want[static_cast<size_t>(j)];
      // One number more or less of the row between, and the rounding of the result.
      EXPECT_NEAR(y, want[static_cast<size_t>(j)],
                  double{scale} * 128 * double{outs[e].scales[static_cast<size_t>(j)]} +
                      0x1p-8 * std::abs(y))
          << "token " << token << " column " << j;
    }
  }
  EXPECT_LE(unlike, kTokens * s.h / 20);
}

NANOVLLM_PARITY_BACKENDS(QuantisedExperts);

}  // namespace
}  // namespace nanovllm::parity
