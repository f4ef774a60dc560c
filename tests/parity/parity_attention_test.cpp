// Paged causal attention against float64, and its exactness: a row's bits depend on its sequence
// and position alone.
#include <cmath>

#include "parity/harness.h"

namespace nanovllm::parity {
namespace {

struct Sequence {
  int64_t context, rows;  // keys in all; query rows, the last of them
};

struct Problem {
  int64_t heads, kv_heads, head_dim, block_size;
  std::vector<Sequence> sequences;
  int64_t window = 0;
};

/// A problem's operands on a device. Keys and values are drawn per sequence and position, so that
/// the same sequence has the same ones in whatever batch, block size or order of blocks it appears.
class Setting {
 public:
  Setting(Backend& ops, DType dtype, const Problem& problem, uint32_t seed,
          bool shuffle_blocks = true, std::vector<uint32_t> ids = {})
      : problem_(problem), ops_(ops), dtype_(dtype) {
    const int64_t d = problem.head_dim, kv = problem.kv_heads, size = problem.block_size;
    int64_t max_blocks = 1, blocks = 1;  // block 0 belongs to nobody
    std::vector<int32_t> starts{0}, lengths;
    for (const Sequence& s : problem.sequences) {
      const int64_t count = (s.context + size - 1) / size;
      max_blocks = std::max(max_blocks, count);
      blocks += count;
      starts.push_back(starts.back() + static_cast<int32_t>(s.rows));
      lengths.push_back(static_cast<int32_t>(s.context));
    }
    std::vector<int32_t> order(static_cast<size_t>(blocks - 1));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i + 1);
    if (shuffle_blocks) std::shuffle(order.begin(), order.end(), std::mt19937(seed));

    // Slots that hold no row's key are NaN: reading it shows.
    Values k(static_cast<size_t>(blocks * kv * size * d), NAN), v = k, q;
    std::vector<int32_t> tables(problem.sequences.size() * static_cast<size_t>(max_blocks),
                                0x7fffffff);
    size_t next = 0;
    for (size_t s = 0; s < problem.sequences.size(); ++s) {
      const uint32_t id = s < ids.size() ? ids[s] : static_cast<uint32_t>(s);
      const Sequence& sequence = problem.sequences[s];
      keys_.push_back(random_values(dtype, sequence.context * kv * d, seed + 100 * id + 1));
      values_.push_back(random_values(dtype, sequence.context * kv * d, seed + 100 * id + 2));
      // One q for every position, of which the last `rows` are asked for: a chunk sees the rows
      // that the whole has.
      const Values all =
          random_values(dtype, sequence.context * problem.heads * d, seed + 100 * id + 3, 2.0);
      q.insert(q.end(), all.end() - sequence.rows * problem.heads * d, all.end());
      for (int64_t p = 0; p < sequence.context; ++p) {
        if (p % size == 0)
          tables[s * static_cast<size_t>(max_blocks) + static_cast<size_t>(p / size)] =
              order[next++];
        const int64_t block = order[next - 1];
        if (problem.window > 0 && p <= sequence.context - sequence.rows - problem.window) continue;
        for (int64_t h = 0; h < kv; ++h)
          for (int64_t i = 0; i < d; ++i) {
            const auto to = static_cast<size_t>(((block * kv + h) * size + p % size) * d + i),
                       from = static_cast<size_t>((p * kv + h) * d + i);
            k[to] = keys_.back()[from];
            v[to] = values_.back()[from];
          }
      }
    }
    q_values_ = q;
    k_ = std::make_unique<Operand>(ops, dtype, std::vector<int64_t>{blocks, kv, size, d}, k);
    v_ = std::make_unique<Operand>(ops, dtype, std::vector<int64_t>{blocks, kv, size, d}, v);
    starts_ = std::make_unique<Operand>(ints(ops, starts));
    lengths_ = std::make_unique<Operand>(ints(ops, lengths));
    tables_ = std::make_unique<Operand>(ints(ops, tables));
    batch_.tokens = Tensor(nullptr, DType::i32, {starts.back()}, ops.device());
    batch_.cu_seqlens_q = *starts_;
    batch_.context_lens = *lengths_;
    batch_.block_tables =
        tables_->view().reshape({static_cast<int64_t>(problem.sequences.size()), max_blocks});
    for (const Sequence& s : problem.sequences) {
      batch_.max_seqlen_q = std::max(batch_.max_seqlen_q, s.rows);
      batch_.max_context_len = std::max(batch_.max_context_len, s.context);
    }
  }

  int64_t rows() const { return batch_.num_tokens(); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(problem_.head_dim)); }

  Operand run(Layout layout = {}, bool in_place = false) const {
    const std::vector<int64_t> shape{rows(), problem_.heads, problem_.head_dim};
    Operand q(ops_, dtype_, shape, q_values_, layout), out(ops_, dtype_, shape, layout);
    ops_.attention(in_place ? q : out, q, {*k_, *v_}, batch_, scale(), problem_.window);
    ops_.synchronize();
    q.expect_guards("q");
    out.expect_guards("out");
    if (!in_place) expect_equal(q.get(), q_values_, "q is only read");
    return in_place ? std::move(q) : std::move(out);
  }

  /// The result in float64, and per element the bound: rounding of the output, of the scores (their
  /// error multiplies every term by e^error) and of the sums.
  void expect_right(const Values& got, double eps) const {
    const int64_t d = problem_.head_dim, kv = problem_.kv_heads, group = problem_.heads / kv;
    Values want, bounds;
    size_t row = 0;
    for (size_t s = 0; s < problem_.sequences.size(); ++s)
      for (int64_t i = 0; i < problem_.sequences[s].rows; ++i, ++row)
        for (int64_t h = 0; h < problem_.heads; ++h) {
          const double* q = q_values_.data() +
                            (row * static_cast<size_t>(problem_.heads) + static_cast<size_t>(h)) *
                                static_cast<size_t>(d);
          const int64_t keys = problem_.sequences[s].context - problem_.sequences[s].rows + i + 1;
          const int64_t first =
              problem_.window > 0 ? std::max<int64_t>(0, keys - problem_.window) : 0;
          Values p(static_cast<size_t>(keys));
          double top = -INFINITY, total = 0, magnitude = 0;
          for (int64_t j = first; j < keys; ++j) {
            double dot = 0, absolute = 0;
            for (int64_t e = 0; e < d; ++e) {
              const double term =
                  q[e] * keys_[s][static_cast<size_t>((j * kv + h / group) * d + e)];
              dot += term;
              absolute += std::abs(term);
            }
            p[static_cast<size_t>(j)] = dot * static_cast<double>(scale());
            magnitude = std::max(magnitude, absolute * static_cast<double>(scale()));
            top = std::max(top, p[static_cast<size_t>(j)]);
          }
          for (int64_t j = first; j < keys; ++j) {
            double& x = p[static_cast<size_t>(j)];
            total += x = std::exp(x - top);
          }
          // Scores: about sqrt(d) roundings of f32 on sums of this magnitude; 8 covers the walk.
          // Sums over keys: sqrt(keys).
          const double relative =
              0x1p-24 * (8 * magnitude + 4 * std::sqrt(static_cast<double>(keys)) + 16);
          for (int64_t e = 0; e < d; ++e) {
            double sum = 0, absolute = 0;
            for (int64_t j = first; j < keys; ++j) {
              const double term = p[static_cast<size_t>(j)] / total *
                                  values_[s][static_cast<size_t>((j * kv + h / group) * d + e)];
              sum += term;
              absolute += std::abs(term);
            }
            want.push_back(sum);
            bounds.push_back(eps * std::abs(sum) + relative * absolute + extra_ * absolute);
          }
        }
    expect_close(
        got, want, [&](size_t i) { return bounds[i]; }, "attention");
  }
  /// Makes the values of the first sequence's key at `position` infinite.
  void make_infinite(int64_t position) {
    Values v = v_->get();
    const int64_t d = problem_.head_dim, kv = problem_.kv_heads, size = problem_.block_size;
    const int64_t block = tables_->view().ptr<int32_t>()[position / size];
    for (int64_t h = 0; h < kv; ++h)
      for (int64_t i = 0; i < d; ++i)
        v[static_cast<size_t>(((block * kv + h) * size + position % size) * d + i)] = INFINITY;
    v_ = std::make_unique<Operand>(ops_, dtype_,
                                   std::vector<int64_t>{v_->view().shape[0], kv, size, d}, v);
  }
  /// A backend that rounds the probabilities to bf16 before they meet the values (tensor cores) is
  /// allowed that error too.
  void allow(double extra) { extra_ = extra; }

 private:
  Problem problem_;
  Backend& ops_;
  DType dtype_;
  double extra_ = 0;
  std::vector<Values> keys_, values_;
  Values q_values_;
  std::unique_ptr<Operand> k_, v_, starts_, lengths_, tables_;
  Batch batch_;
};

class AttentionParity : public ParityTest {
 protected:
  void expect_right(const Problem& problem, Layout layout = {}, bool in_place = false) {
    Setting setting(ops(), dtype(), problem, 7);
    if (ops().device().kind == Device::cuda && dtype() == DType::bf16) setting.allow(0x1p-8);
    setting.expect_right(setting.run(layout, in_place).get(), eps());
  }
};

TEST_P(AttentionParity, MatchesFloat64ForEveryHeadSize) {
  for (const int64_t d : {64, 80, 96, 128, 256})
    expect_right({4, 2, d, 16, {{1, 1}, {70, 70}, {131, 5}, {200, 1}}});
}

TEST_P(AttentionParity, MatchesFloat64ForEveryBlockSize) {
  for (const int64_t block : {8, 16, 32, 64, 128, 256})
    expect_right({2, 1, 64, block, {{300, 1}, {65, 65}, {8, 8}, {257, 40}}});
}

TEST_P(AttentionParity, MatchesFloat64ForEveryGroup) {
  for (const int64_t group : {1, 2, 3, 4, 5, 7, 8, 16, 20})
    expect_right({2 * group, 2, 64, 16, {{90, 90}, {140, 1}, {33, 3}}});
}

TEST_P(AttentionParity, MatchesFloat64InALargeBatch) {
  if (ops().device().kind != Device::cuda || dtype() != DType::bf16)
    GTEST_SKIP() << "only bf16 on a GPU has a kernel of its own for many rows";
  const std::vector<Sequence> sequences{{600, 600}, {500, 460}, {777, 1}, {70, 70}};
  expect_right({16, 4, 128, 16, sequences}, {.lead = 64, .trail = 256});
  expect_right({16, 2, 64, 64, sequences});
  expect_right({16, 8, 128, 64, sequences, 150}, {}, true);
}

TEST_P(AttentionParity, ReadsAndWritesStridedHeads) {
  expect_right({4, 2, 64, 16, {{40, 40}, {100, 3}}}, {.lead = 64, .trail = 256});
}

TEST_P(AttentionParity, MayOverwriteItsQueries) {
  expect_right({4, 2, 64, 16, {{40, 40}, {100, 3}}}, {}, true);
}

TEST_P(AttentionParity, SequencesWithoutRowsAreLegal) {
  expect_right({2, 1, 64, 16, {{5, 5}, {12, 0}, {9, 2}}});
}

TEST_P(AttentionParity, ARowHasTheSameBitsAloneAndInAnyBatch) {
  for (const int64_t d : {80, 128}) {
    const Sequence asked{333, 1};
    const Operand alone = Setting(ops(), dtype(), {8, 2, d, 16, {asked}}, 11, true, {5}).run();
    const std::vector<std::byte> want = alone.bits();
    const std::vector<Sequence> others{{100, 100}, asked, {64, 1}, {640, 7}};
    const std::vector<std::byte> all =
        Setting(ops(), dtype(), {8, 2, d, 16, others}, 11, true, {1, 5, 2, 3}).run().bits();
    const size_t row = want.size();
    EXPECT_TRUE(std::equal(want.begin(), want.end(), all.begin() + static_cast<int64_t>(100 * row)))
        << "head_dim " << d;
  }
}

TEST_P(AttentionParity, AChunkHasTheBitsOfTheWhole) {
  for (const int64_t d : {80, 128}) {
    const int64_t length = 210;
    const std::vector<std::byte> whole =
        Setting(ops(), dtype(), {6, 2, d, 16, {{length, length}}}, 13).run().bits();
    const size_t row = whole.size() / static_cast<size_t>(length);
    for (const Sequence chunk :
         {Sequence{1, 1}, {64, 64}, {65, 1}, {128, 27}, {200, 33}, {210, 1}, {210, 2}, {210, 17}}) {
      const std::vector<std::byte> got =
          Setting(ops(), dtype(), {6, 2, d, 16, {chunk}}, 13).run().bits();
      EXPECT_TRUE(std::equal(
          got.begin(), got.end(),
          whole.begin() +
              static_cast<int64_t>(static_cast<size_t>(chunk.context - chunk.rows) * row)))
          << chunk.rows << " rows up to " << chunk.context << ", head_dim " << d;
    }
  }
}

TEST_P(AttentionParity, AnInfiniteValueShowsOnlyInTheRowsThatSeeItsKey) {
  if (ops().device().kind != Device::cpu) GTEST_SKIP() << "writes to the cache by the host";
  constexpr int64_t kKey = 75, kLength = 100;
  for (const int64_t window : {0, 20}) {
    Setting setting(ops(), dtype(), {6, 2, 64, 16, {{kLength, kLength}}, window}, 13);
    const std::vector<std::byte> want = setting.run().bits();
    setting.make_infinite(kKey);
    const Operand run = setting.run();
    const std::vector<std::byte> got = run.bits();
    const Values values = run.get();
    const size_t row = got.size() / kLength;
    for (int64_t r = 0; r < kLength; ++r) {
      const int64_t at = r * static_cast<int64_t>(row);
      const bool sees = r >= kKey && (window == 0 || r < kKey + window);
      if (sees)
        EXPECT_FALSE(std::isfinite(values[static_cast<size_t>(r * 6 * 64)])) << "row " << r;
      else
        EXPECT_TRUE(std::equal(want.begin() + at, want.begin() + at + static_cast<int64_t>(row),
                               got.begin() + at))
            << "row " << r << ", window " << window;
    }
  }
}

TEST_P(AttentionParity, BlockSizeAndOrderDoNotShow) {
  const std::vector<Sequence> sequences{{150, 150}, {300, 1}};
  const std::vector<std::byte> want =
      Setting(ops(), dtype(), {4, 2, 128, 16, sequences}, 17).run().bits();
  for (const int64_t block : {8, 32, 64, 256})
    EXPECT_EQ(want,
              Setting(ops(), dtype(), {4, 2, 128, block, sequences}, 17, block != 32).run().bits())
        << "block size " << block;
}

TEST_P(AttentionParity, AWindowHidesWhatLiesBeforeIt) {
  for (const int64_t window : {1, 2, 17, 63, 64, 65, 100, 128, 500})
    expect_right({4, 2, 80, 16, {{1, 1}, {300, 1}, {200, 200}, {131, 5}, {129, 70}}, window});
  expect_right({2, 2, 128, 8, {{333, 40}, {64, 64}}, 20});
  for (const int64_t window : {63, 300, 511, 700})  // beyond a chunk of keys
    expect_right({4, 2, 64, 16, {{700, 1}, {513, 1}, {600, 70}, {33, 3}}, window});
  // Every sequence has one row: decode.
  for (const int64_t d : {64, 80, 96, 128, 256})
    for (const int64_t window : {1, 64, 300, 1000})
      expect_right({6, 2, d, 64, {{1, 1}, {64, 1}, {700, 1}, {1025, 1}}, window});
}

TEST_P(AttentionParity, AWindowedChunkHasTheBitsOfTheWhole) {
  const int64_t length = 210;
  for (const int64_t window : {5, 50, 64, 100}) {
    const std::vector<std::byte> whole =
        Setting(ops(), dtype(), {6, 2, 80, 16, {{length, length}}, window}, 13).run().bits();
    const size_t row = whole.size() / static_cast<size_t>(length);
    for (const Sequence chunk : {Sequence{64, 64}, {65, 1}, {128, 27}, {200, 33}, {210, 1}}) {
      const std::vector<std::byte> got =
          Setting(ops(), dtype(), {6, 2, 80, 64, {chunk}, window}, 13).run().bits();
      EXPECT_TRUE(std::equal(
          got.begin(), got.end(),
          whole.begin() +
              static_cast<int64_t>(static_cast<size_t>(chunk.context - chunk.rows) * row)))
          << chunk.rows << " rows up to " << chunk.context << ", window " << window;
    }
  }
}

TEST_P(AttentionParity, AWindowThatNothingOutgrowsDoesNotShow) {
  const std::vector<Sequence> sequences{{150, 150}, {300, 1}};
  EXPECT_EQ(Setting(ops(), dtype(), {4, 2, 64, 16, sequences, 300}, 17).run().bits(),
            Setting(ops(), dtype(), {4, 2, 64, 16, sequences}, 17).run().bits());
}

NANOVLLM_PARITY(AttentionParity);

}  // namespace
}  // namespace nanovllm::parity
