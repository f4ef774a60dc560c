// Operations on rows: copies, additions, norms, activation, rotary embedding, the KV cache, and the
// fusions against their own bodies.
#include <cmath>
#include <optional>

#include "parity/harness.h"

namespace nanovllm::parity {
namespace {

constexpr Layout kStrided{.lead = 8, .trail = 24}, kUnaligned{.lead = 1, .trail = 2};
const std::vector<std::pair<int64_t, int64_t>> kShapes{
    {1, 1},    {1, 1024}, {3, 7},     {5, 33},    {3, 4096}, {2, 8192},
    {2, 9000}, {2, 16},   {130, 100}, {40, 2049}, {600, 64}, {2, 5120}};

class RowwiseParity : public ParityTest {
 protected:
  Operand operand(const std::vector<int64_t>& shape, const Values& values, Layout layout = {}) {
    return {ops(), dtype(), shape, values, layout};
  }
  /// A value of the result's type, and whatever f32 arithmetic of a few steps loses on the way.
  double rounding(double value) const { return (eps() + 4 * 0x1p-24) * std::abs(value); }
};

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

/// cos_sin [positions, rotary_dim] of theta 10000.
Values rotary_table(int64_t positions, int64_t rotary_dim) {
  Values table;
  for (int64_t p = 0; p < positions; ++p)
    for (const bool sine : {false, true})
      for (int64_t i = 0; i < rotary_dim / 2; ++i) {
        const double angle =
            static_cast<double>(p) *
            std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
        table.push_back(round_to(DType::f32, sine ? std::sin(angle) : std::cos(angle)));
      }
  return table;
}

TEST_P(RowwiseParity, RotaryEmbedding) {
  constexpr int64_t kTokens = 6, kPositions = 500;
  const std::vector<int32_t> positions{0, 1, 499, 17, 17, 250};
  for (const auto& [d, rotary_dim] : std::initializer_list<std::pair<int64_t, int64_t>>{
           {64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {128, 64}, {80, 20}}) {
    const Values table = rotary_table(kPositions, rotary_dim);
    const Operand cos_sin(ops(), DType::f32, {kPositions, rotary_dim}, table);
    const Values q = random_values(dtype(), kTokens * 4 * d, 1),
                 k = random_values(dtype(), kTokens * 2 * d, 2);
    const Operand q_operand = operand({kTokens, 4, d}, q, {.lead = 0, .trail = 4 * d}),
                  k_operand = operand({kTokens, 2, d}, k, {.lead = 4 * d, .trail = 2 * d});
    ops().rotary_embedding(q_operand, k_operand, ints(ops(), positions), cos_sin);
    ops().synchronize();
    const auto expect = [&](const Operand& operand, const Values& x, int64_t heads,
                            const char* name) {
      Values want = x, bound(x.size(), 0.0);
      for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t i = 0; i < rotary_dim / 2; ++i) {
            const auto a = static_cast<size_t>((t * heads + h) * d + i),
                       b = a + static_cast<size_t>(rotary_dim / 2);
            const auto at = static_cast<size_t>(positions[static_cast<size_t>(t)] * rotary_dim + i);
            const double c = table[at], s = table[at + static_cast<size_t>(rotary_dim / 2)];
            want[a] = x[a] * c - x[b] * s;
            want[b] = x[b] * c + x[a] * s;
            bound[a] = rounding(want[a]) + 0x1p-23 * (std::abs(x[a] * c) + std::abs(x[b] * s));
            bound[b] = rounding(want[b]) + 0x1p-23 * (std::abs(x[b] * c) + std::abs(x[a] * s));
          }
      expect_close(
          operand.get(), want, [&](size_t i) { return bound[i]; }, name);
      operand.expect_guards(name);
    };
    expect(q_operand, q, 4, "q");
    expect(k_operand, k, 2, "k");
  }
}

struct CacheShape {
  int64_t kv_heads, block_size, d;
};

TEST_P(RowwiseParity, StoreKvPutsEveryTokenIntoItsSlot) {
  constexpr int64_t kBlocks = 5;
  for (const CacheShape s :
       {CacheShape{1, 8, 64}, {2, 16, 80}, {8, 256, 128}, {3, 32, 96}, {1, 16, 256}}) {
    const std::vector<int64_t> shape{kBlocks, s.kv_heads, s.block_size, s.d};
    const Values old = random_values(dtype(), kBlocks * s.kv_heads * s.block_size * s.d, 9);
    const Operand cache_k = operand(shape, old), cache_v = operand(shape, old);
    const std::vector<int32_t> slots{0, static_cast<int32_t>(kBlocks * s.block_size - 1), -1,
                                     static_cast<int32_t>(s.block_size), 3};
    const int64_t tokens = static_cast<int64_t>(slots.size()), row = s.kv_heads * s.d;
    const Values k = random_values(dtype(), tokens * row, 1),
                 v = random_values(dtype(), tokens * row, 2);
    ops().store_kv(
        {cache_k, cache_v}, operand({tokens, s.kv_heads, s.d}, k, {.lead = row, .trail = row}),
        operand({tokens, s.kv_heads, s.d}, v, {.lead = 2 * row, .trail = 0}), ints(ops(), slots));
    ops().synchronize();
    const auto expect = [&](const Operand& cache, const Values& x, const char* name) {
      Values want = old;
      for (size_t t = 0; t < slots.size(); ++t)
        for (int64_t h = 0; slots[t] >= 0 && h < s.kv_heads; ++h)
          for (int64_t i = 0; i < s.d; ++i)
            want[static_cast<size_t>(((slots[t] / s.block_size * s.kv_heads + h) * s.block_size +
                                      slots[t] % s.block_size) *
                                         s.d +
                                     i)] =
                x[t * static_cast<size_t>(row) + static_cast<size_t>(h * s.d + i)];
      expect_equal(cache.get(), want, name);
      cache.expect_guards(name);
    };
    expect(cache_k, k, "keys");
    expect(cache_v, v, "values");
  }
}

// -- Fusions against their own bodies

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

/// Runs a fusion that ends in the store of k and v, and its composition, and compares q and the
/// cache. `run` gets q, k, v, batch, cos_sin and cache.
class RopeStoreParity : public RowwiseParity {
 protected:
  using Run = std::function<void(bool composed, Tensor q, Tensor k, Tensor v, const Batch& batch,
                                 Tensor cos_sin, KvCache cache)>;
  static constexpr int64_t kTokens = 7;

  void expect_parts(const CacheShape& s, int64_t rotary_dim, int64_t lead, const Run& run) {
    constexpr int64_t kBlocks = 3, kPositions = 100;
    const int64_t heads = 2 * s.kv_heads, q_row = heads * s.d, kv_row = s.kv_heads * s.d,
                  row = q_row + 2 * kv_row;
    const Operand cos_sin(ops(), DType::f32, {kPositions, rotary_dim},
                          rotary_table(kPositions, rotary_dim));
    const Operand positions = ints(ops(), {0, 1, 2, 99, 50, 7, 0}),
                  slots = ints(ops(), {0, 1, 2, 23, -1, 7, 9});
    Batch batch;
    batch.positions = positions;
    batch.slot_mapping = slots;
    const auto results = [&](bool composed, DType cache_dtype) {
      const auto pages = [&](const Operand& o) {
        return kv_pages(o.view().data, cache_dtype, {kBlocks, s.kv_heads, s.block_size, s.d},
                        ops().device());
      };
      const auto words =
          static_cast<int64_t>(kv_row_bytes(cache_dtype, s.d)) * s.kv_heads * s.block_size / 4;
      const Values zeros(static_cast<size_t>(kBlocks * words), 0.0);
      const Operand cache_k(ops(), DType::i32, {kBlocks, words}, zeros),
          cache_v(ops(), DType::i32, {kBlocks, words}, zeros);
      const Operand qkv = operand({kTokens, row}, random_values(dtype(), kTokens * row, 6),
                                  {.lead = lead, .trail = 0});
      run(composed, qkv.view().cols(0, q_row).split(s.d),
          qkv.view().cols(q_row, q_row + kv_row).split(s.d),
          qkv.view().cols(q_row + kv_row, row).split(s.d), batch, cos_sin,
          {pages(cache_k), pages(cache_v)});
      ops().synchronize();
      for (const Operand* o : {&cache_k, &cache_v, &qkv}) o->expect_guards("operand");
      return std::vector{qkv.bits(), cache_k.bits(), cache_v.bits()};
    };
    if (ops().has_e4m3_cache()) {
      const auto want = results(true, DType::e4m3), got = results(false, DType::e4m3);
      EXPECT_EQ(got[1], want[1]) << "keys of E4M3, head_dim " << s.d;
      EXPECT_EQ(got[2], want[2]) << "values of E4M3, head_dim " << s.d;
    }
    const auto want = results(true, dtype()), got = results(false, dtype());
    // Whether k itself is left as it was or comes back rotated is the fusion's business; the cache
    // has it.
    EXPECT_EQ(got[1], want[1]) << "keys, head_dim " << s.d;
    EXPECT_EQ(got[2], want[2]) << "values, head_dim " << s.d;
    const int64_t element = static_cast<int64_t>(size_of(dtype()));
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t at = t * row * element;
      EXPECT_TRUE(std::equal(want[0].begin() + at, want[0].begin() + at + q_row * element,
                             got[0].begin() + at))
          << "q of token " << t << ", head_dim " << s.d << ", rotary " << rotary_dim;
    }
  }
  struct Shape {
    CacheShape cache;
    int64_t rotary_dim, lead;
  };
  static constexpr Shape kRopeShapes[] = {
      {{2, 16, 128}, 128, 0}, {{1, 8, 64}, 64, 0},    {{3, 8, 80}, 80, 0},   {{2, 32, 96}, 96, 0},
      {{1, 16, 256}, 256, 0}, {{2, 16, 128}, 64, 0},  {{1, 16, 256}, 64, 8}, {{2, 8, 80}, 20, 0},
      {{3, 8, 128}, 128, 4},  {{2, 16, 128}, 128, 1}, {{1, 8, 16}, 16, 0},   {{2, 8, 24}, 16, 0}};
};

TEST_P(RopeStoreParity, RopeStoreIsItsParts) {
  for (const Shape& shape : kRopeShapes)
    expect_parts(shape.cache, shape.rotary_dim, shape.lead,
                 [&](bool composed, Tensor q, Tensor k, Tensor v, const Batch& batch,
                     Tensor cos_sin, KvCache cache) {
                   if (composed)
                     ops().Backend::rope_store(q, k, v, batch, cos_sin, cache);
                   else
                     ops().rope_store(q, k, v, batch, cos_sin, cache);
                 });
}

TEST_P(RopeStoreParity, QkNormRopeStoreIsItsParts) {
  for (const Shape& shape : kRopeShapes) {
    const int64_t d = shape.cache.d;
    const Operand q_norm = operand({d}, uniform_values(dtype(), d, 4, 0.5, 1.5)),
                  k_norm = operand({d}, uniform_values(dtype(), d, 5, 0.5, 1.5));
    expect_parts(shape.cache, shape.rotary_dim, shape.lead,
                 [&](bool composed, Tensor q, Tensor k, Tensor v, const Batch& batch,
                     Tensor cos_sin, KvCache cache) {
                   if (composed)
                     ops().Backend::qk_norm_rope_store(q, k, v, q_norm, k_norm, 1e-6f, batch,
                                                       cos_sin, cache);
                   else
                     ops().qk_norm_rope_store(q, k, v, q_norm, k_norm, 1e-6f, batch, cos_sin,
                                              cache);
                 });
  }
}

TEST_P(RopeStoreParity, ProductWithQkNormRopeStoreIsItsParts) {
  constexpr int64_t kInner = 64;
  for (const Shape& shape : kRopeShapes) {
    const int64_t d = shape.cache.d, n = 4 * shape.cache.kv_heads * d;
    const Operand q_norm = operand({d}, uniform_values(dtype(), d, 4, 0.5, 1.5)),
                  k_norm = operand({d}, uniform_values(dtype(), d, 5, 0.5, 1.5)),
                  x = operand({kTokens, kInner}, random_values(dtype(), kTokens * kInner, 8));
    const Weight w(ops(), dtype(), n, kInner, random_values(dtype(), n * kInner, 9, 0.2));
    expect_parts(shape.cache, shape.rotary_dim, shape.lead,
                 [&](bool composed, Tensor q, Tensor k, Tensor v, const Batch& batch,
                     Tensor cos_sin, KvCache cache) {
                   Tensor qkv(q.data, q.dtype, {kTokens, n}, q.device);
                   qkv.stride[0] = q.stride[0];
                   if (composed) {
                     ops().gemm(qkv, x, w);
                     ops().qk_norm_rope_store(q, k, v, q_norm, k_norm, 1e-6f, batch, cos_sin,
                                              cache);
                   } else {
                     ops().gemm_qk_norm_rope_store(qkv, q, k, v, x, w, q_norm, k_norm, 1e-6f, batch,
                                                   cos_sin, cache);
                   }
                 });
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
NANOVLLM_PARITY(RopeStoreParity);

}  // namespace
}  // namespace nanovllm::parity
