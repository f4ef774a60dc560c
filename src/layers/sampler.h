// Sampler: logits -> token ids, with the log probabilities that were asked for.
#pragma once

#include "layers/embed_head.h"
#include "layers/step.h"

namespace nanovllm {

/// A step's sampling, on the device. The first token_ids.shape[0] of Batch::logits_rows sample
/// a token; the rows after them are prompt positions whose next token is known (`prompt_targets`)
/// and only want log probabilities.
struct SamplerInput {
  SamplingBatch params;   // of the rows that sample
  Tensor prompt_targets;  // i32 [rows that do not sample]
  // i32 [n, 4], as Backend::bias_logits() takes them: logit_bias, and tokens that may not be
  // sampled (min_tokens); a row of -1 is padding.
  Tensor biases;
  int64_t num_logprobs = -1;  // k of top_logprobs, the largest asked for; -1: none wanted
};

/// Where the results go, on the device.
struct SamplerOutput {
  Tensor token_ids;  // i32 [rows that sample]
  // For all rows, if wanted: i32 [rows, 1 + k], f32 [rows, 1 + k], i32 [rows].
  Tensor ids, logprobs, ranks;
};

/// Room for a step's results, the sampled tokens first; for log probabilities only where
/// num_logprobs >= 0.
SamplerOutput take_output(Arena& arena, int64_t num_samples, int64_t num_rows,
                          int64_t num_logprobs);

/// Has no state: the head and its weights are given.
class Sampler {
 public:
  /// Computes logits for the batch's logits_rows, max_rows at a time, and samples them. `hidden` is
  /// the result of Model::forward().
  void forward(const Step& step, const ParallelLMHead& lm_head, int64_t vocab_size,
               HiddenStates hidden, const SamplerInput& input, const SamplerOutput& output,
               int64_t max_rows) const;
};

}  // namespace nanovllm
