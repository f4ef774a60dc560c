// A paged cache with sequences in it, queries, and what attention must make of them.
#pragma once

#include <algorithm>
#include <cmath>

#include "parity/e4m3.h"
#include "parity/harness.h"

namespace nanovllm::parity {

struct Sequence {
  int64_t context, rows;  // keys in all; query rows, the last of them
};

struct Problem {
  int64_t heads, kv_heads, head_dim, block_size;
  std::vector<Sequence> sequences;
  int64_t window = 0;
  /// Of keys and values: none, or E4M3 with scales of the rows' own or with static ones.
  enum { plain, own_scales, static_scales } cache = plain;
};
/// Of a head's keys (0) or values (1); some rows exceed them.
inline float static_scale(int which, int64_t head) {
  return (which == 0 ? 0.007f : 0.013f) * (1 + 0.25f * static_cast<float>(head));
}

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

    if (problem.cache != Problem::plain) make_pages(blocks);
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
      const Values raw_keys = keys_.back(), raw_values = values_.back();
      // One q for every position, of which the last `rows` are asked for: a chunk sees the rows
      // that the whole has.
      const Values all =
          random_values(dtype, sequence.context * problem.heads * d, seed + 100 * id + 3, 2.0);
      q.insert(q.end(), all.end() - sequence.rows * problem.heads * d, all.end());
      if (problem.cache != Problem::plain) quantise(keys_.back(), 0), quantise(values_.back(), 1);
      std::vector<int32_t> slots;
      for (int64_t p = 0; p < sequence.context; ++p) {
        if (p % size == 0)
          tables[s * static_cast<size_t>(max_blocks) + static_cast<size_t>(p / size)] =
              order[next++];
        const int64_t block = order[next - 1];
        slots.push_back(static_cast<int32_t>(block * size + p % size));
        if (problem.window > 0 && p <= sequence.context - sequence.rows - problem.window) {
          slots.back() = -1;
          continue;
        }
        for (int64_t h = 0; h < kv; ++h)
          for (int64_t i = 0; i < d; ++i) {
            const auto to = static_cast<size_t>(((block * kv + h) * size + p % size) * d + i),
                       from = static_cast<size_t>((p * kv + h) * d + i);
            k[to] = keys_.back()[from];
            v[to] = values_.back()[from];
          }
      }
      if (problem.cache != Problem::plain && sequence.context > 0) {
        store(raw_keys, raw_values, slots);
        expect_stored(slots, s);
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
    ops_.attention(in_place ? q : out, q, cache(), batch_, scale(), problem_.window);
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
    const auto block = static_cast<int64_t>(tables_->get()[static_cast<size_t>(position / size)]);
    for (int64_t h = 0; h < kv; ++h)
      for (int64_t i = 0; i < d; ++i)
        v[static_cast<size_t>(((block * kv + h) * size + position % size) * d + i)] = INFINITY;
    v_ = std::make_unique<Operand>(ops_, dtype_,
                                   std::vector<int64_t>{v_->view().shape[0], kv, size, d}, v);
  }
  /// A backend that rounds the probabilities to bf16 before they meet the values (tensor cores) is
  /// allowed that error too.
  void allow(double extra) { extra_ = extra; }

  /// Stores a key and a value that are not finite at the first sequence's `position`, of a cache of
  /// E4M3.
  void store_infinity(int64_t position) {
    const int64_t size = problem_.block_size;
    const auto block = static_cast<int64_t>(tables_->get()[static_cast<size_t>(position / size)]);
    const Values row(static_cast<size_t>(problem_.kv_heads * problem_.head_dim), INFINITY);
    store(row, row, {static_cast<int32_t>(block * size + position % size)});
  }

 private:
  KvCache cache() const {
    return problem_.cache == Problem::plain ? KvCache{*k_, *v_} : e4m3_cache_;
  }
  /// Pages of bytes of which no number nor scale is one.
  void make_pages(int64_t blocks) {
    for (int i = 0; i < 2; ++i) {
      const auto pages = [&](void* data) {
        return kv_pages(data, DType::e4m3,
                        {blocks, problem_.kv_heads, problem_.block_size, problem_.head_dim},
                        ops_.device());
      };
      const std::vector<std::byte> none(static_cast<size_t>(blocks * pages(nullptr).stride[0]),
                                        std::byte{0xff});
      pages_[i] = ops_.allocate(none.size());
      copy_bytes(pages_[i].get(), none);
      (i == 0 ? e4m3_cache_.k : e4m3_cache_.v) = pages(pages_[i].get());
    }
    if (problem_.cache == Problem::static_scales)
      for (int i = 0; i < 2; ++i) {
        Values scales;
        for (int64_t h = 0; h < problem_.kv_heads; ++h) scales.push_back(static_scale(i, h));
        scales_[i] = std::make_unique<Operand>(ops_, DType::f32,
                                               std::vector<int64_t>{problem_.kv_heads}, scales);
        (i == 0 ? e4m3_cache_.k_scales : e4m3_cache_.v_scales) = *scales_[i];
      }
  }
  void copy_bytes(std::byte* to, const std::vector<std::byte>& from) const {
    const auto size = static_cast<int64_t>(from.size());
    ops_.copy(Tensor(to, DType::e4m3, {size}, ops_.device()),
              Tensor(const_cast<std::byte*>(from.data()), DType::e4m3, {size}));
    ops_.synchronize();
  }
  /// All of some pages.
  std::vector<std::byte> bytes_of(const Tensor& pages) const {
    std::vector<std::byte> bytes(static_cast<size_t>(pages.shape[0] * pages.stride[0]));
    const auto size = static_cast<int64_t>(bytes.size());
    ops_.copy(Tensor(bytes.data(), DType::e4m3, {size}),
              Tensor(pages.data, DType::e4m3, {size}, ops_.device()));
    ops_.synchronize();
    return bytes;
  }
  /// Numbers times scales, by the definition (docs/contract.md): rows of head_dim.
  void quantise(Values& rows, int which) {
    const auto d = static_cast<size_t>(problem_.head_dim);
    for (size_t first = 0; first < rows.size(); first += d) {
      const auto head = static_cast<int64_t>(first / d) % problem_.kv_heads;
      double most = 0x1p-100;
      for (size_t i = 0; i < d; ++i) most = std::max(most, std::abs(rows[first + i]));
      const float scale = problem_.cache == Problem::static_scales
                              ? static_scale(which, head)
                              : static_cast<float>(most) / 448.0f;
      for (size_t i = 0; i < d; ++i) {
        const float quotient = static_cast<float>(rows[first + i]) / scale;
        rows[first + i] =
            static_cast<double>(e4m3_value(e4m3_nearest(quotient))) * static_cast<double>(scale);
      }
    }
  }
  void store(const Values& keys, const Values& values, const std::vector<int32_t>& slots) {
    const std::vector<int64_t> shape{std::ssize(slots), problem_.kv_heads, problem_.head_dim};
    const Operand k(ops_, dtype_, shape, keys, {.lead = 8, .trail = 16}),
        v(ops_, dtype_, shape, values), to = ints(ops_, slots);
    ops_.store_kv(e4m3_cache_, k, v, to);
    ops_.synchronize();
  }
  /// Whether the pages hold the numbers and scales of sequence s; the slots that are -1 are none.
  void expect_stored(const std::vector<int32_t>& slots, size_t s) const {
    const int64_t d = problem_.head_dim, kv = problem_.kv_heads, size = problem_.block_size;
    for (const Tensor& t : {e4m3_cache_.k, e4m3_cache_.v}) {
      const Values& want = t.data == e4m3_cache_.k.data ? keys_[s] : values_[s];
      const std::vector<std::byte> got = bytes_of(t);
      for (size_t p = 0; p < slots.size(); ++p)
        for (int64_t h = 0; slots[p] >= 0 && h < kv; ++h) {
          const std::byte* part = got.data() + slots[p] / size * t.stride[0] + h * t.stride[1];
          float scale;
          std::memcpy(&scale, part + size * d + slots[p] % size * 4, sizeof scale);
          for (int64_t i = 0; i < d; ++i) {
            const auto bits = static_cast<uint8_t>(part[slots[p] % size * d + i]);
            ASSERT_EQ(static_cast<double>(e4m3_value(bits)) * static_cast<double>(scale),
                      want[(p * static_cast<size_t>(kv) + static_cast<size_t>(h)) *
                               static_cast<size_t>(d) +
                           static_cast<size_t>(i)])
                << "slot " << slots[p] << " head " << h << " element " << i;
          }
        }
    }
  }

  Problem problem_;
  Backend& ops_;
  DType dtype_;
  double extra_ = 0;
  std::vector<Values> keys_, values_;
  Values q_values_;
  std::unique_ptr<Operand> k_, v_, starts_, lengths_, tables_;
  Buffer pages_[2];
  std::unique_ptr<Operand> scales_[2];
  KvCache e4m3_cache_;
  Batch batch_;
};

}  // namespace nanovllm::parity
