// The decoder layers of a decode step in micro-batches: the sequences are divided, and each part
// goes through all layers on its own, so that the attention of one, which waits for memory, runs
// beside the products of another, which wait for each other. No sequence knows of the others: no
// bits change.
#pragma once

#include <functional>

#include "layers/step.h"

namespace nanovllm {

/// Sequences from .. to - 1 of a step in which each has one row; the rows that need logits are left
/// out.
inline Batch decode_rows(const Batch& batch, int64_t from, int64_t to) {
  Batch part = batch;
  for (Tensor* t :
       {&part.tokens, &part.positions, &part.slot_mapping, &part.context_lens, &part.block_tables})
    *t = t->rows(from, to);
  part.cu_seqlens_q = batch.cu_seqlens_q.rows(0, to - from + 1);  // 0, 1, 2, ... from any row on
  part.logits_rows = {};
  part.num_decodes = to - from;
  return part;
}

/// Calls layers(step, from, to) for each micro-batch: a step over the sequences from .. to - 1 of a
/// step in which each has one row. Memory that a micro-batch takes is not another's.
template <class Layers>
void run_in_micro_batches(const Step& step, int micro_batches, const Layers& layers) {
  ArenaScope scope(step.arena);
  const int64_t rows = step.batch.num_seqs();
  const auto micro_batch = [&](int i) {
    const int64_t from = rows * i / micro_batches, to = rows * (i + 1) / micro_batches;
    const Batch batch = decode_rows(step.batch, from, to);
    Arena arena = step.arena.rest();
    step.ops.begin_step(batch);
    layers(Step{step.ops, step.comm, arena, batch, step.kv_cache}, from, to);
    const auto words = static_cast<int64_t>(arena.peak() / sizeof(int32_t));
    (void)step.arena.take(DType::i32, {words});
  };
  step.ops.run_micro_batches(micro_batches, std::cref(micro_batch));
}

}  // namespace nanovllm
