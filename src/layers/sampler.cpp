#include "layers/sampler.h"

#include <algorithm>

namespace nanovllm {
namespace {

SamplingBatch rows_of(const SamplingBatch& params, int64_t begin, int64_t end) {
  SamplingBatch rows = params;
  for (Tensor* t :
       {&rows.temperature, &rows.top_k, &rows.top_p, &rows.min_p, &rows.seed, &rows.position})
    *t = t->rows(begin, end);
  return rows;
}

}  // namespace

void Sampler::forward(const Step& step, const ParallelLMHead& lm_head, int64_t vocab_size,
                      Tensor hidden, const SamplerInput& input, const SamplerOutput& output,
                      int64_t max_rows) const {
  const Tensor& rows = step.batch.logits_rows;
  const int64_t num_rows = rows.shape[0], num_samples = output.token_ids.shape[0];
  for (int64_t begin = 0, chunk = 0; begin < num_rows; begin += max_rows, ++chunk) {
    const int64_t end = std::min(begin + max_rows, num_rows);
    const int64_t samples_end =
        std::clamp(num_samples, begin, end);  // rows begin .. samples_end sample
    ArenaScope scope(step.arena);
    Tensor x;
    // All rows, where none is a prompt's, are in their order.
    const bool in_order = num_rows == step.batch.num_tokens() && input.num_logprobs < 0;
    if (in_order || hidden.shape[0] < step.batch.num_tokens()) {
      x = hidden.rows(begin, end);
    } else {
      x = step.arena.take(hidden.dtype, {end - begin, hidden.shape[1]});
      step.ops.gather_rows(x, hidden, rows.rows(begin, end));
    }
    const auto c = static_cast<size_t>(chunk);
    const bool masked =
        !input.mask_starts.empty() && input.mask_starts[c] < input.mask_starts[c + 1];
    const bool only_samples = !masked && input.num_logprobs < 0 && samples_end == end;
    if (only_samples && lm_head.sample(step, output.token_ids.rows(begin, end), x,
                                       rows_of(input.params, begin, end)))
      continue;
    const Tensor logits = step.arena.take(DType::f32, {end - begin, vocab_size});
    if (step.comm.world_size() > 1 && only_samples) {
      const Tensor parts = lm_head.multiply(step, x);
      if (step.comm.sample(output.token_ids.rows(begin, end), parts[step.comm.rank()], vocab_size,
                           rows_of(input.params, begin, end)))
        continue;
      lm_head.gather(step, logits, parts);
    } else {
      lm_head.forward(step, logits, x);
    }

    if (masked)
      step.ops.mask_logits(logits,
                           input.masked.rows(input.mask_starts[c], input.mask_starts[c + 1]));
    if (samples_end > begin)
      step.ops.sample(output.token_ids.rows(begin, samples_end),
                      logits.rows(0, samples_end - begin),
                      rows_of(input.params, begin, samples_end));

    if (input.num_logprobs < 0) continue;
    if (masked)
      lm_head.forward(step, logits,
                      x);  // log probabilities are those of the raw logits; masks are rare
    const auto top = [&](int64_t from, int64_t to, Tensor chosen) {
      if (from < to)
        step.ops.top_logprobs(output.ids.rows(from, to), output.logprobs.rows(from, to),
                              output.ranks.rows(from, to), logits.rows(from - begin, to - begin),
                              chosen);
    };
    if (samples_end > begin) top(begin, samples_end, output.token_ids.rows(begin, samples_end));
    if (end > samples_end)
      top(samples_end, end,
          input.prompt_targets.rows(samples_end - num_samples, end - num_samples));
  }
}

}  // namespace nanovllm
