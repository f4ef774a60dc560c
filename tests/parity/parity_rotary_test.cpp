// Rotary embedding, the KV cache, and the fusions that end in its store against their own bodies.
#include "parity/rowwise.h"

namespace nanovllm::parity {
namespace {

class RotaryParity : public RowwiseParity {};

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

TEST_P(RotaryParity, RotaryEmbedding) {
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

TEST_P(RotaryParity, StoreKvPutsEveryTokenIntoItsSlot) {
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

/// Runs a fusion that ends in the store of k and v, and its composition, and compares q and the
/// cache. `run` gets q, k, v, batch, cos_sin and cache.
class RopeStoreParity : public RotaryParity {
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

NANOVLLM_PARITY(RotaryParity);
NANOVLLM_PARITY(RopeStoreParity);

}  // namespace
}  // namespace nanovllm::parity
