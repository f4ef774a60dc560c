#include "layers/embed_head.h"

#include <algorithm>

namespace nanovllm {
namespace {

Weight vocab_shard(WeightLoader& load, const std::string& name, int64_t vocab_size,
                   int64_t hidden_size) {
  const Shard& shard = load.shard();
  const int64_t rows = shard.share(vocab_size), first = shard.rank * rows;
  return load.matrix({{name,
                       {vocab_size, hidden_size},
                       std::min(first, vocab_size),
                       std::min(first + rows, vocab_size)}},
                     rows, hidden_size);
}

}  // namespace

VocabParallelEmbedding::VocabParallelEmbedding(WeightLoader& load, const std::string& name,
                                               int64_t vocab_size, int64_t hidden_size)
    : weight_(vocab_shard(load, name, vocab_size, hidden_size)),
      dtype_(load.dtype()),
      hidden_size_(hidden_size),
      first_row_(load.shard().rank * load.shard().share(vocab_size)) {}

Tensor VocabParallelEmbedding::forward(const Step& step, Tensor tokens) const {
  Tensor y = step.arena.take(dtype_, {tokens.shape[0], hidden_size_});
  step.ops.embedding(y, tokens, weight_, first_row_);
  step.comm.all_reduce(y);
  return y;
}

ParallelLMHead::ParallelLMHead(WeightLoader& load, const VocabParallelEmbedding& tied_to)
    : weight_(tied_to.weight_) {
  load.ignore("lm_head.weight", "model.embed_tokens.weight");
}

ParallelLMHead::ParallelLMHead(WeightLoader& load, const std::string& name, int64_t vocab_size,
                               int64_t hidden_size)
    : weight_(vocab_shard(load, name, vocab_size, hidden_size)) {}

void ParallelLMHead::forward(const Step& step, Tensor logits, Tensor hidden) const {
  if (step.comm.world_size() == 1) return step.ops.gemm(logits, hidden, weight_);
  ArenaScope scope(step.arena);
  step.comm.all_gather(logits, multiply(step, hidden));
}

void ParallelLMHead::sample(const Step& step, Tensor token_ids, Tensor logits, Tensor hidden,
                            const SamplingBatch& params) const {
  if (step.comm.world_size() == 1)
    return step.ops.gemm_sample(token_ids, logits, hidden, weight_, params);
  ArenaScope scope(step.arena);
  const Tensor parts = multiply(step, hidden);
  const bool is_masked = params.has(kSampleConstrained);
  if (!is_masked &&
      step.comm.fusions().sample(token_ids, parts[step.comm.rank()], logits.shape[1], params))
    return;
  step.comm.all_gather(logits, parts);
  if (is_masked) step.ops.apply_token_masks(logits, params.token_mask, params.token_masks);
  step.ops.sample(token_ids, logits, params);
}

Tensor ParallelLMHead::multiply(const Step& step, Tensor hidden) const {
  const Tensor parts =
      step.arena.take(DType::f32, {step.comm.world_size(), hidden.shape[0], weight_.n()});
  step.ops.gemm(parts[step.comm.rank()], hidden, weight_);
  return parts;
}

}  // namespace nanovllm
