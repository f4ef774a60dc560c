// Qwen3-MoE: Qwen3 with a mixture of experts in the layers that decoder_sparse_step and
// mlp_only_layers leave to it, a dense MLP in the others.
#pragma once

#include "layers/experts.h"
#include "models/qwen3.h"

namespace nanovllm {

class Qwen3MoeMLP {
 public:
  Qwen3MoeMLP(const ModelConfig& c, const ModelContext& context, const std::string& prefix,
              int64_t layer) {
    if (c.moe && c.moe->is_sparse(layer))
      experts_.emplace(context.load, prefix, c.hidden_size, *c.moe);
    else
      dense_.emplace(c, context, prefix, layer);
  }

  /// As GatedMLP's.
  void forward(const Step& step, Tensor x, Tensor residual, const RmsNorm& norm) const {
    if (dense_) return dense_->forward(step, x, residual, norm);
    experts_->forward(step, x);
    norm.add_forward(step, x, residual);
  }
  void forward(const Step& step, Tensor x) const {
    if (experts_)
      experts_->forward(step, x);
    else
      dense_->forward(step, x);
  }

  void add_to(DecoderStack& stack) const {
    if (experts_)
      experts_->add_to(stack);
    else
      dense_->add_to(stack);
  }

 private:
  std::optional<Experts> experts_;  // one of the two
  std::optional<GatedMLP> dense_;
};

using Qwen3MoeForCausalLM = DecoderForCausalLM<Qwen3Attention, Qwen3MoeMLP>;

}  // namespace nanovllm
