#include "engine/batch_builder.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/token_rules.h"

namespace nanovllm {
namespace {

/// Entries of SamplerInput::biases.
int64_t num_biases(const ScheduledSequence& s) {
  int64_t count = 0;
  for_each_bias(s, [&](int32_t, float, int32_t) { ++count; });
  return count;
}

int64_t up_to_power(int64_t n) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n)));
}

/// One row, after keys that are in the cache already.
bool is_decode(const ScheduledSequence& s) { return s.num_tokens == 1 && !s.is_new; }

/// Where padding costs little: every row that is computed in vain still has its logits sampled.
int64_t padded_rows(int64_t rows) {
  const auto up_to_multiple = [rows](int64_t of) { return (rows + of - 1) / of * of; };
  if (rows <= 8) return up_to_power(rows);
  return up_to_multiple(rows <= 64 ? 8 : rows <= 256 ? 16 : 32);
}

/// Where a step of so many rows is cut in two: about in the middle, at a tile of large products.
int64_t middle_of(int64_t rows) {
  const int64_t tile = std::clamp<int64_t>(rows / 2, 1, 128);
  return (rows / 2 + tile - 1) / tile * tile;
}

/// The halves of a step of these sequences, and whether they cut one of them in two.
std::pair<StepHalves, bool> halves_of(const Plan& plan) {
  StepHalves halves{.rows = middle_of(plan.num_tokens)};
  int64_t row = 0;
  for (const ScheduledSequence& s : plan.sequences) {
    if (row >= halves.rows) break;
    row += s.num_tokens;
    ++halves.seqs;
  }
  return {halves, row > halves.rows};
}

/// The batch's sequence that has the first rows of the plan's i-th sequence; that before the next
/// one's has its last row. Where the batch has one more than the plan, the halves cut one in two.
int64_t first_part(const Plan& plan, const StepInput& input, size_t i) {
  const bool cut = input.halves.rows > 0 && std::ssize(plan.sequences) < input.batch.num_seqs();
  const auto s = static_cast<int64_t>(i);
  return cut && s >= input.halves.seqs ? s + 1 : s;
}

/// How long a step's arrays are.
struct StepSizes {
  int64_t tokens = 0, seqs = 0, blocks = 0;  // rows and columns of the block tables
  int64_t samples = 0, prompt_rows = 0;      // rows of logits
  int64_t biases = 0;
};

void take_arrays(Arena& arena, const StepSizes& n, StepArrays& out) {
  out.batch.tokens = arena.take(DType::i32, {n.tokens});
  out.token_source = arena.take(DType::i32, {n.tokens});
  out.batch.positions = arena.take(DType::i32, {n.tokens});
  out.batch.slot_mapping = arena.take(DType::i32, {n.tokens});
  out.batch.cu_seqlens_q = arena.take(DType::i32, {n.seqs + 1});
  out.batch.context_lens = arena.take(DType::i32, {n.seqs});
  out.batch.block_tables = arena.take(DType::i32, {n.seqs, n.blocks});
  out.batch.logits_rows = arena.take(DType::i32, {n.samples + n.prompt_rows});
  for (const auto& [tensor, dtype] : out.sampler.params.tensors())
    *tensor = arena.take(dtype, {n.samples});
  out.sampler.prompt_targets = arena.take(DType::i32, {n.prompt_rows});
  out.sampler.biases = arena.take(DType::i32, {n.biases, 4});
}

}  // namespace

std::optional<StepShape> decode_shape(const Plan& plan, const StepLimits& limits) {
  constexpr int64_t kMostRows = 512;
  const auto rows = static_cast<int64_t>(plan.sequences.size());
  if (rows == 0 || rows > kMostRows) return std::nullopt;
  StepShape shape{.num_seqs = std::min(padded_rows(rows), limits.max_samples()), .max_blocks = 1};
  for (const ScheduledSequence& s : plan.sequences) {
    if (!is_decode(s) || !s.samples) return std::nullopt;
    shape.max_blocks = std::max(shape.max_blocks, std::ssize(s.sequence->block_table));
    shape.num_biases += num_biases(s);
    shape.num_logprobs =
        std::max<int64_t>(shape.num_logprobs, s.sequence->params.logprobs.value_or(-1));
  }
  shape.max_blocks = std::min(up_to_power(shape.max_blocks), limits.max_blocks_per_seq());
  // Few shapes while sequences pass their min_tokens one by one.
  if (shape.num_biases > 0)
    shape.num_biases =
        std::min(up_to_power(std::max(shape.num_biases, 2 * shape.num_seqs)), limits.max_biases());
  return shape;
}

std::optional<StepShape> shape_below(const StepShape& shape) {
  StepShape below = shape;
  do --below.num_seqs;
  while (below.num_seqs > 0 && padded_rows(below.num_seqs) > below.num_seqs);
  if (below.num_seqs <= 0) return std::nullopt;
  return below;
}

size_t BatchBuilder::max_bytes() const {
  Arena arena = Arena::measuring({});
  StepInput largest;
  const int64_t samples = limits_.max_samples(), rows = limits_.max_num_batched_tokens;
  take_arrays(arena,
              {.tokens = rows,
               .seqs = samples + 1,  // halves may cut one in two
               .blocks = limits_.max_blocks_per_seq(),
               .samples = samples,
               .prompt_rows = rows,
               .biases = limits_.max_biases()},
              largest);
  return arena.peak();
}

void BatchBuilder::build(const Plan& plan, std::byte* block, StepInput& input,
                         const std::optional<StepShape>& shape) const {
  input.is_decode = shape.has_value();
  find_sampling(plan, input);
  StepSizes sizes{.tokens = plan.num_tokens, .seqs = std::ssize(plan.sequences)};
  input.halves = {};
  if (!shape && limits_.rows_worth_halving > 0 && sizes.tokens >= limits_.rows_worth_halving) {
    const auto [halves, cut] = halves_of(plan);
    input.halves = halves;
    sizes.seqs += cut ? 1 : 0;
  }
  for (const ScheduledSequence& s : plan.sequences)
    sizes.blocks = std::max(sizes.blocks, std::ssize(s.sequence->block_table));
  sizes.samples = std::ssize(input.sampling);
  sizes.prompt_rows = std::ssize(input.prompt_rows);
  for (const ScheduledSequence& s : plan.sequences) sizes.biases += num_biases(s);
  if (shape) {
    sizes.tokens = sizes.seqs = sizes.samples = shape->num_seqs;
    sizes.blocks = shape->max_blocks;
    sizes.biases = shape->num_biases;
    input.sampler.num_logprobs = shape->num_logprobs;
  }
  Arena arena(block, max_bytes(), {});
  take_arrays(arena, sizes, input);
  input.bytes = arena.mark();
  fill_batch(plan, input);
  fill_rows(plan, input);
  fill_logits_rows(plan, input);
  fill_sampling(plan, input);
  fill_biases(plan, input);
}

// Finds the sequences that sample, and the rows of prompts that need logits.
void BatchBuilder::find_sampling(const Plan& plan, StepInput& input) const {
  input.sampling.clear();
  input.prompt_rows.clear();
  int64_t k = -1;
  for (size_t i = 0; i < plan.sequences.size(); ++i) {
    const ScheduledSequence& s = plan.sequences[i];
    const SamplingParams& params = s.sequence->params;
    if (s.samples) input.sampling.push_back(i);
    if (s.samples && params.logprobs) k = std::max<int64_t>(k, *params.logprobs);
    if (!params.prompt_logprobs) continue;
    const int64_t end = std::min(s.start + s.num_tokens, s.sequence->num_prompt_tokens - 1);
    for (int64_t p = s.start; p < end; ++p) input.prompt_rows.push_back({i, p});
    if (s.start < end) k = std::max<int64_t>(k, *params.prompt_logprobs);
  }
  input.sampler.num_logprobs = k;
}

// Fills the lengths over all sequences that bound kernels' grids.
void BatchBuilder::fill_batch(const Plan& plan, StepInput& input) const {
  Batch& batch = input.batch;
  batch.max_seqlen_q = batch.max_context_len = 0;
  for (const ScheduledSequence& s : plan.sequences) {
    batch.max_seqlen_q = std::max(batch.max_seqlen_q, s.num_tokens);
    batch.max_context_len = std::max(batch.max_context_len, s.start + s.num_tokens);
  }
  batch.num_decodes = std::ranges::find_if_not(plan.sequences, is_decode) - plan.sequences.begin();
  if (!input.is_decode) return;
  batch.max_seqlen_q = 1;
  batch.max_context_len =
      std::min(limits_.max_model_len, batch.block_tables.shape[1] * limits_.block_size);
  batch.num_decodes = batch.num_seqs();
}

void BatchBuilder::fill_rows(const Plan& plan, StepInput& input) const {
  Batch& batch = input.batch;
  const int64_t max_blocks = batch.block_tables.shape[1];
  auto* token = batch.tokens.ptr<int32_t>();
  auto* source = input.token_source.ptr<int32_t>();
  auto* position = batch.positions.ptr<int32_t>();
  auto* slot = batch.slot_mapping.ptr<int32_t>();
  auto* start = batch.cu_seqlens_q.ptr<int32_t>();
  auto* context = batch.context_lens.ptr<int32_t>();
  auto* table = batch.block_tables.ptr<int32_t>();
  *start++ = 0;
  for (const ScheduledSequence& s : plan.sequences) {
    const Sequence& seq = *s.sequence;
    for (int64_t p = s.start; p < s.start + s.num_tokens; ++p) {
      *token++ = s.input_on_device ? 0 : seq.token_ids[static_cast<size_t>(p)];
      *source++ = s.input_on_device ? seq.sample_row : -1;
      *position++ = static_cast<int32_t>(p);
      *slot++ = seq.block_table[static_cast<size_t>(p / limits_.block_size)] * limits_.block_size +
                static_cast<int32_t>(p % limits_.block_size);
    }
    const auto add_rows = [&](int64_t rows, int64_t keys) {
      *start = start[-1] + static_cast<int32_t>(rows);
      ++start;
      *context++ = static_cast<int32_t>(keys);
      std::fill(std::copy(seq.block_table.begin(), seq.block_table.end(), table),
                table + max_blocks, 0);
      table += max_blocks;
    };
    const int64_t in_first_half = input.halves.rows - start[-1], end = s.start + s.num_tokens;
    const bool is_cut = in_first_half > 0 && in_first_half < s.num_tokens;
    if (is_cut) add_rows(in_first_half, s.start + in_first_half);
    add_rows(is_cut ? s.num_tokens - in_first_half : s.num_tokens, end);
  }
  if (!input.is_decode) return;
  for (auto i = static_cast<int64_t>(plan.sequences.size()); i < batch.num_seqs(); ++i) {
    *token++ = *position++ = *context++ = 0;
    *source++ = *slot++ = -1;
    *start = start[-1] + 1;
    ++start;
    table = std::fill_n(table, max_blocks, 0);
  }
}

void BatchBuilder::fill_sampling(const Plan& plan, StepInput& input) const {
  SamplingBatch& out = input.sampler.params;
  out.features = 0;
  input.num_token_masks = 0;
  int64_t row = 0;
  for (const size_t i : input.sampling) {
    const ScheduledSequence& s = plan.sequences[i];
    out.set_row(row, s.sequence->params,
                {.seed = s.sequence->seed,
                 .position = s.start + s.num_tokens,
                 .num_prompt_tokens = s.sequence->num_prompt_tokens,
                 .sequence = first_part(plan, input, i + 1) - 1});
    if (s.sequence->has_token_mask())
      out.token_mask.ptr<int32_t>()[row] = static_cast<int32_t>(input.num_token_masks++);
    ++row;
  }
  SamplingParams padding;
  padding.temperature = 0;
  while (row < input.num_samples()) out.set_row(row++, padding, {});
  if (input.sampler.num_logprobs >= 0) out.features |= kSampleLogprobs;
  if (input.sampler.biases.shape[0] > 0) out.features |= kSampleBiased;
  if (input.num_token_masks > 0) out.features |= kSampleConstrained;
}

// The rows of logits: those that sample, those of padding, those of prompts.
void BatchBuilder::fill_logits_rows(const Plan& plan, StepInput& input) const {
  const auto* start = input.batch.cu_seqlens_q.ptr<int32_t>();
  auto* row = input.batch.logits_rows.ptr<int32_t>();
  for (size_t i = 0; i < input.sampling.size(); ++i) {
    plan.sequences[input.sampling[i]].sequence->sample_row = static_cast<int32_t>(i);
    *row++ = start[first_part(plan, input, input.sampling[i] + 1)] - 1;
  }
  for (auto i = static_cast<int64_t>(input.sampling.size()); i < input.num_samples(); ++i)
    *row++ = static_cast<int32_t>(i);
  auto* target = input.sampler.prompt_targets.ptr<int32_t>();
  for (const PromptRow& r : input.prompt_rows) {
    const ScheduledSequence& s = plan.sequences[r.scheduled];
    *row++ =
        start[first_part(plan, input, r.scheduled)] + static_cast<int32_t>(r.position - s.start);
    *target++ = s.sequence->token_ids[static_cast<size_t>(r.position) + 1];
  }
}

void BatchBuilder::fill_biases(const Plan& plan, StepInput& input) const {
  auto* entry = input.sampler.biases.ptr<int32_t>();
  int32_t* const end = entry + input.sampler.biases.numel();
  for (size_t row = 0; row < input.sampling.size(); ++row)
    for_each_bias(plan.sequences[input.sampling[row]], [&](int32_t id, float bias, int32_t after) {
      *entry++ = static_cast<int32_t>(row);
      *entry++ = id;
      *entry++ = std::bit_cast<int32_t>(bias);
      *entry++ = after;
    });
  std::fill(entry, end, -1);
}

void copy_step(const StepInput& from, const std::byte* from_block, StepInput& to,
               std::byte* to_block) {
  std::memcpy(to_block, from_block, from.bytes);
  to = from;
  move_to(to, from_block, to_block, {});
}

void move_to(StepArrays& input, const std::byte* from, std::byte* to, Device device) {
  const auto move = [&](Tensor& t) {
    t.data = to + (t.data - from);
    t.device = device;
  };
  Batch& b = input.batch;
  for (Tensor* t : {&b.tokens, &input.token_source, &b.positions, &b.slot_mapping, &b.cu_seqlens_q,
                    &b.context_lens, &b.block_tables, &b.logits_rows, &input.sampler.prompt_targets,
                    &input.sampler.biases})
    move(*t);
  for (const auto& column : input.sampler.params.tensors()) move(*column.tensor);
}

}  // namespace nanovllm
