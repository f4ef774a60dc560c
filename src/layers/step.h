// Step: everything a layer may touch while it runs. Passed down explicitly; there is no other
// context.
#pragma once

#include <span>

#include "comm/communicator.h"
#include "core/arena.h"
#include "core/batch.h"
#include "ops/backend.h"

namespace nanovllm {

struct Step {
  Backend& ops;
  Communicator& comm;
  Arena& arena;
  const Batch& batch;
  std::span<const KvCache> kv_cache;  // one per layer; this rank's heads
  int lanes = 1;                      // of a decode step; 0: what the backend advises
};

}  // namespace nanovllm
