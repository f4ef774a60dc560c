// Qwen3: the shared decoder with attention of its own, dense and mixture of experts alike: query
// and key heads are normalised before they are rotated.
#pragma once

#include "models/decoder.h"

namespace nanovllm {

class Qwen3Attention final : public RotaryAttention {
 public:
  Qwen3Attention(const ModelConfig& c, const ModelContext& context, const std::string& prefix,
                 int64_t layer)
      : RotaryAttention(c, context, prefix, layer),
        q_norm_(make_norm(c, context, prefix + ".q_norm", c.head_dim)),
        k_norm_(make_norm(c, context, prefix + ".k_norm", c.head_dim)) {}

  void project(const Step& step, Tensor qkv, Tensor x, KvCache cache) const override {
    const Tensor q = attn_.query(qkv), k = attn_.key(qkv), v = attn_.value(qkv);
    if (!qkv_proj_.bias().defined())
      return step.ops.gemm_qk_norm_rope_store(qkv, q, k, v, x, qkv_proj_.weight(), q_norm_.weight(),
                                              k_norm_.weight(), q_norm_.eps(), step.batch, cos_sin_,
                                              cache);
    qkv_proj_.forward(step, qkv, x);
    step.ops.qk_norm_rope_store(q, k, v, q_norm_.weight(), k_norm_.weight(), q_norm_.eps(),
                                step.batch, cos_sin_, cache);
  }

  Tensor attend(const Step& step, Tensor qkv, Tensor x, KvCache cache) const override {
    const HeadNorms norms{q_norm_.weight(), k_norm_.weight(), q_norm_.eps()};
    if (!qkv_proj_.bias().defined() &&
        step.ops.fused_gemm_qk_norm_rope_store(qkv, attn_.query(qkv), attn_.key(qkv),
                                               attn_.value(qkv), x, qkv_proj_.weight(), norms.q,
                                               norms.k, norms.eps, step.batch, cos_sin_, cache))
      return attn_.forward(step, qkv, cache);
    qkv_proj_.forward(step, qkv, x);
    return attn_.forward(step, qkv, cache, cos_sin_, norms);
  }

  void add_to(DecoderStack& stack) const override {
    RotaryAttention::add_to(stack);
    stack.layers.back().q_norm = q_norm_.weight();
    stack.layers.back().k_norm = k_norm_.weight();
  }

 private:
  RmsNorm q_norm_, k_norm_;
};

using Qwen3ForCausalLM = DecoderForCausalLM<Qwen3Attention>;

}  // namespace nanovllm
