// Mixture of experts: routing and the experts' products against float64, and their exactness: what
// a token gets depends on that token alone.
#include <cmath>
#include <numeric>
#include <set>

#include "parity/harness.h"

namespace nanovllm::parity {
namespace {

class RoutingParity : public BackendTest {
 protected:
  struct Routed {
    Values weights, ids;
  };
  Routed route(const Values& logits, int64_t experts, int64_t k, bool normalise,
               Layout layout = {}) {
    const int64_t tokens = std::ssize(logits) / experts;
    const Operand l(ops(), DType::f32, {tokens, experts}, logits, layout);
    const Operand weights(ops(), DType::f32, {tokens, k}), ids(ops(), DType::i32, {tokens, k});
    ops().moe_route(weights, ids, l, normalise);
    ops().synchronize();
    weights.expect_guards("weights");
    ids.expect_guards("ids");
    return {weights.get(), ids.get()};
  }
};

TEST_P(RoutingParity, TakesTheLikeliestInOrderWithTheirShareOfAll) {
  const std::pair<int64_t, int64_t> shapes[] = {{1, 1},   {5, 2},   {12, 12}, {64, 6},
                                                {128, 8}, {200, 4}, {1000, 8}};
  for (const auto& [experts, k] : shapes)
    for (const bool normalise : {false, true}) {
      constexpr int64_t kTokens = 37;
      const Values logits = random_values(DType::f32, kTokens * experts, 3, 2.0);
      const Routed got = route(logits, experts, k, normalise, {.lead = 3, .trail = 5});
      Values weights, ids, bounds;
      for (int64_t t = 0; t < kTokens; ++t) {
        const double* row = logits.data() + t * experts;
        std::vector<int64_t> order(static_cast<size_t>(experts));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return row[a] > row[b]; });
        double total = 0, chosen = 0;
        for (int64_t e = 0; e < experts; ++e) total += std::exp(row[e] - row[order[0]]);
        for (int64_t i = 0; i < k; ++i)
          chosen += std::exp(row[order[static_cast<size_t>(i)]] - row[order[0]]);
        for (int64_t i = 0; i < k; ++i) {
          const double delta = row[order[static_cast<size_t>(i)]] - row[order[0]];
          ids.push_back(static_cast<double>(order[static_cast<size_t>(i)]));
          weights.push_back(std::exp(delta) / (normalise ? chosen : total));
          // The exponent rounds, and so do exp, the sums (of at most 32 terms in a chain, on any
          // backend) and two divisions.
          bounds.push_back(weights.back() * 0x1p-24 * (2 * std::abs(delta) + 48));
        }
      }
      const std::string what = std::to_string(k) + " of " + std::to_string(experts);
      expect_equal(got.ids, ids, what);
      expect_close(
          got.weights, weights, [&](size_t i) { return bounds[i]; }, what);
    }
}

TEST_P(RoutingParity, TiesGoToTheLowerId) {
  constexpr int64_t kExperts = 40;
  Values logits(kExperts, 0.5);
  logits[33] = logits[7] = logits[34] = 1.0;
  const Routed got = route(logits, kExperts, 6, true);
  expect_equal(got.ids, {7, 33, 34, 0, 1, 2}, "ids");
}

TEST_P(RoutingParity, ARowThatIsNotFiniteHarmsNoOther) {
  constexpr int64_t kExperts = 20, k = 4;
  const Values good = random_values(DType::f32, kExperts, 5);
  const Routed alone = route(good, kExperts, k, true);
  Values all;
  for (const double poison : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
    Values bad = random_values(DType::f32, kExperts, 6);
    for (size_t e = 0; e < bad.size(); ++e)
      if (e == 3 || std::isinf(poison)) bad[e] = poison;
    all.insert(all.end(), bad.begin(), bad.end());
    all.insert(all.end(), good.begin(), good.end());
  }
  all.insert(all.end(), kExperts, double{NAN});
  const Routed got = route(all, kExperts, k, true);
  for (size_t row = 0; row < 7; ++row) {
    const auto begin = static_cast<std::ptrdiff_t>(row * k);
    const std::set<double> ids(got.ids.begin() + begin, got.ids.begin() + begin + k);
    EXPECT_EQ(ids.size(), static_cast<size_t>(k)) << "row " << row;
    EXPECT_TRUE(*ids.begin() >= 0 && *ids.rbegin() < kExperts) << "row " << row;
    for (size_t i = row * k; i < (row + 1) * k; ++i)
      if (row % 2 == 0) {
        EXPECT_TRUE(std::isnan(got.weights[i])) << "row " << row;
      } else {
        EXPECT_EQ(got.ids[i], alone.ids[i % k]);
        EXPECT_EQ(got.weights[i], alone.weights[i % k]);
      }
  }
}

NANOVLLM_PARITY_BACKENDS(RoutingParity);

/// A stack of weights in the backend's own layout.
class Stack {
 public:
  Stack(Backend& ops, DType dtype, int64_t count, int64_t n, int64_t k, const Values& values) {
    const WeightFormat format = plain_format(dtype);
    const size_t bytes = (ops.weight_bytes(format, n, k) + 255) / 256 * 256;
    buffer_ = ops.allocate(bytes * static_cast<size_t>(count));
    view_ = stack_of(ops.weight_view(buffer_.get(), format, n, k), count, bytes);
    std::vector<float> host(values.begin(), values.end());
    for (int64_t i = 0; i < count; ++i) {
      const Tensor part(host.data() + i * n * k, DType::f32, {n, k});
      ops.load(view_[i].data, {&part, 1});
    }
    ops.synchronize();
  }
  operator nanovllm::Weight() const { return view_; }

 private:
  Buffer buffer_;
  nanovllm::Weight view_;
};

struct Shape {
  int64_t h, n, experts, k;
};

/// A mixture's weights, and tokens with the experts that a router chose for them. A token's values
/// depend on its number alone.
class Mixture {
 public:
  Mixture(Backend& ops, DType dtype, Shape shape)
      : ops_(ops),
        dtype_(dtype),
        shape_(shape),
        gate_up_values_(random_values(dtype, shape.experts * 2 * shape.n * shape.h, 1,
                                      1 / std::sqrt(static_cast<double>(shape.h)))),
        down_values_(random_values(dtype, shape.experts * shape.h * shape.n, 2,
                                   1 / std::sqrt(static_cast<double>(shape.n)))),
        gate_up_(ops, dtype, shape.experts, 2 * shape.n, shape.h, gate_up_values_),
        down_(ops, dtype, shape.experts, shape.h, shape.n, down_values_) {}

  void set_tokens(const std::vector<uint32_t>& tokens) {
    x_.clear(), weights_.clear(), ids_.clear();
    for (const uint32_t token : tokens) {
      const Values row = random_values(dtype_, shape_.h, 1000 + token);
      const Values share = uniform_values(DType::f32, shape_.k, 2000 + token, 0.05, 0.5);
      x_.insert(x_.end(), row.begin(), row.end());
      weights_.insert(weights_.end(), share.begin(), share.end());
      // Some experts are chosen by many, and some by nobody.
      std::vector<int32_t> order(static_cast<size_t>(shape_.experts - 1));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin() + (token % 3 == 0 ? 1 : 0), order.end(), std::mt19937(token));
      ids_.insert(ids_.end(), order.begin(), order.begin() + shape_.k);
    }
  }

  Operand run(Layout layout = {}, bool in_place = false) const {
    const int64_t tokens = std::ssize(x_) / shape_.h, pairs = tokens * shape_.k;
    Operand x(ops_, dtype_, {tokens, shape_.h}, x_, layout);
    Operand y(ops_, dtype_, {tokens, shape_.h}, layout);
    const Operand weights(ops_, DType::f32, {tokens, shape_.k}, weights_);
    const Operand ids = ints(ops_, ids_), act(ops_, dtype_, {pairs, shape_.n}),
                  out(ops_, dtype_, {pairs, shape_.h}),
                  plan(ops_, DType::i32, {moe_plan_size(pairs, shape_.experts)});
    ops_.moe_mlp(in_place ? x : y, x, weights, ids.view().reshape({tokens, shape_.k}), gate_up_,
                 down_, {act, out, plan});
    ops_.synchronize();
    for (const Operand* o : {&std::as_const(x), &std::as_const(y), &act, &out, &plan})
      o->expect_guards("an operand");
    return in_place ? std::move(x) : std::move(y);
  }

  void expect_right(const Values& got, double eps) const {
    const Shape& s = shape_;
    Values want, bounds;
    for (size_t token = 0; token < x_.size() / static_cast<size_t>(s.h); ++token) {
      Values y(static_cast<size_t>(s.h)), bound(y.size()), magnitude(y.size());
      for (int64_t i = 0; i < s.k; ++i) {
        const size_t pair = token * static_cast<size_t>(s.k) + static_cast<size_t>(i);
        add_expert(ids_[pair], x_.data() + token * static_cast<size_t>(s.h), weights_[pair], eps, y,
                   bound, magnitude);
      }
      for (size_t j = 0; j < y.size(); ++j) {
        want.push_back(y[j]);
        bounds.push_back(bound[j] + eps * std::abs(y[j]) +
                         0x1p-24 * static_cast<double>(s.k + 1) * magnitude[j]);
      }
    }
    expect_close(
        got, want, [&](size_t i) { return bounds[i]; }, "moe_mlp");
  }

 private:
  /// y += weight * expert(x) in float64, and how far roundings may move it: three roundings to the
  /// dtype, each carried on through what follows, and f32 sums of `length` terms.
  void add_expert(int32_t expert, const double* x, double weight, double eps, Values& y,
                  Values& bound, Values& magnitude) const {
    const Shape& s = shape_;
    const double* gate_up = gate_up_values_.data() + expert * 2 * s.n * s.h;
    const double* down = down_values_.data() + expert * s.h * s.n;
    const auto accumulation = [](int64_t length) { return 0x1p-24 * static_cast<double>(length); };
    struct Sum {
      double value = 0, error = 0;
    };
    const auto product = [&](int64_t row) {
      Sum sum;
      for (int64_t c = 0; c < s.h; ++c) {
        const double term = x[c] * gate_up[row * s.h + c];
        sum.value += term;
        sum.error += accumulation(s.h) * std::abs(term);
      }
      sum.error += eps * std::abs(sum.value);
      return sum;
    };
    std::vector<Sum> act;
    for (int64_t i = 0; i < s.n; ++i) {
      const Sum gate = product(i), up = product(s.n + i);
      const double silu = gate.value / (1 + std::exp(-gate.value));
      const double value = silu * up.value;
      // |silu'| < 1.1; the function itself is computed to some 8 units in the last place of f32.
      act.push_back({value, 1.1 * gate.error * (std::abs(up.value) + up.error) +
                                std::abs(silu) * up.error + (eps + 0x1p-21) * std::abs(value)});
    }
    for (int64_t j = 0; j < s.h; ++j) {
      double sum = 0, error = 0;
      for (int64_t i = 0; i < s.n; ++i) {
        const double w = down[j * s.n + i];
        const Sum& a = act[static_cast<size_t>(i)];
        sum += a.value * w;
        error += (a.error + accumulation(s.n) * std::abs(a.value)) * std::abs(w);
      }
      y[static_cast<size_t>(j)] += weight * sum;
      bound[static_cast<size_t>(j)] += weight * (error + eps * std::abs(sum));
      magnitude[static_cast<size_t>(j)] += weight * std::abs(sum);
    }
  }

  Backend& ops_;
  DType dtype_;
  Shape shape_;
  Values gate_up_values_, down_values_;
  Stack gate_up_, down_;
  Values x_, weights_;
  std::vector<int32_t> ids_;
};

std::vector<uint32_t> first_tokens(int64_t count) {
  std::vector<uint32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 0u);
  return tokens;
}

class MoeParity : public ParityTest {};

/// Multiples of the kernels' tiles, others, and what no vector load takes.
constexpr Shape kShapes[] = {{128, 64, 4, 2}, {200, 72, 5, 3},    {50, 21, 3, 2},
                             {264, 24, 4, 1}, {320, 192, 12, 11}, {64, 320, 20, 2}};

TEST_P(MoeParity, MatchesFloat64) {
  for (const Shape& shape : kShapes) {
    Mixture mixture(ops(), dtype(), shape);
    for (const int64_t tokens : {1, 2, 3, 20, 70}) {
      mixture.set_tokens(first_tokens(tokens));
      mixture.expect_right(mixture.run().get(), eps());
    }
  }
}

TEST_P(MoeParity, TakesStridedRowsAndMayOverwriteItsInput) {
  Mixture mixture(ops(), dtype(), {128, 64, 6, 2});
  for (const int64_t tokens : {1, 9}) {
    mixture.set_tokens(first_tokens(tokens));
    const auto want = mixture.run().bits();
    EXPECT_EQ(mixture.run({.lead = 8, .trail = 16}).bits(), want);
    EXPECT_EQ(mixture.run({}, true).bits(), want);
  }
}

// The numbers of tokens go through every way in which a GPU cuts the work.
TEST_P(MoeParity, ATokenHasTheSameBitsAloneAndInAnyBatch) {
  for (const Shape& shape : {Shape{192, 104, 4, 2}, Shape{50, 21, 3, 2}, Shape{72, 136, 9, 8},
                             Shape{320, 192, 9, 8}, Shape{128, 64, 64, 8}}) {
    Mixture mixture(ops(), dtype(), shape);
    constexpr uint32_t kAsked[] = {0, 1, 2, 40, 41};
    std::vector<std::vector<std::byte>> alone;
    for (const uint32_t token : kAsked) {
      mixture.set_tokens({token});
      alone.push_back(mixture.run().bits());
    }
    for (const size_t count : {2u, 3u, 5u, 14u, 33u, 90u, 290u}) {
      std::vector<uint32_t> tokens = first_tokens(static_cast<int64_t>(count));
      for (uint32_t& token : tokens) token += 100;
      std::vector<size_t> at;
      for (size_t i = 0; i < std::size(kAsked); ++i) {
        at.push_back(i * 7919 % count);
        tokens[at.back()] = kAsked[i];  // a later one may take an earlier one's place
      }
      mixture.set_tokens(tokens);
      const auto all = mixture.run().bits();
      for (size_t i = 0; i < at.size(); ++i) {
        if (tokens[at[i]] != kAsked[i]) continue;
        const size_t row = alone[i].size();
        EXPECT_TRUE(std::equal(alone[i].begin(), alone[i].end(),
                               all.begin() + static_cast<std::ptrdiff_t>(at[i] * row)))
            << "token " << kAsked[i] << " among " << count << ", h " << shape.h;
      }
    }
  }
}

// A fusion: the bits of what it is made of.
TEST_P(MoeParity, TheRouterIsItsProductAndTheRouting) {
  struct Router {
    int64_t h, experts, k;
  };
  for (const Router& r : {Router{64, 5, 2}, {256, 128, 8}, {384, 12, 3}, {1024, 300, 8}}) {
    const Weight w(
        ops(), dtype(), r.experts, r.h,
        random_values(dtype(), r.experts * r.h, 5, 1 / std::sqrt(static_cast<double>(r.h))));
    for (const int64_t tokens : {1, 2, 8, 9, 64, 65}) {
      Values values = random_values(dtype(), tokens * r.h, 6);
      std::fill_n(values.begin() + (tokens - 1) * r.h, tokens > 8 ? r.h : 0, 0.0);  // all the same
      const Operand x(ops(), dtype(), {tokens, r.h}, values, {.lead = 8, .trail = 8});
      for (const bool normalise : {true, false}) {
        struct Routed {
          Operand weights, ids, logits;
        };
        const auto route = [&](bool fused) {
          Routed out{Operand(ops(), DType::f32, {tokens, r.k}),
                     Operand(ops(), DType::i32, {tokens, r.k}),
                     Operand(ops(), DType::f32, {tokens, r.experts})};
          if (fused)
            ops().moe_router(out.weights, out.ids, out.logits, x, w, normalise, {});
          else
            ops().Backend::moe_router(out.weights, out.ids, out.logits, x, w, normalise, {});
          ops().synchronize();
          for (const Operand* o : {&out.weights, &out.ids, &out.logits}) o->expect_guards("output");
          return out;
        };
        const Routed fused = route(true), parts = route(false);
        EXPECT_EQ(fused.logits.bits(), parts.logits.bits()) << tokens << " tokens, h " << r.h;
        EXPECT_EQ(fused.ids.bits(), parts.ids.bits()) << tokens << " tokens, h " << r.h;
        EXPECT_EQ(fused.weights.bits(), parts.weights.bits()) << tokens << " tokens, h " << r.h;
      }
    }
  }
}

// A row of padding, whose results are not read, has experts that another row reads already: on a
// GPU, where steps are padded.
TEST_P(MoeParity, PaddingHasTheExpertsOfAnotherRow) {
  constexpr int64_t kHidden = 256, kExperts = 128, kChosen = 8, kPadding = 5;
  const Weight w(ops(), dtype(), kExperts, kHidden,
                 random_values(dtype(), kExperts * kHidden, 5, 1 / 16.0));
  for (const int64_t tokens : {8, 64, 80}) {
    const auto real = static_cast<size_t>((tokens - kPadding) * kChosen);
    const Operand x(ops(), dtype(), {tokens, kHidden}, random_values(dtype(), tokens * kHidden, 6));
    Values slots(static_cast<size_t>(tokens));
    std::iota(slots.begin(), slots.end(), 0);
    std::fill(slots.end() - kPadding, slots.end(), -1);
    const Operand slot_mapping(ops(), DType::i32, {tokens}, slots);
    const auto route = [&](const Tensor& of_slots) {
      const Operand weights(ops(), DType::f32, {tokens, kChosen}),
          ids(ops(), DType::i32, {tokens, kChosen}), logits(ops(), DType::f32, {tokens, kExperts});
      ops().moe_router(weights, ids, logits, x, w, true, of_slots);
      ops().synchronize();
      return std::pair{weights.get(), ids.get()};
    };
    const auto [weights, ids] = route({});
    const auto [padded_weights, padded_ids] = route(slot_mapping);
    const auto first = [&](const Values& values) {
      return Values(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(real));
    };
    EXPECT_EQ(first(padded_weights), first(weights)) << tokens << " tokens";
    EXPECT_EQ(first(padded_ids), first(ids)) << tokens << " tokens";
    if (ops().device().kind == Device::cpu) continue;
    const std::set<double> read(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(real)),
        all(padded_ids.begin(), padded_ids.end());
    EXPECT_EQ(all, read) << tokens << " tokens";
  }
}

NANOVLLM_PARITY(MoeParity);

}  // namespace
}  // namespace nanovllm::parity
