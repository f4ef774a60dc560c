// Qwen3: the shared decoder with attention of its own, dense and mixture of experts alike: query
// and key heads are normalised before they are rotated.
#pragma once

#include "models/decoder.h"

namespace nanovllm {

class Qwen3Attention : public ProjectedAttention {
 public:
  Qwen3Attention(const ModelConfig& c, const ModelContext& context, const std::string& prefix,
                 int64_t layer)
      : ProjectedAttention(c, context, prefix, layer),
        q_norm_(make_norm(c, context, prefix + ".q_norm", c.head_dim)),
        k_norm_(make_norm(c, context, prefix + ".k_norm", c.head_dim)) {}

  /// x [t, hidden] -> y, as forward_with()
  LayerInput forward(const Step& step, Tensor y, Tensor residual, Tensor x, KvCache cache) const {
    return forward_with(step, y, residual, x, cache,
                        [&](Tensor qkv) { project(step, qkv, x, cache); });
  }
  /// RotaryAttention::project(), with query and key normalised before they are rotated. In one
  /// operation, where there is one.
  void project(const Step& step, Tensor qkv, Tensor x, KvCache cache) const {
    const Tensor q = query(qkv), k = key(qkv), v = value(qkv), q_norm = q_norm_.weight(),
                 k_norm = k_norm_.weight();
    if (!qkv_proj().bias().defined() &&
        step.ops.gemm_qk_norm_rope_store(q, k, v, x, qkv_proj().weight(), q_norm, k_norm,
                                         q_norm_.eps(), step.batch, cos_sin(), cache))
      return;
    qkv_proj().forward(step, qkv, x);
    step.ops.qk_norm_rope_store(q, k, v, q_norm, k_norm, q_norm_.eps(), step.batch, cos_sin(),
                                cache);
  }

  void describe(DecoderStack& stack) const {
    ProjectedAttention::describe(stack);
    stack.layers.back().q_norm = q_norm_.weight();
    stack.layers.back().k_norm = k_norm_.weight();
  }

 private:
  RmsNorm q_norm_, k_norm_;
};

using Qwen3ForCausalLM = DecoderForCausalLM<Qwen3Attention>;

}  // namespace nanovllm
