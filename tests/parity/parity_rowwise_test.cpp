// Operations on rows: copies, additions, norms, activation, and their fusion against its own body.
#include <cmath>
#include <optional>

#include "parity/rowwise.h"

namespace nanovllm::parity {
namespace {

constexpr Layout kStrided{.lead = 8, .trail = 24}, kUnaligned{.lead = 1, .trail = 2};
const std::vector<std::pair<int64_t, int64_t>> kShapes{
    {1, 1},    {1, 1024}, {3, 7},     {5, 33},    {3, 4096}, {2, 8192},
    {2, 9000}, {2, 16},   {130, 100}, {40, 2049}, {600, 64}, {2, 5120}};

TEST_P(RowwiseParity, GatherRowsCopies) {
  for (const Layout layout : {Layout{}, kStrided}) {
    for (const int64_t n : {1, 7, 64, 1000}) {
      const Values x = random_values(dtype(), 9 * n, 1);
      const std::vector<int32_t> rows{8, 0, 0, 3, 8, 7};
      const Operand from = operand({9, n}, x, layout), y(ops(), dtype(), {6, n}, layout);
      ops().gather_rows(y, from, ints(ops(), rows));
      ops().synchronize();
      Values want;
      for (const int32_t row : rows)
        want.insert(want.end(), x.begin() + row * n, x.begin() + (row + 1) * n);
      expect_equal(y.get(), want, "gather_rows");
      y.expect_guards("y");
    }
  }
}

TEST_P(RowwiseParity, AddAndAddBias) {
  for (const auto& [t, n] : kShapes) {
    for (const Layout layout : {Layout{}, kStrided}) {
      const Values a = random_values(dtype(), t * n, 1), b = random_values(dtype(), t * n, 2);
      const Operand x = operand({t, n}, a, layout), y = operand({t, n}, b, layout),
                    z = operand({t, n}, a, layout);
      const Values bias(b.begin(), b.begin() + n);
      ops().add(x, y);
      ops().add_bias(z, operand({n}, bias));
      ops().synchronize();
      // One addition of two values of the type, correctly rounded: exact.
      Values sum(a.size()), biased(a.size());
      for (size_t i = 0; i < a.size(); ++i) {
        sum[i] = round_to(dtype(),
                          static_cast<double>(static_cast<float>(a[i]) + static_cast<float>(b[i])));
        biased[i] =
            round_to(dtype(), static_cast<double>(static_cast<float>(a[i]) +
                                                  static_cast<float>(bias[i % bias.size()])));
      }
      expect_equal(x.get(), sum, "add");
      expect_equal(z.get(), biased, "add_bias");
      x.expect_guards("x");
      z.expect_guards("z");
    }
  }
}

/// Hugging Face's order of roundings: the normalised value to the type, then the product with w.
Values rms_norm_reference(const Values& x, const Values& w, double eps, DType dtype) {
  Values y(x.size());
  for (size_t row = 0; row < x.size(); row += w.size()) {
    double squares = 0;
    for (size_t i = 0; i < w.size(); ++i) squares += x[row + i] * x[row + i];
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(w.size()) + eps);
    for (size_t i = 0; i < w.size(); ++i) y[row + i] = round_to(dtype, x[row + i] * scale) * w[i];
  }
  return y;
}

TEST_P(RowwiseParity, RmsNormOfMatrices) {
  for (const auto& [t, n] : kShapes) {
    for (const Layout layout : {Layout{}, kStrided}) {
      const Values x = random_values(dtype(), t * n, 1, 3.0),
                   w = uniform_values(dtype(), n, 2, 0.2, 2.0);
      const Operand from = operand({t, n}, x, layout), y(ops(), dtype(), {t, n}, layout),
                    in_place = operand({t, n}, x, layout);
      ops().rms_norm(y, from, operand({n}, w), 1e-6f);
      ops().rms_norm(in_place, in_place, operand({n}, w), 1e-6f);
      ops().synchronize();
      const Values want = rms_norm_reference(x, w, 1e-6, dtype());
      // A sum of n squares in f32 is off by at most n roundings (a tree: log n), halved by the
      // root; then the normalised value may fall on the other side of a rounding boundary (one unit
      // of the type), and the product rounds once.
      const double relative =
          (dtype() == DType::f32 ? 0 : 2 * eps()) + eps() +
          0x1p-24 * (16 + 2 * std::log2(static_cast<double>(n + 1)) + static_cast<double>(n) / 32);
      const auto bound = [&](size_t i) { return relative * std::abs(want[i]); };
      expect_close(y.get(), want, bound,
                   "rms_norm " + std::to_string(t) + " x " + std::to_string(n));
      EXPECT_EQ(y.bits(), in_place.bits()) << "y may be x";
      y.expect_guards("y");
      in_place.expect_guards("in place");
    }
  }
}

TEST_P(RowwiseParity, RmsNormRoundsBeforeItScales) {
  constexpr int64_t kRows = 64, n = 512;
  const Values x = random_values(dtype(), kRows * n, 1),
               w = uniform_values(dtype(), n, 2, 0.2, 2.0);
  const Operand y(ops(), dtype(), {kRows, n});
  ops().rms_norm(y, operand({kRows, n}, x), operand({n}, w), 1e-6f);
  ops().synchronize();
  const Values want = rms_norm_reference(x, w, 1e-6, dtype()), got = y.get();
  size_t different = 0;
  for (size_t i = 0; i < got.size(); ++i) different += got[i] != round_to(dtype(), want[i]);
  // bf16: only a value next to a rounding boundary may differ (one in some thousands). Without the
  // first rounding a third of them would. In f32 there is nothing to tell apart.
  if (dtype() == DType::bf16) {
    EXPECT_LT(different, got.size() / 200);
  }
}

TEST_P(RowwiseParity, RmsNormOfHeads) {
  for (const int64_t d : {64, 80, 96, 128, 256}) {
    const Values x = random_values(dtype(), 5 * 3 * d, 1),
                 w = uniform_values(dtype(), d, 2, 0.2, 2.0);
    const Operand heads = operand({5, 3, d}, x, {.lead = 2 * d, .trail = d}),
                  flat = operand({15, d}, x);
    ops().rms_norm(heads, heads, operand({d}, w), 1e-5f);
    ops().rms_norm(flat, flat, operand({d}, w), 1e-5f);
    ops().synchronize();
    EXPECT_EQ(heads.bits(), flat.bits()) << "head_dim " << d;
    heads.expect_guards("heads");
  }
}

TEST_P(RowwiseParity, SiluAndMul) {
  for (const auto& [t, n] : kShapes) {
    for (const Layout layout : {Layout{}, kStrided}) {
      Values x = random_values(dtype(), t * 2 * n, 1, 3.0);
      x[0] = round_to(dtype(), 88.5);  // the ends of the exponential
      x[x.size() / 2 - 1] = round_to(dtype(), -100.0);
      const Operand gate_up = operand({t, 2 * n}, x, layout), y(ops(), dtype(), {t, n}, layout);
      ops().silu_and_mul(y, gate_up);
      ops().synchronize();
      Values want;
      for (int64_t i = 0; i < t; ++i)
        for (int64_t j = 0; j < n; ++j) {
          const double gate = x[static_cast<size_t>(i * 2 * n + j)],
                       up = x[static_cast<size_t>(i * 2 * n + n + j)];
          want.push_back(gate / (1 + std::exp(-gate)) * up);
        }
      // Far out the result is below the smallest normal f32: an absolute error of that size is no
      // error.
      expect_close(
          y.get(), want,
          [&](size_t i) { return rounding(want[i]) + 0x1p-22 * std::abs(want[i]) + 1e-30; },
          "silu_and_mul");
      y.expect_guards("y");
      gate_up.expect_guards("gate_up");
    }
  }
}

TEST_P(RowwiseParity, AddRmsNormIsAddThenRmsNorm) {
  for (const auto& [t, n] : kShapes) {
    const Values x = random_values(dtype(), t * n, 1),
                 residual = random_values(dtype(), t * n, 2, 5.0),
                 w = uniform_values(dtype(), n, 3, 0.2, 2.0);
    const Operand weight = operand({n}, w);
    std::optional<std::pair<std::vector<std::byte>, std::vector<std::byte>>> want;
    for (const Layout layout : {Layout{}, kStrided, kUnaligned}) {
      const auto run = [&](bool composed, bool in_place) {
        Operand x_operand = operand({t, n}, x, layout), y(ops(), dtype(), {t, n}, layout),
                sum = operand({t, n}, residual, layout);
        const Tensor out = in_place ? x_operand.view() : y.view();
        if (composed)
          ops().Backend::add_rms_norm(out, sum, x_operand, weight, 1e-6f);
        else
          ops().add_rms_norm(out, sum, x_operand, weight, 1e-6f);
        ops().synchronize();
        x_operand.expect_guards("x");
        y.expect_guards("y");
        sum.expect_guards("residual");
        return std::pair{(in_place ? x_operand : y).bits(), sum.bits()};
      };
      for (const auto& [composed, in_place] :
           {std::pair{true, false}, {false, false}, {false, true}}) {
        const auto got = run(composed, in_place);
        if (!want) want = got;
        EXPECT_TRUE(got == *want) << t << " x " << n << ", a step of " << layout.trail << ", fused "
                                  << !composed << ", in place " << in_place;
      }
    }
  }
}

TEST_P(RowwiseParity, ARowDoesNotDependOnTheOthers) {
  constexpr int64_t kRows = 700, n = 1000;
  const Values x = random_values(dtype(), kRows * n, 1),
               w = uniform_values(dtype(), n / 2, 2, 0.2, 2.0);
  const Operand all = operand({kRows, n}, x), weight = operand({n / 2}, w),
                many(ops(), dtype(), {kRows, n / 2}), silu(ops(), dtype(), {kRows, n / 2});
  ops().rms_norm(many, all.view().cols(0, n / 2), weight, 1e-6f);
  ops().silu_and_mul(silu, all);
  for (const int64_t row : {0, 1, 349, 350, 699}) {
    const Operand one(ops(), dtype(), {1, n / 2}), one_silu(ops(), dtype(), {1, n / 2});
    ops().rms_norm(one, all.view().rows(row, row + 1).cols(0, n / 2), weight, 1e-6f);
    ops().silu_and_mul(one_silu, all.view().rows(row, row + 1));
    ops().synchronize();
    const auto of_row = [&](const Operand& o) {
      const std::vector<std::byte> bits = o.bits();
      const int64_t bytes = static_cast<int64_t>(bits.size()) / kRows;
      return std::vector<std::byte>(bits.begin() + row * bytes, bits.begin() + (row + 1) * bytes);
    };
    EXPECT_EQ(one.bits(), of_row(many)) << "rms_norm, row " << row;
    EXPECT_EQ(one_silu.bits(), of_row(silu)) << "silu_and_mul, row " << row;
  }
}

NANOVLLM_PARITY(RowwiseParity);

}  // namespace
}  // namespace nanovllm::parity
