// Qwen3: a Llama-style decoder whose query and key heads are normalised before they are rotated.
//
// A residual stream runs beside the activations: each norm first adds the last block's output to it
// (add_forward), so the addition and the norm are one operation.
#include "models/qwen3.h"

#include "layers/activation.h"
#include "layers/attention.h"
#include "layers/layernorm.h"
#include "layers/linear.h"

namespace nanovllm {
namespace {

float eps_of(const ModelConfig& c) { return static_cast<float>(c.rms_norm_eps); }

class Qwen3Attention {
 public:
  Qwen3Attention(const ModelConfig& c, const ModelContext& context, const std::string& prefix)
      : qkv_proj_(context.load, prefix, c.hidden_size, c.head_dim, c.num_attention_heads,
                  c.num_key_value_heads, c.qkv_bias),
        o_proj_(context.load, prefix + ".o_proj", c.num_attention_heads * c.head_dim, c.hidden_size,
                c.output_bias),
        q_norm_(context.load, prefix + ".q_norm", c.head_dim, eps_of(c)),
        k_norm_(context.load, prefix + ".k_norm", c.head_dim, eps_of(c)),
        attn_(qkv_proj_.num_heads(), qkv_proj_.num_kv_heads(), c.head_dim),
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

 private:
  QKVParallelLinear qkv_proj_;
  RowParallelLinear o_proj_;
  RmsNorm q_norm_, k_norm_;
  Attention attn_;
  Tensor cos_sin_;
};

class Qwen3MLP {
 public:
  Qwen3MLP(const ModelConfig& c, const ModelContext& context, const std::string& prefix)
      : gate_up_proj_(context.load, prefix, c.hidden_size,
                      {{"gate_proj", c.intermediate_size}, {"up_proj", c.intermediate_size}}),
        down_proj_(context.load, prefix + ".down_proj", c.intermediate_size, c.hidden_size) {}

  /// x [t, hidden] -> x
  void forward(const Step& step, Tensor x) const {
    ArenaScope scope(step.arena);
    down_proj_.forward(step, x, act_.forward(step, gate_up_proj_.forward(step, x)));
  }

 private:
  MergedColumnParallelLinear gate_up_proj_;
  RowParallelLinear down_proj_;
  SiluAndMul act_;
};

class Qwen3DecoderLayer {
 public:
  Qwen3DecoderLayer(const ModelConfig& c, const ModelContext& context, const std::string& prefix)
      : input_layernorm_(context.load, prefix + ".input_layernorm", c.hidden_size, eps_of(c)),
        self_attn_(c, context, prefix + ".self_attn"),
        post_attention_layernorm_(context.load, prefix + ".post_attention_layernorm", c.hidden_size,
                                  eps_of(c)),
        mlp_(c, context, prefix + ".mlp") {}

  /// x: the last block's output, then this one's. residual: the stream, without x.
  void forward(const Step& step, Tensor x, Tensor residual, KvCache cache, bool first) const {
    if (first)
      input_layernorm_.forward(step, x, residual);  // the stream is the embedding itself
    else
      input_layernorm_.add_forward(step, x, residual);
    self_attn_.forward(step, x, cache);
    post_attention_layernorm_.add_forward(step, x, residual);
    mlp_.forward(step, x);
  }

 private:
  RmsNorm input_layernorm_;
  Qwen3Attention self_attn_;
  RmsNorm post_attention_layernorm_;
  Qwen3MLP mlp_;
};

class Qwen3ForCausalLM final : public Model {
 public:
  Qwen3ForCausalLM(const ModelConfig& c, const ModelContext& context)
      : embed_tokens_(context.load, "model.embed_tokens.weight", c.vocab_size, c.hidden_size),
        layers_(make_layers(c, context)),
        norm_(context.load, "model.norm", c.hidden_size, eps_of(c)),
        lm_head_(c.tie_word_embeddings ? ParallelLMHead(context.load, embed_tokens_)
                                       : ParallelLMHead(context.load, "lm_head.weight",
                                                        c.vocab_size, c.hidden_size)) {}

  Tensor forward(const Step& step) const override {
    Tensor residual = embed_tokens_.forward(step, step.batch.tokens);
    Tensor x = step.arena.take(residual.dtype, {residual.shape[0], residual.shape[1]});
    for (size_t i = 0; i < layers_.size(); ++i)
      layers_[i].forward(step, x, residual, step.kv_cache[i], i == 0);
    norm_.add_forward(step, x, residual);
    return x;
  }

  const ParallelLMHead& lm_head() const override { return lm_head_; }

 private:
  static std::vector<Qwen3DecoderLayer> make_layers(const ModelConfig& c,
                                                    const ModelContext& context) {
    std::vector<Qwen3DecoderLayer> layers;
    layers.reserve(static_cast<size_t>(c.num_hidden_layers));
    for (int64_t i = 0; i < c.num_hidden_layers; ++i)
      layers.emplace_back(c, context, fmt::format("model.layers.{}", i));
    return layers;
  }

  VocabParallelEmbedding embed_tokens_;
  std::vector<Qwen3DecoderLayer> layers_;
  RmsNorm norm_;
  ParallelLMHead lm_head_;
};

}  // namespace

std::unique_ptr<Model> make_qwen3(const ModelConfig& config, const ModelContext& context) {
  check(config.sliding_window == 0, ErrorKind::model,
        "config.json: sliding-window layers are not supported for {}", config.architecture);
  return std::make_unique<Qwen3ForCausalLM>(config, context);
}

}  // namespace nanovllm
