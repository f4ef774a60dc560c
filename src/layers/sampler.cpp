#include "layers/sampler.h"

#include <algorithm>

namespace nanovllm {
namespace {

/// Rows begin .. end of Batch::logits_rows; those before samples_end sample.
struct Chunk {
  int64_t begin, end, samples_end;
};

/// The rows of `hidden` that the chunk's logits are made of.
Tensor hidden_of(const Step& step, const Chunk& c, const HiddenStates& hidden,
                 bool wants_logprobs) {
  const Tensor& rows = step.batch.logits_rows;
  // All rows, where none is a prompt's, are in their order.
  const bool in_order = rows.shape[0] == step.batch.num_tokens() && !wants_logprobs;
  if (in_order || hidden.only_logits_rows) return hidden.states.rows(c.begin, c.end);
  const Tensor x = step.arena.take(hidden.states.dtype, {c.end - c.begin, hidden.states.shape[1]});
  step.ops.gather_rows(x, hidden.states, rows.rows(c.begin, c.end));
  return x;
}

void write_logprobs(const Step& step, const Chunk& c, Tensor logits, const SamplerInput& input,
                    const SamplerOutput& output) {
  const int64_t num_samples = output.token_ids.shape[0];
  const auto top = [&](int64_t from, int64_t to, Tensor chosen) {
    step.ops.top_logprobs(output.ids.rows(from, to), output.logprobs.rows(from, to),
                          output.ranks.rows(from, to), logits.rows(from - c.begin, to - c.begin),
                          chosen);
  };
  if (c.samples_end > c.begin)
    top(c.begin, c.samples_end, output.token_ids.rows(c.begin, c.samples_end));
  if (c.end > c.samples_end)
    top(c.samples_end, c.end,
        input.prompt_targets.rows(c.samples_end - num_samples, c.end - num_samples));
}

/// Changes the logits of rows that sample, in vLLM's order: docs/contract.md has it.
void adjust(const Step& step, const Chunk& c, Tensor logits, const SamplerInput& input) {
  const Tensor sampling = logits.rows(0, c.samples_end - c.begin);
  if (input.params.has(kSampleConstrained))
    step.ops.apply_token_masks(sampling, input.params.token_mask.rows(c.begin, c.samples_end),
                               input.params.token_masks);
  if (input.params.has(kSampleBiased))
    step.ops.bias_logits(sampling, input.biases, step.batch, c.begin);
  if (input.params.has(kSamplePenalised))
    step.ops.apply_penalties(sampling, input.params.rows(c.begin, c.samples_end), step.slot_tokens,
                             step.batch.block_tables);
}

}  // namespace

SamplerOutput take_output(Arena& arena, int64_t num_samples, int64_t num_rows,
                          int64_t num_logprobs) {
  SamplerOutput output;
  output.token_ids = arena.take(DType::i32, {num_samples});
  if (num_logprobs < 0) return output;
  output.ids = arena.take(DType::i32, {num_rows, num_logprobs + 1});
  output.logprobs = arena.take(DType::f32, {num_rows, num_logprobs + 1});
  output.ranks = arena.take(DType::i32, {num_rows});
  return output;
}

void Sampler::forward(const Step& step, const ParallelLMHead& lm_head, int64_t vocab_size,
                      HiddenStates hidden, const SamplerInput& input, const SamplerOutput& output,
                      int64_t max_rows) const {
  const int64_t num_rows = step.batch.logits_rows.shape[0], num_samples = output.token_ids.shape[0];
  const bool wants_logprobs = input.params.has(kSampleLogprobs),
             moves = input.params.has(kSampleBiased) || input.params.has(kSamplePenalised),
             adjusts = moves || input.params.has(kSampleConstrained);
  for (int64_t begin = 0; begin < num_rows; begin += max_rows) {
    const int64_t end = std::min(begin + max_rows, num_rows),
                  samples_end = std::clamp(num_samples, begin, end);
    ArenaScope scope(step.arena);
    const Tensor x = hidden_of(step, {begin, end, samples_end}, hidden, wants_logprobs);
    const bool only_samples = !moves && !wants_logprobs && samples_end == end;
    const Tensor logits = step.arena.take(DType::f32, {end - begin, vocab_size});
    if (only_samples) {
      lm_head.sample(step, output.token_ids.rows(begin, end), logits, x,
                     input.params.rows(begin, end));
      continue;
    }
    lm_head.forward(step, logits, x);
    if (samples_end > begin) {
      adjust(step, {begin, end, samples_end}, logits, input);
      step.ops.sample(output.token_ids.rows(begin, samples_end),
                      logits.rows(0, samples_end - begin), input.params.rows(begin, samples_end));
    }

    if (!wants_logprobs) continue;
    // Log probabilities are those of the raw logits; both together are rare.
    if (adjusts && samples_end > begin) lm_head.forward(step, logits, x);
    write_logprobs(step, {begin, end, samples_end}, logits, input, output);
  }
}

}  // namespace nanovllm
