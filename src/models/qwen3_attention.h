// Qwen3's attention, dense and mixture of experts alike: query and key heads are normalised before
// they are rotated.
#pragma once

#include "models/decoder.h"

namespace nanovllm {

class Qwen3Attention {
 public:
  Qwen3Attention(const ModelConfig& c, const ModelContext& context, const std::string& prefix,
                 int64_t layer)
      : qkv_proj_(context.load, prefix, c.hidden_size, c.head_dim, c.num_attention_heads,
                  c.num_key_value_heads, c.qkv_bias),
        o_proj_(context.load, prefix + ".o_proj", c.num_attention_heads * c.head_dim, c.hidden_size,
                c.output_bias),
        q_norm_(make_norm(c, context, prefix + ".q_norm", c.head_dim)),
        k_norm_(make_norm(c, context, prefix + ".k_norm", c.head_dim)),
        attn_(qkv_proj_.num_heads(), qkv_proj_.num_kv_heads(), c.head_dim, c.window(layer)),
        cos_sin_(context.cos_sin) {}

  /// x [t, hidden] -> x
  void forward(const Step& step, Tensor x, KvCache cache) const {
    ArenaScope scope(step.arena);
    Tensor qkv = qkv_proj_.forward(step, x);
    step.ops.qk_norm_rope_store(attn_.query(qkv), attn_.key(qkv), attn_.value(qkv),
                                q_norm_.weight(), k_norm_.weight(), q_norm_.eps(), step.batch,
                                cos_sin_, cache);
    o_proj_.forward(step, x, attn_.forward(step, qkv, cache));
  }

  void describe(DecoderStack& stack) const {
    describe_attention(stack, qkv_proj_, o_proj_, attn_, cos_sin_);
    stack.layers.back().q_norm = q_norm_.weight();
    stack.layers.back().k_norm = k_norm_.weight();
  }

 private:
  QKVParallelLinear qkv_proj_;
  RowParallelLinear o_proj_;
  RmsNorm q_norm_, k_norm_;
  Attention attn_;
  Tensor cos_sin_;
};

}  // namespace nanovllm
