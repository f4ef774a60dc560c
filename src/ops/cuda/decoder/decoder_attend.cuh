// Attention of a layer, of the decoder layers' kernel: a block's units and merges.
#pragma once

#include "ops/cuda/decoder/decoder_attention.cuh"
#include "ops/cuda/decoder/decoder_merge.cuh"

namespace nanovllm::decoder {

/// The block's units, then the merges of those rows and heads whose first chunk it had: a block
/// waits for others only after it has given all that it owes. C: of the cache's elements.
template <class C, int kHeadDim>
__device__ __forceinline__ void attend(Worker<kHeadDim>& w) {
  const int count = w.shared.units.count;
  bool waits = blockIdx.x < w.a.cuts[kQkv].tiles && this_thread() >= kMultiplying * kWarp;
  Unit unit = w.shared.units.found[0];
  const auto get = [&](int i) { w.shared.units.get(unit, w.a, w.shared.context, w.layer, i); };
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (i > 0) get(i);
    const UnitWorker<kHeadDim, C> worker{{w, unit}};
    worker.run(i == 0 && blockIdx.x < w.a.cuts[kQkv].tiles, waits);
    waits = false;
    w.ring.advance(2 * unit.tiles());
  }
  if (waits) w.await_operand();
  if (count > 1) unit = w.shared.units.found[0];
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (i > 0) get(i);
    if (unit.chunks > 1 && unit.chunk == unit.first_chunk) merge_chunks(w, unit);
  }
}

}  // namespace nanovllm::decoder
