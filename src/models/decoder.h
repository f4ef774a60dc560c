// The decoder that Llama-style families share: pre-norm, with rotary grouped-query attention and a
// gated MLP. A family chooses the parts or brings its own; a part is told the number of its layer.
//
// A residual stream runs beside the activations: each block's output is added to it, and the norm
// of the sum is what the next block reads. The sum over the ranks, the addition and the norm are
// one operation (RowParallelLinear::forward_add_norm), so a block is told the norm behind it. How a
// step is taken through the layers is models/layer_schedule.h.
#pragma once

#include "layers/attention.h"
#include "layers/layernorm.h"
#include "layers/linear.h"
#include "models/layer_schedule.h"
#include "models/model.h"

namespace nanovllm {

inline RmsNorm make_norm(const ModelConfig& c, const ModelContext& context,
                         const std::string& prefix, int64_t size) {
  return RmsNorm(context.load, prefix, size, static_cast<float>(c.rms_norm_eps));
}

/// Grouped-query attention with rotated queries and keys, and the biases that the configuration
/// names: the attention of Llama, Mistral and Qwen2. Others do more in project().
class RotaryAttention {
 public:
  RotaryAttention(const ModelConfig& c, const ModelContext& context, const std::string& prefix,
                  int64_t layer)
      : qkv_proj_(context.load, prefix, c.hidden_size, c.head_dim, c.num_attention_heads,
                  c.num_key_value_heads, c.qkv_bias),
        o_proj_(context.load, prefix + ".o_proj", c.num_attention_heads * c.head_dim, c.hidden_size,
                c.output_bias, c.is_in_halves()),
        attn_(qkv_proj_.num_heads(), qkv_proj_.num_kv_heads(), c.head_dim, c.window(layer)),
        cos_sin_(context.cos_sin) {
    context.load.ignore(prefix + ".rotary_emb.inv_freq");  // in checkpoints of 2023
  }
  virtual ~RotaryAttention() = default;

  /// residual += attention of x; x = norm(residual). [t, hidden]
  void forward(const Step& step, Tensor x, Tensor residual, KvCache cache,
               const RmsNorm& norm) const {
    ArenaScope scope(step.arena);
    const Tensor qkv = qkv_proj_.take_output(step, x.dtype, x.shape[0]);
    o_proj_.forward_add_norm(step, x, residual, attend(step, qkv, x, cache), norm);
  }

  /// Makes query, key and value of x, rotates query and key, and puts key and value into the cache.
  /// A token's row depends on its position and its slot only.
  virtual void project(const Step& step, Tensor qkv, Tensor x, KvCache cache) const {
    qkv_proj_.forward(step, qkv, x);
    step.ops.rope_store(attn_.query(qkv), attn_.key(qkv), attn_.value(qkv), step.batch, cos_sin_,
                        cache);
  }

  /// project(), and the attention of its rows.
  virtual Tensor attend(const Step& step, Tensor qkv, Tensor x, KvCache cache) const {
    qkv_proj_.forward(step, qkv, x);
    return attn_.forward(step, qkv, cache, cos_sin_);
  }

  /// Adds this attention to the last layer of `stack`.
  virtual void add_to(DecoderStack& stack) const {
    DecoderWeights& layer = stack.layers.back();
    layer.qkv = qkv_proj_.weight();
    layer.qkv_bias = qkv_proj_.bias();
    layer.o = o_proj_.weight();
    layer.o_bias = o_proj_.bias();
    attn_.add_to(stack);
    stack.cos_sin = cos_sin_;
  }

  // The parts of forward(), for a schedule that takes only some of the rows through one of them.
  const QKVParallelLinear& qkv_proj() const { return qkv_proj_; }
  const Attention& attention() const { return attn_; }
  const RowParallelLinear& o_proj() const { return o_proj_; }

 protected:
  QKVParallelLinear qkv_proj_;
  RowParallelLinear o_proj_;
  Attention attn_;
  Tensor cos_sin_;
};

/// down(silu(gate(x)) * up(x))
class GatedMLP {
 public:
  GatedMLP(const ModelConfig& c, const ModelContext& context, const std::string& prefix,
           int64_t /*layer*/)
      : gate_up_proj_(context.load, prefix, c.hidden_size,
                      {{"gate_proj", c.intermediate_size}, {"up_proj", c.intermediate_size}},
                      c.mlp_bias),
        down_proj_(context.load, prefix + ".down_proj", c.intermediate_size, c.hidden_size,
                   c.mlp_bias, c.is_in_halves()) {}

  /// residual += MLP of x; x = norm(residual). [t, hidden]
  void forward(const Step& step, Tensor x, Tensor residual, const RmsNorm& norm) const {
    ArenaScope scope(step.arena);
    down_proj_.forward_add_norm(step, x, residual, gate_up_proj_.forward_gated(step, x), norm);
  }
  /// x = this rank's part of the MLP of x.
  void forward(const Step& step, Tensor x) const {
    ArenaScope scope(step.arena);
    down_proj_.forward(step, x, gate_up_proj_.forward_gated(step, x));
  }

  void add_to(DecoderStack& stack) const {
    DecoderWeights& layer = stack.layers.back();
    layer.gate_up = gate_up_proj_.weight();
    layer.gate_up_bias = gate_up_proj_.bias();
    layer.down = down_proj_.weight();
    layer.down_bias = down_proj_.bias();
  }

 private:
  MergedColumnParallelLinear gate_up_proj_;
  RowParallelLinear down_proj_;
};

template <class Attention, class MLP>
class DecoderLayer {
 public:
  DecoderLayer(const ModelConfig& c, const ModelContext& context, const std::string& prefix,
               int64_t layer)
      : input_layernorm_(make_norm(c, context, prefix + ".input_layernorm", c.hidden_size)),
        self_attn_(c, context, prefix + ".self_attn", layer),
        post_attention_layernorm_(
            make_norm(c, context, prefix + ".post_attention_layernorm", c.hidden_size)),
        mlp_(c, context, prefix + ".mlp", layer) {}

  /// x [t, hidden]: input_layernorm() of the residual stream. Adds the layer's blocks to the
  /// stream; x is then `next` of it, the norm that the next layer begins with.
  void forward(const Step& step, Tensor x, Tensor residual, KvCache cache,
               const RmsNorm& next) const {
    self_attn_.forward(step, x, residual, cache, post_attention_layernorm_);
    mlp_.forward(step, x, residual, next);
  }

  /// Adds this layer to the stack, and tells its norms who reads them.
  void add_to(DecoderStack& stack) {
    DecoderWeights& layer = stack.layers.emplace_back();
    layer.input_norm = input_layernorm_.weight();
    layer.post_norm = post_attention_layernorm_.weight();
    stack.eps = input_layernorm_.eps();
    self_attn_.add_to(stack);
    mlp_.add_to(stack);
    input_layernorm_.set_reader(layer.qkv);
    if (!layer.router.defined()) post_attention_layernorm_.set_reader(layer.gate_up);
  }

  const RmsNorm& input_layernorm() const { return input_layernorm_; }
  const Attention& self_attn() const { return self_attn_; }
  const RmsNorm& post_attention_layernorm() const { return post_attention_layernorm_; }
  const MLP& mlp() const { return mlp_; }

 private:
  RmsNorm input_layernorm_;
  Attention self_attn_;
  RmsNorm post_attention_layernorm_;
  MLP mlp_;
};

/// Embedding, layers, norm and head, under the checkpoint names that all these families use.
template <class Attention, class MLP = GatedMLP>
class DecoderForCausalLM final : public Model {
 public:
  DecoderForCausalLM(const ModelConfig& c, const ModelContext& context)
      : embed_tokens_(context.load, "model.embed_tokens.weight", c.vocab_size, c.hidden_size),
        layers_{make_layers(c, context), make_norm(c, context, "model.norm", c.hidden_size)},
        lm_head_(c.tie_word_embeddings ? ParallelLMHead(context.load, embed_tokens_)
                                       : ParallelLMHead(context.load, "lm_head.weight",
                                                        c.vocab_size, c.hidden_size)) {}

  HiddenStates forward(const Step& step) const override {
    return layers_.forward(step, embed_tokens_.forward(step, step.batch.tokens));
  }
  const ParallelLMHead& lm_head() const override { return lm_head_; }

 private:
  using Layer = DecoderLayer<Attention, MLP>;

  static std::vector<Layer> make_layers(const ModelConfig& c, const ModelContext& context) {
    std::vector<Layer> layers;
    layers.reserve(static_cast<size_t>(c.num_hidden_layers));
    for (int64_t i = 0; i < c.num_hidden_layers; ++i)
      layers.emplace_back(c, context, fmt::format("model.layers.{}", i), i);
    return layers;
  }

  VocabParallelEmbedding embed_tokens_;
  LayerSchedule<Layer> layers_;
  ParallelLMHead lm_head_;
};

/// Llama, Mistral, Qwen2 and Seed-OSS.
using RotaryForCausalLM = DecoderForCausalLM<RotaryAttention>;

}  // namespace nanovllm
