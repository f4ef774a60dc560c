// A stack of decoder layers with its caches and a decode step, and the same step operation by
// operation, as models/decoder.h does it.
#pragma once

#include <bit>
#include <cmath>
#include <limits>
#include <variant>

#include "gpu/rig.h"

namespace nanovllm {

struct DecoderShape {
  const char* name;
  int64_t layers, hidden, heads, kv_heads, head_dim, intermediate;
  bool head_norms = false, qkv_bias = false, other_biases = false;
  int64_t block_size = 16, rotary_dim = 0;     // rotary_dim 0: all of the head
  std::vector<int64_t> windows = {};           // of each layer; empty: none
  int64_t experts = 0, experts_per_token = 0;  // a mixture of so many, of `intermediate` each
  /// If not plain, E4M3 weights whose rows of activations are quantised: of `token` with a scale
  /// for each row, of `group` with those of blocks of 8 x 128.
  WeightFormat::Rows rows = WeightFormat::Rows::plain;
  bool integers = false;  // with `token`: int8 weights and rows
  /// If not 0, int4 weights, of which so many columns share a scale below `most_scale`, of this
  /// type.
  int64_t group = 0;
  DType scales = DType::bf16;
  float most_scale = 0x1p-5f;
  bool has_zeros = false;  // zero points
  bool in_halves = false;  // o and down
  /// Of keys and values; of E4M3 with a scale for each row or, `static_scales`, for each head.
  DType cache = DType::bf16;
  bool static_scales = false;
};

class DecoderRig {
 public:
  /// `few_values`: the layers share one set of random weights, which is quicker to make.
  DecoderRig(Backend& backend, const DecoderShape& shape, bool few_values = false)
      : rig(backend), shape_(shape), few_values_(few_values) {
    constexpr int64_t kMaxPosition = 4096;
    make_weights();
    const int64_t rotary = shape.rotary_dim > 0 ? shape.rotary_dim : shape.head_dim;
    std::vector<float> table;
    for (int64_t p = 0; p < kMaxPosition; ++p)
      for (int64_t i = 0; i < rotary; ++i) {
        const double angle =
            static_cast<double>(p) * std::pow(1e4, -2.0 * static_cast<double>(i % (rotary / 2)) /
                                                       static_cast<double>(rotary));
        table.push_back(static_cast<float>(i < rotary / 2 ? std::cos(angle) : std::sin(angle)));
      }
    stack.cos_sin = rig.upload(table, DType::f32, {kMaxPosition, rotary});
    stack.heads = shape.heads;
    stack.kv_heads = shape.kv_heads;
    stack.head_dim = shape.head_dim;
    stack.eps = 1e-6f;
    stack.experts_per_token = shape.experts_per_token;
    stack.normalises_experts = true;
    stack.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  }

  /// Sequences of these lengths, the last token of each being this step's; 0: padding. What no
  /// sequence has written is NaN.
  Batch make_step(const std::vector<int32_t>& contexts, int64_t max_context, uint32_t seed) {
    const int64_t rows = static_cast<int64_t>(contexts.size()), block = shape_.block_size,
                  width = (max_context + block - 1) / block;
    const int64_t blocks = rows * width + 1;
    if (num_blocks_ != blocks) allocate_caches(blocks);
    std::vector<int32_t> order(static_cast<size_t>(blocks));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    std::vector<int32_t> tables(static_cast<size_t>(rows * width), -1);
    std::vector<bool> written(static_cast<size_t>(blocks * block), false);
    for (int64_t s = 0; s < rows; ++s) {
      const int32_t context = contexts[static_cast<size_t>(s)];
      for (int64_t b = 0; b * block < context; ++b)
        tables[static_cast<size_t>(s * width + b)] = order[static_cast<size_t>(s * width + b)];
      for (int64_t p = 0; p + 1 < context; ++p)
        written[static_cast<size_t>(tables[static_cast<size_t>(s * width + p / block)] * block +
                                    p % block)] = true;
    }
    fill_caches(written, seed);
    return decode_batch(rig, contexts, tables, block, max_context);
  }

  /// The layers one operation after another.
  void by_operation(Tensor x, Tensor residual, const Batch& batch) {
    Backend& ops = rig.backend;
    const int64_t rows = x.shape[0], d = shape_.head_dim, q_size = shape_.heads * d,
                  kv_size = shape_.kv_heads * d;
    if (!qkv_.defined() || qkv_.shape[0] < rows) {
      qkv_ = rig.empty(DType::bf16, {rows, q_size + 2 * kv_size});
      attended_ = rig.empty(DType::bf16, {rows, q_size});
      gate_up_ = rig.empty(DType::bf16, {rows, 2 * shape_.intermediate});
      gated_ = rig.empty(DType::bf16, {rows, shape_.intermediate});
    }
    const Tensor qkv = qkv_.rows(0, rows), attended = attended_.rows(0, rows),
                 gate_up = gate_up_.rows(0, rows), gated = gated_.rows(0, rows);
    const Tensor q = qkv.cols(0, q_size).split(d), k = qkv.cols(q_size, q_size + kv_size).split(d),
                 v = qkv.cols(q_size + kv_size, q_size + 2 * kv_size).split(d);
    const auto linear = [&](Tensor y, Tensor in, Weight w, Tensor bias) {
      ops.gemm(y, in, w);
      if (bias.defined()) ops.add_bias(y, bias);
    };
    for (size_t i = 0; i < stack.layers.size(); ++i) {
      const DecoderWeights& w = stack.layers[i];
      if (i == 0)
        ops.rms_norm(x, residual, w.input_norm, stack.eps);
      else
        ops.add_rms_norm(x, residual, x, w.input_norm, stack.eps);
      linear(qkv, x, w.qkv, w.qkv_bias);
      if (w.q_norm.defined()) {
        ops.qk_norm_rope_store(q, k, v, w.q_norm, w.k_norm, stack.eps, batch, stack.cos_sin,
                               caches[i]);
      } else {
        ops.rotary_embedding(q, k, batch.positions, stack.cos_sin);
        ops.store_kv(caches[i], k, v, batch.slot_mapping);
      }
      ops.attention(attended.split(d), q, caches[i], batch, stack.scale, w.window);
      linear(x, attended, w.o, w.o_bias);
      ops.add_rms_norm(x, residual, x, w.post_norm, stack.eps);
      if (w.router.defined()) {
        mixture(x, w);
        continue;
      }
      linear(gate_up, x, w.gate_up, w.gate_up_bias);
      ops.silu_and_mul(gated, gate_up);
      linear(x, gated, w.down, w.down_bias);
    }
  }

  /// All that a cache's pages have, scales of E4M3 included.
  static Tensor all_of(const Tensor& cache) {
    const int64_t bytes =
        cache.shape[0] * cache.stride[0] * static_cast<int64_t>(size_of(cache.dtype));
    return {cache.data, DType::i32, {bytes / 4}, cache.device};
  }

  Rig rig;
  DecoderStack stack;
  std::vector<KvCache> caches;

 private:
  void mixture(Tensor x, const DecoderWeights& w) {
    const int64_t rows = x.shape[0], k = shape_.experts_per_token, pairs = rows * k;
    Backend& ops = rig.backend;
    const Tensor logits = rig.empty(DType::f32, {rows, shape_.experts}),
                 weights = rig.empty(DType::f32, {rows, k}), ids = rig.empty(DType::i32, {rows, k});
    ops.moe_router(weights, ids, logits, x, w.router, stack.normalises_experts, {});
    ops.moe_mlp(x, x, weights, ids, w.gate_up, w.down,
                {rig.empty(x.dtype, {pairs, shape_.intermediate}),
                 rig.empty(x.dtype, {pairs, shape_.hidden}),
                 rig.empty(DType::i32, {moe_plan_size(pairs, shape_.experts)})});
  }

  bool is_fp8() const { return shape_.rows != WeightFormat::Rows::plain; }
  WeightFormat format_of(int64_t k) const {
    if (shape_.group > 0) return {WeightFormat::int4, shape_.group};
    if (!is_fp8()) return WeightFormat::bf16;
    return {shape_.integers ? WeightFormat::int8 : WeightFormat::e4m3,
            shape_.rows == WeightFormat::Rows::group ? kRowGroup : k, shape_.rows};
  }
  QuantizedRows random_int4(int64_t n, int64_t k, uint32_t seed) const {
    std::mt19937 random(seed);
    QuantizedRows rows;
    for (int64_t i = 0; i < n * k; i += 8)
      for (uint32_t bits = static_cast<uint32_t>(random()), j = 0; j < 8; ++j, bits >>= 4)
        rows.numbers.push_back(static_cast<int8_t>(bits % 16 - 8));
    const uint32_t kept = shape_.scales == DType::bf16  ? 0xffff0000u
                          : shape_.scales == DType::f16 ? 0xffffe000u
                                                        : 0xffffffffu;
    for (int64_t i = 0; i < n * format_of(k).groups(k); ++i) {
      const float scale = shape_.most_scale * std::exp2(-0x1p-29f * static_cast<float>(random()));
      rows.scales.push_back(std::bit_cast<float>((std::bit_cast<uint32_t>(scale) - 1) & kept));
      rows.zeros.push_back(static_cast<int8_t>(shape_.has_zeros ? random() % 16 - 8 : 0));
    }
    return rows;
  }
  /// A random [n, k] matrix of numbers up to 2, of E4M3.
  QuantizedRows random_rows(int64_t n, int64_t k, uint32_t seed) const {
    if (shape_.group > 0) return random_int4(n, k, seed);
    std::mt19937 random(seed);
    QuantizedRows rows;
    for (int64_t i = 0; i < n * k; ++i)
      rows.numbers.push_back(static_cast<int8_t>(random() >> 24 & 0xbf));
    const int64_t groups = format_of(k).groups(k);
    for (int64_t i = 0; i < n * groups; ++i)
      rows.scales.push_back(groups > 1 && i / groups % 8 > 0
                                ? rows.scales[static_cast<size_t>(i - groups)]
                                : 0.02f + 0.06f * 0x1p-32f * static_cast<float>(random()));
    return rows;
  }

  using W = DecoderWeights;
  /// A tensor that every layer has, and where it lies in a layer's memory.
  struct Part {
    std::variant<Tensor W::*, Weight W::*> member;
    int64_t n, k;  // k 0: a vector
    bool wanted;
    int64_t count = 0;  // of a stack; 0: none
    WeightFormat format = WeightFormat::bf16;
    int64_t matrices = 1;  // a plain stack is one
    size_t stride = 0, at = 0;
    // The values that were loaded last.
    std::vector<float> values{};
    QuantizedRows quantised{};

    template <class Member>
    bool is(Member of) const {
      return member == decltype(member)(of);
    }
    int64_t rows() const { return n * std::max<int64_t>(count, 1) / matrices; }
  };

  std::vector<Part> parts_of_layers() const {
    const int64_t h = shape_.hidden, d = shape_.head_dim, m = shape_.intermediate,
                  qkv = (shape_.heads + 2 * shape_.kv_heads) * d, q = shape_.heads * d;
    std::vector<Part> parts = {{&W::input_norm, h, 0, true},
                               {&W::qkv, qkv, h, true},
                               {&W::qkv_bias, qkv, 0, shape_.qkv_bias},
                               {&W::q_norm, d, 0, shape_.head_norms},
                               {&W::k_norm, d, 0, shape_.head_norms},
                               {&W::o, h, q, true},
                               {&W::o_bias, h, 0, shape_.other_biases},
                               {&W::post_norm, h, 0, true},
                               {&W::router, shape_.experts, h, shape_.experts > 0},
                               {&W::gate_up, 2 * m, h, true, shape_.experts},
                               {&W::gate_up_bias, 2 * m, 0, shape_.other_biases},
                               {&W::down, h, m, true, shape_.experts},
                               {&W::down_bias, h, 0, shape_.other_biases}};
    std::erase_if(parts, [](const Part& p) { return !p.wanted; });
    return parts;
  }

  /// Lays a layer's parts one behind the other; the bytes of all.
  size_t lay_out(std::vector<Part>& parts) const {
    const auto aligned = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
    size_t end = 0;
    for (Part& p : parts) {
      if (p.k > 0 && !p.is(&W::router)) p.format = format_of(p.k);
      p.format.in_halves = shape_.in_halves && (p.is(&W::o) || p.is(&W::down)) && p.k % 256 == 0;
      if (p.format.is_quantised()) p.matrices = std::max<int64_t>(p.count, 1);
      p.stride = p.k > 0 ? aligned(rig.backend.weight_bytes(p.format, p.rows(), p.k))
                         : static_cast<size_t>(p.rows()) * 2;
      p.at = end;
      end += aligned(p.stride * static_cast<size_t>(p.matrices));
    }
    return end;
  }

  /// Both make new numbers or, `again`, load the last ones.
  void load_quantised(Part& p, std::byte* data, uint32_t seed, bool again) {
    for (int64_t i = 0; i < p.matrices; ++i, data += p.stride) {
      if (!again) p.quantised = random_rows(p.rows(), p.k, seed + static_cast<uint32_t>(1000 * i));
      rig.backend.load_quantised(rig.backend.weight_view(data, p.format, p.rows(), p.k),
                                 p.quantised);
    }
  }
  void load_plain(Part& p, const Tensor& t, uint32_t seed, bool again) {
    if (!again) {
      p.values = normal_values(p.rows() * std::max<int64_t>(p.k, 1), seed, p.k > 0 ? 0.03f : 0.2f);
      if (p.is(&W::input_norm) || p.is(&W::post_norm) || p.is(&W::q_norm) || p.is(&W::k_norm))
        for (float& value : p.values) value += 1.0f;
    }
    const Tensor host = p.k > 0 ? Tensor(p.values.data(), DType::f32, {p.rows(), p.k})
                                : Tensor(p.values.data(), DType::f32, {p.rows()});
    rig.backend.load(t, std::span(&host, 1));
  }

  /// Every layer's tensors lie as the first one's do, a constant number of bytes on.
  void make_weights() {
    std::vector<Part> parts = parts_of_layers();
    bytes_ = lay_out(parts);
    weights_ = rig.backend.allocate(bytes_ * static_cast<size_t>(shape_.layers));
    for (int64_t i = 0; i < shape_.layers; ++i) {
      W& layer = stack.layers.emplace_back();
      layer.window = shape_.windows.empty() ? 0 : shape_.windows[static_cast<size_t>(i)];
      auto seed = static_cast<uint32_t>(100 * i);
      for (Part& p : parts) {
        std::byte* const data = weights_.get() + static_cast<size_t>(i) * bytes_ + p.at;
        const Tensor t = p.k > 0 ? rig.backend.weight_view(data, p.format, p.rows(), p.k).data
                                 : Tensor(data, DType::bf16, {p.rows()}, rig.backend.device());
        const bool again = i > 0 && few_values_, is_quantised = p.format.is_quantised();
        if (is_quantised)
          load_quantised(p, data, seed++, again);
        else
          load_plain(p, t, seed++, again);
        if (const auto* vector = std::get_if<Tensor W::*>(&p.member))
          layer.** vector = t;
        else if (p.count > 0 && is_quantised)
          layer.*std::get<Weight W::*>(p.member) = stack_of({t, p.format}, p.count, p.stride);
        else
          layer.*std::get<Weight W::*>(p.member) = {
              p.count > 0 ? t.reshape({p.count, p.n, p.k}) : t, p.format};
      }
    }
  }

  void allocate_caches(int64_t blocks) {
    num_blocks_ = blocks;
    caches.clear();
    const size_t bytes = static_cast<size_t>(blocks * shape_.kv_heads * shape_.block_size) *
                         kv_row_bytes(shape_.cache, shape_.head_dim);
    memory_ = rig.backend.allocate(2 * bytes * static_cast<size_t>(shape_.layers));
    const int64_t heads = shape_.kv_heads;
    Tensor scales;
    if (shape_.static_scales) {
      std::vector<float> values;
      for (int64_t i = 0; i < 2 * shape_.layers * heads; ++i)
        values.push_back(0.004f + 0.001f * static_cast<float>(i % 7));
      scales = rig.upload(values, DType::f32, {2 * shape_.layers * heads});
    }
    for (int64_t i = 0; i < shape_.layers; ++i) {
      const auto view = [&](int64_t half) {
        return kv_pages(memory_.get() + static_cast<size_t>(2 * i + half) * bytes, shape_.cache,
                        {blocks, heads, shape_.block_size, shape_.head_dim}, rig.backend.device());
      };
      const auto of_heads = [&](int64_t half) {
        return scales.defined() ? scales.rows((2 * i + half) * heads, (2 * i + half + 1) * heads)
                                : Tensor{};
      };
      caches.push_back({view(0), view(1), of_heads(0), of_heads(1)});
    }
  }
  /// Numbers of rows that are written, and their scales; of others, any bytes.
  void fill_e4m3(const std::vector<bool>& written, uint32_t seed) {
    const int64_t d = shape_.head_dim, size = shape_.block_size,
                  page = size * static_cast<int64_t>(kv_row_bytes(DType::e4m3, d));
    std::mt19937 random(seed);
    std::vector<std::byte> bytes(static_cast<size_t>(caches[0].k.shape[0] * caches[0].k.stride[0]),
                                 std::byte{0xff});
    for (size_t half = 0; half < 2 * caches.size(); ++half) {
      for (int64_t i = 0; i < std::ssize(bytes) && (half == 0 || !few_values_); i += page)
        for (int64_t row = 0; row < size; ++row) {
          if (!written[static_cast<size_t>(i / page / shape_.kv_heads * size + row)]) continue;
          for (int64_t c = 0; c < d; ++c)
            bytes[static_cast<size_t>(i + row * d + c)] = static_cast<std::byte>(random() & 0xfd);
          const float scale = 0.002f + 0.004f * 0x1p-32f * static_cast<float>(random());
          std::memcpy(&bytes[static_cast<size_t>(i + size * d + row * 4)], &scale, sizeof scale);
        }
      const Tensor t = all_of(half % 2 ? caches[half / 2].v : caches[half / 2].k);
      rig.backend.copy(t, Tensor(bytes.data(), DType::i32, {t.numel()}));
      rig.backend.synchronize();
    }
  }
  void fill_caches(const std::vector<bool>& written, uint32_t seed) {
    if (shape_.cache == DType::e4m3) return fill_e4m3(written, seed);
    const int64_t row = shape_.head_dim, count = caches[0].k.numel();
    constexpr int64_t kTable = 1 << 16;
    const auto table = normal_values(2 * kTable, seed);
    std::vector<bf16> values(static_cast<size_t>(count));
    for (size_t half = 0; half < 2 * caches.size(); ++half) {
      for (int64_t i = 0; i < count && (half == 0 || !few_values_); ++i) {
        const int64_t block = i / (shape_.kv_heads * shape_.block_size * row),
                      slot = block * shape_.block_size + i / row % shape_.block_size;
        values[static_cast<size_t>(i)] = static_cast<bf16>(
            written[static_cast<size_t>(slot)]
                ? table[static_cast<size_t>((i + static_cast<int64_t>(half) * 7919) * 31 %
                                            (2 * kTable - 1))]
                : std::numeric_limits<float>::quiet_NaN());
      }
      const KvCache& cache = caches[half / 2];
      const Tensor& t = half % 2 ? cache.v : cache.k;
      rig.backend.copy(Tensor(t.data, DType::bf16, {count}, t.device),
                       Tensor(values.data(), DType::bf16, {count}));
      rig.backend.synchronize();
    }
  }

  DecoderShape shape_;
  bool few_values_;
  Tensor qkv_, attended_, gate_up_, gated_;
  Buffer weights_, memory_;
  size_t bytes_ = 0;
  int64_t num_blocks_ = 0;
};

}  // namespace nanovllm
