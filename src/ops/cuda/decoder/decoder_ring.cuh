// The ring through which weights and keys stream into shared memory, of the decoder layers' kernel.
#pragma once

#include "ops/cuda/ptx/tma.cuh"

namespace nanovllm::decoder {

constexpr int kStageBytes = 16 * 1024;

/// One side's view of the ring: the place that is next.
struct Ring : StageRing {
  int stages;
  RingCursor next;

  /// The place `ahead` (at most a whole round) after the next.
  __device__ RingCursor place(int ahead = 0) const { return next.ahead(ahead, stages); }
  __device__ void advance() { next.next(stages); }
  __device__ void advance(int count) { next = next.plus(count, stages); }
  __device__ unsigned char* at(RingCursor p) const { return data + p.stage * kStageBytes; }
  __device__ void wait_full(RingCursor p) const { wait_barrier(&full[p.stage], p.parity); }
  __device__ void wait_empty(RingCursor p) const { wait_barrier(&empty[p.stage], p.parity ^ 1); }
  /// Of the producer, before it asks for the next stage: at most so many are on their way then.
  /// Other traffic of the L2 cache would queue behind them all.
  __device__ void pace(int most) const {
    if (most >= stages) return;
    const bool around = next.stage < most;
    wait_barrier(&full[around ? next.stage + stages - most : next.stage - most],
                 next.parity ^ around);
  }
  /// The producer's next place, when it is empty and fewer than `most` are on their way.
  __device__ RingCursor claim(int most) {
    const RingCursor place = next;
    pace(most);
    advance();
    wait_empty(place);
    return place;
  }
  /// A stage is empty after kWarps of these: `times` at once where fewer warps read it.
  __device__ void release(RingCursor p, uint32_t times) const { arrive(&empty[p.stage], times); }
};

}  // namespace nanovllm::decoder
