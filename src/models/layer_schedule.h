// LayerSchedule: how a step is taken through the layers of a decoder. run() is the plain way, and
// the others give its bits: in micro-batches or as one operation, for decode steps; in halves, for
// steps of many rows on several ranks; and the last layer with only the rows that need logits.
#pragma once

#include <algorithm>
#include <vector>

#include "layers/layernorm.h"
#include "models/halves.h"
#include "models/micro_batches.h"

namespace nanovllm {

/// Whether the last layer computes only logits_rows. Where most rows need logits, copying them
/// would cost more.
inline bool leaves_rows_out(const Batch& batch) {
  return 2 * batch.logits_rows.shape[0] <= batch.num_tokens();
}

/// Layers as models/decoder.h has them, and the norm behind the last.
template <class Layer>
class LayerSchedule {
 public:
  LayerSchedule(std::vector<Layer> layers, RmsNorm norm) : layers_(std::move(layers)), norm_(norm) {
    for (Layer& layer : layers_) layer.add_to(stack_);
  }

  /// The layers and the norm, of the embeddings in `residual` [t, hidden], which becomes the
  /// stream.
  HiddenStates forward(const Step& step, Tensor residual) const {
    const Tensor x = step.arena.take(residual.dtype, {residual.shape[0], residual.shape[1]});
    if (step.batch.is_decode() &&
        (run_micro_batches(step, x, residual) || run_at_once(step, x, residual)))
      return {x};
    const size_t last = layers_.size() - 1;
    const bool leaves_out = leaves_rows_out(step.batch);
    const size_t before = leaves_out || step.halves.rows > 0 ? last : layers_.size();
    if (step.halves.rows > 0)
      run_halves(step, before, x, residual);
    else
      run(step, before, x, residual);
    if (leaves_out) return {run_last(step, x, residual), true};
    if (before == last) run_layer(step, last, x, residual);
    return {x};
  }

 private:
  /// The first `count` layers, one after another, all rows at once. x is then the next norm's
  /// result.
  void run(const Step& step, size_t count, Tensor x, Tensor residual) const {
    layers_[0].input_layernorm().forward(step, x, residual);
    for (size_t i = 0; i < count; ++i) run_layer(step, i, x, residual);
  }
  void run_layer(const Step& step, size_t i, Tensor x, Tensor residual) const {
    layers_[i].forward(step, x, residual, step.kv_cache[i], norm_behind(i));
  }
  const RmsNorm& norm_behind(size_t i) const {
    return i + 1 < layers_.size() ? layers_[i + 1].input_layernorm() : norm_;
  }

  /// A decode step in micro-batches. False, and nothing is done, where they do not pay.
  bool run_micro_batches(const Step& step, Tensor x, Tensor residual) const {
    const int micro_batches = micro_batches_of(step);
    if (micro_batches == 1) return false;
    run_in_micro_batches(step, micro_batches, [&](const Step& part, int64_t from, int64_t to) {
      run(part, layers_.size(), x.rows(from, to), residual.rows(from, to));
    });
    return true;
  }

  /// A decode step as one operation. False, and nothing is done, where there is none.
  bool run_at_once(const Step& step, Tensor x, Tensor residual) const {
    const bool sums = step.comm.world_size() == 1 || step.comm.fusions().sums_in_decoder_layers();
    if (!sums || !step.ops.decoder_layers(x, residual, stack_, step.kv_cache, step.batch))
      return false;
    norm_.add_forward(step, x, residual);
    return true;
  }

  /// The first `count` layers, not the last, of a step with halves.
  void run_halves(const Step& step, size_t count, Tensor x, Tensor residual) const {
    layers_[0].input_layernorm().forward(step, x, residual);
    for (size_t i = 0; i < count; ++i) run_layer_in_halves(step, i, x, residual, i + 1 == count);
    if (count == 0) return;
    for (const int half : {0, 1}) step.comm.fusions().finish_half(half);
  }

  /// A half's sum over the ranks and the norm after it are started here and finished where that
  /// norm's result is needed, so that they run beside the other half's products: the norm in front
  /// of this layer was started by the layer before, and this layer starts the one behind it. Before
  /// the last layer, which is not done in halves, every rank needs the whole stream.
  void run_layer_in_halves(const Step& step, size_t i, Tensor x, Tensor residual,
                           bool before_last) const {
    const Layer& layer = layers_[i];
    const auto& attention = layer.self_attn();
    const Halves halves{step};
    {
      ArenaScope scope(step.arena);
      const Tensor qkv = attention.qkv_proj().take_output(step, x.dtype, x.shape[0]),
                   heads = attention.attention().take_output(step, qkv);
      halves.each([&](int half, int64_t from, int64_t to) {
        if (i > 0) step.comm.fusions().finish_half(half);
        halves.in_turns(from, to, [&](int64_t begin, int64_t end) {
          const Batch batch = tokens_of(step.batch, begin, end);
          const Step part{step.ops, step.comm, step.arena, batch, step.kv_cache};
          attention.project(part, qkv.rows(begin, end), x.rows(begin, end), step.kv_cache[i]);
        });
        const Batch batch = halves.sequences(half);
        attention.attention().forward({step.ops, step.comm, step.arena, batch, step.kv_cache},
                                      heads, qkv, step.kv_cache[i]);
        halves.in_turns(from, to, [&](int64_t begin, int64_t end) {
          attention.o_proj().forward(step, x.rows(begin, end), heads.rows(begin, end));
        });
        layer.post_attention_layernorm().start_add_forward(step, half, x.rows(from, to),
                                                           residual.rows(from, to), false);
      });
    }
    halves.each([&](int half, int64_t from, int64_t to) {
      const Tensor rows = x.rows(from, to);
      step.comm.fusions().finish_half(half);
      layer.mlp().forward(step, rows);
      norm_behind(i).start_add_forward(step, half, rows, residual.rows(from, to), before_last);
    });
  }

  /// The last layer and the norm, with only the batch's logits_rows behind its attention: from
  /// there on a row matters to no other.
  Tensor run_last(const Step& step, Tensor x, Tensor residual) const {
    const Layer& layer = layers_.back();
    const auto& attention = layer.self_attn();
    const KvCache cache = step.kv_cache[layers_.size() - 1];
    const Tensor& rows = step.batch.logits_rows;
    const auto take_rows = [&](const Tensor& like) {
      return step.arena.take(like.dtype, {rows.shape[0], like.shape[1]});
    };
    const Tensor y = take_rows(x), y_residual = take_rows(residual);
    {
      ArenaScope scope(step.arena);
      const Tensor qkv = attention.qkv_proj().take_output(step, x.dtype, x.shape[0]);
      attention.project(step, qkv, x, cache);
      if (rows.shape[0] == 0) return y;
      const Tensor all_heads = attention.attention().forward(step, qkv, cache),
                   heads = take_rows(all_heads);
      step.ops.gather_rows(heads, all_heads, rows);
      step.ops.gather_rows(y_residual, residual, rows);
      attention.o_proj().forward_add_norm(step, y, y_residual, heads,
                                          layer.post_attention_layernorm());
    }
    layer.mlp().forward(step, y, y_residual, norm_);
    return y;
  }

  int micro_batches_of(const Step& step) const {
    if (step.comm.world_size() > 1) return 1;
    if (stack_.experts_per_token > 0) return 1;  // not a few large products
    // Attention of small heads waits less for memory, and would rather have all SMs.
    if (stack_.head_dim <= 64 && step.micro_batches == 0) return 1;
    const int micro_batches = step.micro_batches > 0
                                  ? step.micro_batches
                                  : step.ops.micro_batches_for(size_of_decode(step));
    return step.batch.num_seqs() < micro_batches ? 1 : micro_batches;
  }

  DecodeSize size_of_decode(const Step& step) const {
    const Batch& batch = step.batch;
    double weights = 0, bytes_per_key = 0;
    for (const DecoderWeights& layer : stack_.layers) {
      for (const Weight& w : {layer.qkv, layer.o, layer.gate_up, layer.down})
        weights += static_cast<double>(w.n() * w.k() * std::max(16, w.format.bits())) / 8;
      bytes_per_key += static_cast<double>(2 * stack_.kv_heads * stack_.head_dim) *
                       static_cast<double>(size_of(step.kv_cache[0].k.dtype));
    }
    return {batch.num_seqs(), weights,
            static_cast<double>(batch.num_seqs() * batch.max_context_len) * bytes_per_key,
            stack_.layers.front().qkv.format};
  }

  std::vector<Layer> layers_;
  DecoderStack stack_;  // the same layers, as the backend's kernel for few rows wants them
  RmsNorm norm_;
};

}  // namespace nanovllm
