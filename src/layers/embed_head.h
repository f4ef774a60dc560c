// VocabParallelEmbedding and ParallelLMHead: the two ends of the model, each rank holding a range
// of the vocabulary. Where the ranks do not divide it, the last ones' matrices end in rows of
// zeros, which no token selects and whose logits are left out of the gathered ones.
#pragma once

#include <string>

#include "layers/step.h"
#include "weights/weight_loader.h"

namespace nanovllm {

class VocabParallelEmbedding {
 public:
  VocabParallelEmbedding(WeightLoader& load, const std::string& name, int64_t vocab_size,
                         int64_t hidden_size);
  /// [t] token ids -> [t, hidden], summed over the ranks: each token's row is on one of them.
  Tensor forward(const Step& step, Tensor tokens) const;

 protected:
  friend class ParallelLMHead;
  Weight weight_;  // [ceil(vocab / world), hidden]; the tied head is the same bytes
  DType dtype_;    // of its result
  int64_t hidden_size_, first_row_;
};

class ParallelLMHead {
 public:
  /// Tied: the embedding's own matrix.
  ParallelLMHead(WeightLoader& load, const VocabParallelEmbedding& tied_to);
  ParallelLMHead(WeightLoader& load, const std::string& name, int64_t vocab_size,
                 int64_t hidden_size);
  /// logits f32 [rows, vocab] of the hidden rows [rows, hidden]; gathered, on every rank.
  void forward(const Step& step, Tensor logits, Tensor hidden) const;
  /// token_ids = Backend::sample() of forward()'s result, on every rank. `logits`, as
  /// forward()'s, is room for it; its contents afterwards are undefined.
  void sample(const Step& step, Tensor token_ids, Tensor logits, Tensor hidden,
              const SamplingBatch& params) const;

 private:
  /// This rank's columns of the logits, in step.arena: parts[rank] of the result
  /// f32 [world, rows, ceil(vocab / world)], of which padding is beyond the logits' width.
  Tensor multiply(const Step& step, Tensor hidden) const;

  Weight weight_;
};

}  // namespace nanovllm
