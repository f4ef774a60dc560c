// Changes of logits before they are sampled: biases of single tokens, and penalties of tokens
// that the sequence has.
//
// Penalties count without a table of the vocabulary per sequence: each block has a range of one
// row's ids, counts them in shared memory as it walks the sequence's tokens, which lie on the
// device beside its keys, and changes the logits of those that it found. Counts are integers, so
// the order of the walk does not show.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/ptx/device.cuh"
#include "ops/penalties.h"

namespace nanovllm {
namespace {

constexpr float kMasked = -__builtin_huge_valf();

struct BiasArguments {
  float* logits;
  int64_t stride, rows, vocab;
  const int4* biases;  // row, id, the bits of the bias, the token that must come before or -1
  int64_t count;
  const int *tokens, *logits_rows;
  int first_row;
};

__global__ void bias_logits_kernel(const BiasArguments a) {
  wait_for_previous();
  let_next_start();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.count) return;
  const int4 entry = a.biases[i];
  const int row = entry.x - a.first_row, id = entry.y;
  if (row < 0 || row >= a.rows || id < 0 || id >= a.vocab) return;
  if (entry.w >= 0 && a.tokens[a.logits_rows[entry.x]] != entry.w) return;
  // A token has one bias, and may be masked beside it, by another thread. What is masked stays so.
  int* logit = reinterpret_cast<int*>(a.logits + row * a.stride + id);
  const float bias = __int_as_float(entry.z);
  for (int old = *logit;;) {
    const float sum = bias == kMasked ? bias : __int_as_float(old) + bias;
    const int found = atomicCAS(logit, old, __float_as_int(sum));
    if (found == old) return;
    old = found;
  }
}

constexpr int kPenaltyThreads = 512;
constexpr int kPenaltyIds = 12288;  // of a block: 48 KiB of counts

struct PenaltyArguments {
  float* logits;
  int64_t stride;
  int vocab, parts;  // parts: ranges of a row's ids
  const float *repetition, *frequency, *presence;
  const int *position, *num_prompt_tokens, *sequence;
  const int* slot_tokens;
  int block_size;
  const int* block_tables;
  int64_t table_stride;
};

__global__ void __launch_bounds__(kPenaltyThreads) penalties_kernel(const PenaltyArguments a) {
  // Of each id: 1 if the prompt has it, and 2 for each time that the answer has it.
  __shared__ unsigned seen[kPenaltyIds];
  wait_for_previous();
  let_next_start();
  const int index = static_cast<int>(blockIdx.x) / a.parts,
            first = static_cast<int>(blockIdx.x) % a.parts * kPenaltyIds;
  const Penalties penalties{a.repetition[index], a.frequency[index], a.presence[index]};
  if (penalties.none()) return;
  const auto count = static_cast<unsigned>(min(kPenaltyIds, a.vocab - first));
  for (unsigned i = threadIdx.x; i < count; i += kPenaltyThreads) seen[i] = 0;
  __syncthreads();
  const int* table = a.block_tables + a.sequence[index] * a.table_stride;
  const int length = a.position[index], prompt = a.num_prompt_tokens[index];
#pragma unroll 4
  for (int p = static_cast<int>(threadIdx.x); p < length; p += kPenaltyThreads) {
    const int token =
        a.slot_tokens[int64_t{table[p / a.block_size]} * a.block_size + p % a.block_size];
    // A row that failed has -1, which is in no range.
    const auto i = static_cast<unsigned>(token - first);
    if (token < 0 || i >= count) continue;
    if (p < prompt)
      atomicOr(&seen[i], 1u);
    else
      atomicAdd(&seen[i], 2u);
  }
  __syncthreads();
  float* row = a.logits + index * a.stride + first;
  for (unsigned i = threadIdx.x; i < count; i += kPenaltyThreads)
    if (seen[i] != 0) row[i] = penalties.apply(row[i], seen[i] / 2);
}

}  // namespace

void CudaBackend::bias_logits(Tensor logits, Tensor biases, const Batch& batch, int64_t first_row) {
  check(logits.rank == 2 && biases.rank == 2 && biases.shape[1] == 4 && biases.contiguous(),
        "bias_logits: {} of {}", biases.describe(), logits.describe());
  constexpr int64_t kThreads = 128;
  launch_early(bias_logits_kernel, grid_size(ceil_div(biases.shape[0], kThreads)), kThreads, 0,
               BiasArguments{.logits = logits.ptr<float>(),
                             .stride = logits.stride[0],
                             .rows = logits.shape[0],
                             .vocab = logits.shape[1],
                             .biases = reinterpret_cast<const int4*>(biases.data),
                             .count = biases.shape[0],
                             .tokens = batch.tokens.ptr<int32_t>(),
                             .logits_rows = batch.logits_rows.ptr<int32_t>(),
                             .first_row = static_cast<int>(first_row)});
}

void CudaBackend::apply_penalties(Tensor logits, const SamplingBatch& params, Tensor slot_tokens,
                                  Tensor block_tables) {
  const int64_t rows = logits.shape[0], vocab = logits.shape[1];
  check(logits.rank == 2 && params.position.numel() == rows && slot_tokens.rank == 2 &&
            slot_tokens.contiguous() && block_tables.rank == 2,
        "apply_penalties: {} by {} of {}", logits.describe(), slot_tokens.describe(),
        block_tables.describe());
  const int64_t parts = ceil_div(vocab, int64_t{kPenaltyIds});
  launch_early(penalties_kernel, grid_size(rows * parts), kPenaltyThreads, 0,
               PenaltyArguments{.logits = logits.ptr<float>(),
                                .stride = logits.stride[0],
                                .vocab = static_cast<int>(vocab),
                                .parts = static_cast<int>(parts),
                                .repetition = params.repetition_penalty.ptr<float>(),
                                .frequency = params.frequency_penalty.ptr<float>(),
                                .presence = params.presence_penalty.ptr<float>(),
                                .position = params.position.ptr<int32_t>(),
                                .num_prompt_tokens = params.num_prompt_tokens.ptr<int32_t>(),
                                .sequence = params.sequence.ptr<int32_t>(),
                                .slot_tokens = slot_tokens.ptr<int32_t>(),
                                .block_size = static_cast<int>(slot_tokens.shape[1]),
                                .block_tables = block_tables.ptr<int32_t>(),
                                .table_stride = block_tables.stride[0]});
}

}  // namespace nanovllm
