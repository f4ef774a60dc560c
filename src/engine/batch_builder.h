// BatchBuilder: a Plan of the scheduler -> the arrays of one step, packed in one block of pinned
// memory so that one copy takes them to the device. Offsets depend on the step's sizes alone: steps
// of the same sizes have the same addresses, as graphs need.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "core/batch.h"
#include "core/limits.h"
#include "engine/scheduler/scheduler.h"
#include "layers/sampler.h"

namespace nanovllm {

/// The most that a step can hold. Fixed when the engine is made.
struct StepLimits {
  int64_t max_num_batched_tokens = 0;
  int64_t max_num_seqs = 0;
  int64_t max_model_len = 0;
  int64_t max_logits_rows = 0;  // per pass of the LM head
  int block_size = 0;
  int64_t rows_worth_halving = 0;  // from so many rows on a step has halves; 0: never
  int64_t token_mask_words = 0;    // of 32 tokens each

  int64_t max_blocks_per_seq() const { return (max_model_len + block_size - 1) / block_size; }
  /// Sequences that may sample in one step, padding included.
  int64_t max_samples() const { return std::min(max_num_seqs, max_num_batched_tokens); }
  /// Entries of SamplerInput::biases.
  int64_t max_biases() const {
    return max_samples() *
           (kMaxStopTokenIds + kMaxEosIds + int64_t{kMaxLogitBias} + 2 * int64_t{kMaxBadWords});
  }
  /// Bytes of the token masks where every sequence of a step has one.
  size_t token_mask_bytes() const {
    return static_cast<size_t>(max_samples() * token_mask_words) * sizeof(uint32_t);
  }
};

/// The sizes to which a step of decodes is padded, so that steps of many sizes run as few recorded
/// graphs; never beyond the limits. A padding row is a sequence without keys: it stores nothing and
/// its results are not read.
struct StepShape {
  int64_t num_seqs = 0;       // rows, and sequences
  int64_t max_blocks = 0;     // columns of the block tables
  int64_t num_biases = 0;     // entries of SamplerInput::biases
  int64_t num_logprobs = -1;  // of SamplerInput
  auto operator<=>(const StepShape&) const = default;
};

/// The shape for a plan in which every sequence has one row, which samples. Nothing for other
/// plans, and for more rows than are worth recording.
std::optional<StepShape> decode_shape(const Plan& plan, const StepLimits& limits);
/// The shape that follows `shape` when enough of a step's sequences have ended; nothing below one
/// row.
std::optional<StepShape> shape_below(const StepShape& shape);

/// A row of logits that only wants the log probability of the next prompt token.
struct PromptRow {
  size_t scheduled;  // index into Plan::sequences
  int64_t position;  // of the row; its target is the token at position + 1
};

/// One step's arrays, which lie in the block that build() was given; trivially copyable, so that
/// they can be sent to other processes as they are.
struct StepArrays {
  Batch batch;
  StepHalves halves;
  // [num_tokens] i32: the row of the step before that sampled this token, -1 where `batch.tokens`
  // has it.
  Tensor token_source;
  SamplerInput sampler;
  bool is_decode = false;       // padded to a StepShape: it can be recorded
  int64_t num_token_masks = 0;  // rows that have one
  size_t bytes = 0;             // of the block, from its start

  /// Rows of logits; with padding.
  int64_t num_samples() const { return sampler.params.temperature.shape[0]; }
  int64_t num_rows() const { return batch.logits_rows.shape[0]; }
  size_t token_mask_bytes(const StepLimits& limits) const {
    return static_cast<size_t>(num_token_masks * limits.token_mask_words) * sizeof(uint32_t);
  }
};

/// The shape to which a step was padded.
inline StepShape shape_of(const StepArrays& input) {
  return {input.batch.num_seqs(), input.batch.block_tables.shape[1], input.sampler.biases.shape[0],
          input.sampler.num_logprobs};
}

/// One step's input.
struct StepInput : StepArrays {
  std::vector<size_t> sampling;  // indices into Plan::sequences, in the order of their rows
  std::vector<PromptRow> prompt_rows;
};

class BatchBuilder {
 public:
  explicit BatchBuilder(const StepLimits& limits) : limits_(limits) {}

  /// Bytes of a block that any step fits into.
  size_t max_bytes() const;
  /// Packs `plan` into `block`, padded to `shape` if there is one. `input` is reused from step to
  /// step: no allocation once its vectors have grown. Plans are built in their order: a sequence's
  /// sample_row leads from one to the next.
  void build(const Plan& plan, std::byte* block, StepInput& input,
             const std::optional<StepShape>& shape = {}) const;

 private:
  void find_sampling(const Plan& plan, StepInput& input) const;
  void fill_batch(const Plan& plan, StepInput& input) const;
  void fill_rows(const Plan& plan, StepInput& input) const;
  void fill_logits_rows(const Plan& plan, StepInput& input) const;
  void fill_sampling(const Plan& plan, StepInput& input) const;
  void fill_biases(const Plan& plan, StepInput& input) const;

  StepLimits limits_;
};

/// Copies a step and the block it lies in.
void copy_step(const StepInput& from, const std::byte* from_block, StepInput& to,
               std::byte* to_block);

/// The same views on a copy of the block that starts at `to`.
void move_to(StepArrays& input, const std::byte* from, std::byte* to, Device device);

}  // namespace nanovllm
