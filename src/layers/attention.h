// Attention over the paged cache, between the QKV projection and the output projection.
#pragma once

#include <cmath>

#include "layers/step.h"

namespace nanovllm {

class Attention {
 public:
  /// `window`: the keys that a row sees, its own included; 0: all up to its own.
  Attention(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t window = 0)
      : num_heads_(num_heads),
        num_kv_heads_(num_kv_heads),
        head_dim_(head_dim),
        window_(window),
        scale_(1.0f / std::sqrt(static_cast<float>(head_dim))) {}

  /// qkv [t, (heads + 2 kv_heads) * head_dim]: query, key and value heads side by side.
  Tensor query(Tensor qkv) const { return qkv.cols(0, q_size()).split(head_dim_); }
  Tensor key(Tensor qkv) const { return qkv.cols(q_size(), q_size() + kv_size()).split(head_dim_); }
  Tensor value(Tensor qkv) const {
    return qkv.cols(q_size() + kv_size(), q_size() + 2 * kv_size()).split(head_dim_);
  }

  /// Room in step.arena for the result of all rows: dense, as the output projection wants it.
  Tensor take_output(const Step& step, Tensor qkv) const {
    return step.arena.take(qkv.dtype, {qkv.shape[0], q_size()});
  }
  /// [t, heads * head_dim] of heads that are rotated, whose keys and values are in the cache.
  Tensor forward(const Step& step, Tensor qkv, KvCache cache) const {
    const Tensor out = take_output(step, qkv);
    forward(step, out, qkv, cache);
    return out;
  }
  /// The same of heads that are normalised, rotated and stored first.
  Tensor forward(const Step& step, Tensor qkv, KvCache cache, Tensor cos_sin,
                 const HeadNorms& norms = {}) const {
    const Tensor out = take_output(step, qkv);
    step.ops.rope_store_attention(out.split(head_dim_), query(qkv), key(qkv), value(qkv), norms,
                                  step.batch, cos_sin, cache, scale_, window_);
    return out;
  }
  /// Into `out`, the rows of the batch's sequences, which may be some of qkv's and out's.
  void forward(const Step& step, Tensor out, Tensor qkv, KvCache cache) const {
    step.ops.attention(out.split(head_dim_), query(qkv), cache, step.batch, scale_, window_);
  }

  /// Adds this attention to the last layer of `stack`.
  void add_to(DecoderStack& stack) const {
    stack.layers.back().window = window_;
    stack.heads = num_heads_;
    stack.kv_heads = num_kv_heads_;
    stack.head_dim = head_dim_;
    stack.scale = scale_;
  }

 private:
  int64_t q_size() const { return num_heads_ * head_dim_; }
  int64_t kv_size() const { return num_kv_heads_ * head_dim_; }
  int64_t num_heads_, num_kv_heads_, head_dim_, window_;
  float scale_;
};

}  // namespace nanovllm
