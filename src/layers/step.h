// Step: everything a layer may touch while it runs. Passed down explicitly; there is no other
// context.
#pragma once

#include <span>

#include "comm/communicator.h"
#include "core/arena.h"
#include "core/batch.h"
#include "ops/backend.h"

namespace nanovllm {

/// Where a step is cut in two, unless rows is 0: the first `rows` rows are those of the batch's
/// first `seqs` sequences. A sequence with rows in both halves is two in the batch: the keys of the
/// first end where its rows do, and those of the second are all of them.
struct StepHalves {
  int64_t rows = 0, seqs = 0;
};

struct Step {
  Backend& ops;
  Communicator& comm;
  Arena& arena;
  const Batch& batch;
  std::span<const KvCache> kv_cache;  // one per layer; this rank's heads
  int micro_batches = 1;              // of a decode step; 0: what the backend advises
  StepHalves halves = {};
  // i32 [blocks, block_size]: the token that each slot of the KV cache belongs to. So the tokens of
  // a sequence lie on the device wherever its keys do, however they came there.
  Tensor slot_tokens = {};
};

/// A model's output for a step: one row per token, or only the batch's logits_rows, in their
/// order.
struct HiddenStates {
  Tensor states;  // [rows, hidden]
  bool only_logits_rows = false;
};

}  // namespace nanovllm
