#include "layers/experts.h"

namespace nanovllm {

Experts::Experts(WeightLoader& load, const std::string& prefix, int64_t hidden_size,
                 const MoeConfig& moe)
    : num_experts_(moe.num_experts),
      experts_per_token_(moe.num_experts_per_tok),
      inner_size_(load.shard().divide(moe.moe_intermediate_size, "moe_intermediate_size")),
      normalise_(moe.norm_topk_prob),
      router_(load.matrix({{prefix + ".gate.weight", {num_experts_, hidden_size}}}, num_experts_,
                          hidden_size)) {
  const int64_t total = moe.moe_intermediate_size, begin = load.shard().rank * inner_size_,
                end = begin + inner_size_;
  const auto name = [&](int64_t expert, const char* what) {
    return fmt::format("{}.experts.{}.{}.weight", prefix, expert, what);
  };
  gate_up_ = load.matrices(
      num_experts_,
      [&](int64_t i) -> std::vector<WeightPart> {
        return {{name(i, "gate_proj"), {total, hidden_size}, begin, end},
                {name(i, "up_proj"), {total, hidden_size}, begin, end}};
      },
      2 * inner_size_, hidden_size);
  down_ = load.matrices(
      num_experts_,
      [&](int64_t i) -> std::vector<WeightPart> {
        return {{name(i, "down_proj"), {hidden_size, total}, 0, -1, begin, end}};
      },
      hidden_size, inner_size_);
}

void Experts::forward(const Step& step, Tensor x) const {
  ArenaScope scope(step.arena);
  const int64_t tokens = x.shape[0], pairs = tokens * experts_per_token_;
  const Tensor logits = step.arena.take(DType::f32, {tokens, num_experts_});
  const Tensor weights = step.arena.take(DType::f32, {tokens, experts_per_token_});
  const Tensor ids = step.arena.take(DType::i32, {tokens, experts_per_token_});
  const MoeWorkspace work{step.arena.take(x.dtype, {pairs, inner_size_}),
                          step.arena.take(x.dtype, {pairs, x.shape[1]}),
                          step.arena.take(DType::i32, {moe_plan_size(pairs, num_experts_)})};
  // Padded to few sizes: a row that nobody reads needs no experts of its own.
  const Batch& batch = step.batch;
  const bool may_pad = batch.is_decode() && tokens == batch.num_tokens();
  step.ops.moe_router(weights, ids, logits, x, router_, normalise_,
                      may_pad ? batch.slot_mapping : Tensor{});
  step.ops.moe_mlp(x, x, weights, ids, gate_up_, down_, work);
}

void Experts::add_to(DecoderStack& stack) const {
  DecoderWeights& layer = stack.layers.back();
  layer.router = router_;
  layer.gate_up = gate_up_;
  layer.down = down_;
  stack.experts_per_token = experts_per_token_;
  stack.normalises_experts = normalise_;
}

}  // namespace nanovllm
