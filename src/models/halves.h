// A step in halves, of several ranks: while the sums over the ranks of one half travel, the other
// is multiplied (RmsNorm::start_add_forward). BatchBuilder decides where it is cut (Step::halves).
#pragma once

#include <algorithm>

#include "layers/step.h"

namespace nanovllm {

/// The two halves of `step`.
struct Halves {
  const Step& step;

  /// body(half, from, to) for the rows from .. to - 1 of each.
  template <class Body>
  void each(const Body& body) const {
    body(0, int64_t{0}, step.halves.rows);
    body(1, step.halves.rows, step.batch.num_tokens());
  }
  /// The sequences of a half, for attention: their rows are still counted in the whole batch.
  Batch sequences(int half) const {
    const Batch& batch = step.batch;
    const int64_t from = half == 0 ? 0 : step.halves.seqs,
                  to = half == 0 ? step.halves.seqs : batch.num_seqs();
    Batch part = batch;
    part.cu_seqlens_q = batch.cu_seqlens_q.rows(from, to + 1);
    part.context_lens = batch.context_lens.rows(from, to);
    part.block_tables = batch.block_tables.rows(from, to);
    part.num_decodes = std::clamp<int64_t>(batch.num_decodes - from, 0, to - from);
    return part;
  }
  /// body(from, to) for the rows of a half, at once or in two parts. The other half's sums need a
  /// little of the device, and get none while one product has all of it: of many rows, two shorter
  /// products let them in between.
  template <class Body>
  void in_turns(int64_t from, int64_t to, const Body& body) const {
    const int64_t at_once = 2048 * step.comm.world_size(),
                  middle = to - from <= at_once ? to : from + (to - from) / 2;
    body(from, middle);
    if (middle < to) body(middle, to);
  }
};

/// The tokens from .. to - 1, for operations that use only a token's position and slot.
inline Batch tokens_of(const Batch& batch, int64_t from, int64_t to) {
  Batch part = batch;
  for (Tensor* t : {&part.tokens, &part.positions, &part.slot_mapping}) *t = t->rows(from, to);
  return part;
}

}  // namespace nanovllm
