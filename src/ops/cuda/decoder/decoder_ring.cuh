// The ring through which weights and keys stream into shared memory, of the decoder layers' kernel.
#pragma once

#include "ops/cuda/ptx/tma.cuh"

namespace nanovllm::decoder {

constexpr int kStageBytes = 16 * 1024;

/// One side's view of the ring: the stage that is next, and the parity of its barriers' phase.
struct Ring {
  struct Place {
    uint32_t stage, parity;
  };
  unsigned char* data;
  uint64_t *full, *empty;
  uint32_t stages;
  Place next = {0, 0};

  /// The place `ahead` (at most a whole round) after the next.
  __device__ Place place(uint32_t ahead = 0) const {
    const uint32_t at = next.stage + ahead;
    return at < stages ? Place{at, next.parity} : Place{at - stages, next.parity ^ 1};
  }
  __device__ void advance() {
    const bool around = ++next.stage == stages;
    next.stage = around ? 0 : next.stage;
    next.parity ^= around;
  }
  __device__ void advance(uint32_t count) {
    for (next.stage += count; next.stage >= stages; next.parity ^= 1) next.stage -= stages;
  }
  __device__ unsigned char* at(Place p) const { return data + p.stage * kStageBytes; }
  __device__ void wait_full(Place p) const { wait_barrier(&full[p.stage], p.parity); }
  __device__ void wait_empty(Place p) const { wait_barrier(&empty[p.stage], p.parity ^ 1); }
  /// Of the producer, before it asks for the next stage: at most so many are on their way then.
  /// What else goes through the L2 cache would queue behind them all.
  __device__ void pace(uint32_t most) const {
    if (most >= stages) return;
    const bool around = next.stage < most;
    wait_barrier(&full[around ? next.stage + stages - most : next.stage - most],
                 next.parity ^ around);
  }
  /// The producer's next place, when it is empty and fewer than `most` are on their way.
  __device__ Place claim(uint32_t most) {
    const Place place = next;
    pace(most);
    advance();
    wait_empty(place);
    return place;
  }
  /// A stage is empty after kWarps of these: `times` at once where fewer warps read it.
  __device__ void release(Place p, uint32_t times) const { arrive(&empty[p.stage], times); }
};

}  // namespace nanovllm::decoder
