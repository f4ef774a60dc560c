// What the Llama-style families share: a pre-norm decoder with rotary grouped-query attention and a
// gated MLP. A family chooses the parts or brings its own; a part is told the number of its layer.
//
// A residual stream runs beside the activations: each norm first adds the last block's output to it
// (add_forward), so the sum over the ranks, the addition and the norm are one operation. What
// blocks pass on is one rank's part of that sum. Of many rows, a block's last product may add to
// the stream itself (LayerInput).
#pragma once

#include "layers/attention.h"
#include "layers/layernorm.h"
#include "layers/linear.h"
#include "models/halves.h"
#include "models/lanes.h"
#include "models/model.h"

namespace nanovllm {

inline RmsNorm make_norm(const ModelConfig& c, const ModelContext& context,
                         const std::string& prefix, int64_t size) {
  return RmsNorm(context.load, prefix, size, static_cast<float>(c.rms_norm_eps));
}

/// What a norm finds in x beside the stream: nothing, since the stream is the embedding itself or
/// the last block has added its output to it; this rank's part of that output; or its own result,
/// of that output and the stream.
enum class LayerInput { none, part, normed };

/// Adds what `input` says to the stream; x = norm(residual).
inline void norm_stream(const Step& step, const RmsNorm& norm, Tensor x, Tensor residual,
                        LayerInput input) {
  if (input == LayerInput::none)
    norm.forward(step, x, residual);
  else if (input == LayerInput::part)
    norm.add_forward(step, x, residual);
}

/// Grouped-query attention between its projections, with the biases that the configuration names.
/// What happens to query and key in between is the family's.
class ProjectedAttention {
 public:
  ProjectedAttention(const ModelConfig& c, const ModelContext& context, const std::string& prefix,
                     int64_t layer)
      : qkv_proj_(context.load, prefix, c.hidden_size, c.head_dim, c.num_attention_heads,
                  c.num_key_value_heads, c.qkv_bias),
        o_proj_(context.load, prefix + ".o_proj", c.num_attention_heads * c.head_dim, c.hidden_size,
                c.output_bias),
        attn_(qkv_proj_.num_heads(), qkv_proj_.num_kv_heads(), c.head_dim, c.window(layer)),
        cos_sin_(context.cos_sin) {}

  /// Adds this attention to the last layer of `stack`.
  void describe(DecoderStack& stack) const {
    DecoderWeights& layer = stack.layers.back();
    layer.qkv = qkv_proj_.weight();
    layer.qkv_bias = qkv_proj_.bias();
    layer.o = o_proj_.weight();
    layer.o_bias = o_proj_.bias();
    attn_.describe(stack);
    stack.cos_sin = cos_sin_;
  }

  // The parts of forward_with() by themselves; the projections may take some of the rows.
  const QKVParallelLinear& qkv_proj() const { return qkv_proj_; }
  const RowParallelLinear& o_proj() const { return o_proj_; }
  const Attention& attention() const { return attn_; }

 protected:
  /// x [t, hidden] -> y: all rows, or the batch's logits_rows where those are fewer. y may be x. Or
  /// all rows are added to the residual stream, as the result says. project(qkv) makes query, key
  /// and value of x, rotates query and key, and puts key and value into the cache.
  template <class Project>
  LayerInput forward_with(const Step& step, Tensor y, Tensor residual, Tensor x, KvCache cache,
                          Project&& project) const {
    ArenaScope scope(step.arena);
    const Tensor qkv = qkv_proj_.take_output(step, x.dtype, x.shape[0]);
    project(qkv);
    if (y.shape[0] == 0) return LayerInput::part;
    Tensor heads = attn_.forward(step, qkv, cache);
    if (y.shape[0] < x.shape[0]) {
      const Tensor all = heads;
      heads = step.arena.take(all.dtype, {y.shape[0], all.shape[1]});
      step.ops.gather_rows(heads, all, step.batch.logits_rows);
    } else if (o_proj_.add_forward(step, residual, heads)) {
      return LayerInput::none;
    }
    o_proj_.forward_for_sum(step, y, heads);
    return LayerInput::part;
  }
  Tensor query(Tensor qkv) const { return attn_.query(qkv); }
  Tensor key(Tensor qkv) const { return attn_.key(qkv); }
  Tensor value(Tensor qkv) const { return attn_.value(qkv); }
  Tensor cos_sin() const { return cos_sin_; }

 private:
  QKVParallelLinear qkv_proj_;
  RowParallelLinear o_proj_;
  Attention attn_;
  Tensor cos_sin_;
};

/// The attention of Llama, Mistral and Qwen2: query and key are rotated.
class RotaryAttention : public ProjectedAttention {
 public:
  RotaryAttention(const ModelConfig& c, const ModelContext& context, const std::string& prefix,
                  int64_t layer)
      : ProjectedAttention(c, context, prefix, layer) {
    context.load.ignore(prefix + ".rotary_emb.inv_freq");  // in checkpoints of 2023
  }

  /// x [t, hidden] -> y, as forward_with()
  LayerInput forward(const Step& step, Tensor y, Tensor residual, Tensor x, KvCache cache) const {
    return forward_with(step, y, residual, x, cache,
                        [&](Tensor qkv) { project(step, qkv, x, cache); });
  }
  /// Makes query, key and value of x, rotates query and key, and puts key and value into the cache.
  /// Looks at each token's position and slot alone.
  void project(const Step& step, Tensor qkv, Tensor x, KvCache cache) const {
    qkv_proj().forward(step, qkv, x);
    step.ops.rope_store(query(qkv), key(qkv), value(qkv), step.batch, cos_sin(), cache);
  }
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
                   c.mlp_bias) {}

  /// x [t, hidden] -> x
  void forward(const Step& step, Tensor x) const {
    ArenaScope scope(step.arena);
    down_proj_.forward(step, x, gate_up_proj_.forward_gated(step, x));
  }
  /// The same, or residual += that, as the result says.
  LayerInput forward(const Step& step, Tensor x, Tensor residual) const {
    ArenaScope scope(step.arena);
    const Tensor gated = gate_up_proj_.forward_gated(step, x);
    if (down_proj_.add_forward(step, residual, gated)) return LayerInput::none;
    down_proj_.forward_for_sum(step, x, gated);
    return LayerInput::part;
  }

  void describe(DecoderStack& stack) const {
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

/// Whether the last layer computes logits_rows alone. Where most rows need logits, copying them
/// would cost more.
inline bool leaves_rows_out(const Batch& batch) {
  return 2 * batch.logits_rows.shape[0] <= batch.num_tokens();
}

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

  /// x, residual: the layer's input, of which `input` says what the stream still lacks. y,
  /// y_residual: its output, of which the result says the same. They are x and residual themselves,
  /// or, in the last layer, the batch's logits_rows of them alone: after its attention a row
  /// matters to no other.
  LayerInput forward(const Step& step, Tensor y, Tensor y_residual, Tensor x, Tensor residual,
                     KvCache cache, LayerInput input) const {
    norm_stream(step, input_layernorm_, x, residual, input);
    const LayerInput attended = self_attn_.forward(step, y, residual, x, cache);
    if (y.shape[0] == 0) return LayerInput::part;
    if (y.shape[0] < x.shape[0]) step.ops.gather_rows(y_residual, residual, step.batch.logits_rows);
    norm_stream(step, post_attention_layernorm_, y, y_residual, attended);
    return mlp_.forward(step, y, y_residual);
  }

  /// The same with y = x, for a step with halves. A half's sum over the ranks and the norm after it
  /// are started here and finished where that norm's result is needed, so that they run beside the
  /// other half's products: this layer's own input norm was started by the layer before (the first
  /// layer's has nothing to sum), and it starts `next`, the input norm of the layer after it.
  /// Before the last layer, which is not done in halves, every rank needs the whole stream.
  void forward_halves(const Step& step, Tensor x, Tensor residual, KvCache cache, bool is_first,
                      const RmsNorm& next, bool before_last) const {
    const Halves halves{step};
    {
      ArenaScope scope(step.arena);
      const Tensor qkv = self_attn_.qkv_proj().take_output(step, x.dtype, x.shape[0]),
                   heads = self_attn_.attention().take_output(step, qkv);
      halves.each([&](int half, int64_t from, int64_t to) {
        const Tensor rows = x.rows(from, to), stream = residual.rows(from, to);
        if (is_first)
          input_layernorm_.forward(step, rows, stream);
        else
          step.comm.finish_half(half);
        halves.in_turns(from, to, [&](int64_t begin, int64_t end) {
          const Batch batch = tokens_of(step.batch, begin, end);
          const Step part{step.ops, step.comm, step.arena, batch, step.kv_cache};
          self_attn_.project(part, qkv.rows(begin, end), x.rows(begin, end), cache);
        });
        const Batch batch = halves.sequences(half);
        self_attn_.attention().forward({step.ops, step.comm, step.arena, batch, step.kv_cache},
                                       heads, qkv, cache);
        halves.in_turns(from, to, [&](int64_t begin, int64_t end) {
          self_attn_.o_proj().forward(step, x.rows(begin, end), heads.rows(begin, end));
        });
        post_attention_layernorm_.start_add_forward(step, half, rows, stream, false);
      });
    }
    halves.each([&](int half, int64_t from, int64_t to) {
      const Tensor rows = x.rows(from, to);
      step.comm.finish_half(half);
      mlp_.forward(step, rows);
      next.start_add_forward(step, half, rows, residual.rows(from, to), before_last);
    });
  }
  const RmsNorm& input_layernorm() const { return input_layernorm_; }

  /// Adds this layer to the stack.
  void describe(DecoderStack& stack) const {
    DecoderWeights& layer = stack.layers.emplace_back();
    layer.input_norm = input_layernorm_.weight();
    layer.post_norm = post_attention_layernorm_.weight();
    stack.eps = input_layernorm_.eps();
    self_attn_.describe(stack);
    mlp_.describe(stack);
  }

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
        layers_(make_layers(c, context)),
        norm_(make_norm(c, context, "model.norm", c.hidden_size)),
        lm_head_(c.tie_word_embeddings ? ParallelLMHead(context.load, embed_tokens_)
                                       : ParallelLMHead(context.load, "lm_head.weight",
                                                        c.vocab_size, c.hidden_size)) {
    for (const Layer& layer : layers_) layer.describe(stack_);
  }

  Tensor forward(const Step& step) const override {
    const Tensor residual = embed_tokens_.forward(step, step.batch.tokens);
    const Tensor x = step.arena.take(residual.dtype, {residual.shape[0], residual.shape[1]});
    return step.batch.is_decode() && run_decode(step, x, residual)
               ? x
               : run_and_leave_out(step, x, residual);
  }

  const ParallelLMHead& lm_head() const override { return lm_head_; }

 private:
  using Layer = DecoderLayer<Attention, MLP>;

  /// All layers and the norm, in one of the two ways that are for decode steps alone: in lanes, or
  /// as one operation. False, and nothing is done, where neither pays.
  bool run_decode(const Step& step, Tensor x, Tensor residual) const {
    if (const int lanes = lanes_of(step); lanes > 1) {
      run_in_lanes(step, lanes, [&](const Step& part, int64_t from, int64_t to) {
        const Tensor rows = x.rows(from, to), stream = residual.rows(from, to);
        const LayerInput end = run_layers(part, layers_.size(), rows, stream);
        norm_stream(part, norm_, rows, stream, end);
      });
      return true;
    }
    if (!step.comm.sums_in_decoder_layers() ||
        !step.ops.decoder_layers(x, residual, stack_, step.kv_cache, step.batch))
      return false;
    norm_.add_forward(step, x, residual);
    return true;
  }

  /// The first `count` layers, and what the next norm is to add.
  LayerInput run_layers(const Step& step, size_t count, Tensor x, Tensor residual) const {
    LayerInput input = LayerInput::none;
    for (size_t i = 0; i < count; ++i)
      input = layers_[i].forward(step, x, residual, x, residual, step.kv_cache[i], input);
    return input;
  }

  /// The same in halves, if the step has them; x is then what the next layer's input norm gives.
  bool run_halves(const Step& step, size_t count, Tensor x, Tensor residual) const {
    if (step.halves.rows == 0 || count == 0) return false;
    for (size_t i = 0; i < count; ++i)
      layers_[i].forward_halves(step, x, residual, step.kv_cache[i], i == 0,
                                layers_[i + 1].input_layernorm(), i + 1 == count);
    for (const int half : {0, 1}) step.comm.finish_half(half);
    return true;
  }

  /// All layers and the norm, the last of them perhaps with the rows alone that need logits.
  Tensor run_and_leave_out(const Step& step, Tensor x, Tensor residual) const {
    const size_t last = layers_.size() - 1;
    const LayerInput input = run_halves(step, last, x, residual)
                                 ? LayerInput::normed
                                 : run_layers(step, last, x, residual);
    Tensor y = x, y_residual = residual;
    if (leaves_rows_out(step.batch)) {
      y = step.arena.take(x.dtype, {step.batch.logits_rows.shape[0], x.shape[1]});
      y_residual = step.arena.take(x.dtype, {y.shape[0], y.shape[1]});
    }
    const LayerInput end =
        layers_[last].forward(step, y, y_residual, x, residual, step.kv_cache[last], input);
    if (y.shape[0] > 0) norm_stream(step, norm_, y, y_residual, end);
    return y;
  }

  int lanes_of(const Step& step) const {
    if (step.comm.world_size() > 1) return 1;
    if (stack_.experts_per_token > 0) return 1;  // not a few large products
    const int lanes = step.lanes > 0 ? step.lanes : step.ops.lanes_for(size_of_decode(step.batch));
    return step.batch.num_seqs() < lanes ? 1 : lanes;
  }

  DecodeSize size_of_decode(const Batch& batch) const {
    double weights = 0, bytes_per_key = 0;
    for (const DecoderWeights& layer : stack_.layers) {
      for (const Tensor& w : {layer.qkv, layer.o, layer.gate_up, layer.down})
        weights += static_cast<double>(w.bytes());
      bytes_per_key += static_cast<double>(2 * stack_.kv_heads * stack_.head_dim) *
                       static_cast<double>(size_of(layer.qkv.dtype));
    }
    return {batch.num_seqs(), weights,
            static_cast<double>(batch.num_seqs() * batch.max_context_len) * bytes_per_key};
  }

  static std::vector<Layer> make_layers(const ModelConfig& c, const ModelContext& context) {
    std::vector<Layer> layers;
    layers.reserve(static_cast<size_t>(c.num_hidden_layers));
    for (int64_t i = 0; i < c.num_hidden_layers; ++i)
      layers.emplace_back(c, context, fmt::format("model.layers.{}", i), i);
    return layers;
  }

  VocabParallelEmbedding embed_tokens_;
  std::vector<Layer> layers_;
  DecoderStack stack_;  // the same layers, as the backend's kernel for few rows wants them
  RmsNorm norm_;
  ParallelLMHead lm_head_;
};

/// Llama, Mistral and Qwen2.
using RotaryForCausalLM = DecoderForCausalLM<RotaryAttention>;

}  // namespace nanovllm
