// The merge of attention's chunks, of the decoder layers' kernel.
#pragma once

#include "ops/cuda/decoder_layers.cuh"

namespace nanovllm::decoder {

/// Merges the chunks of the heads of one KV head in order: a thread has one element of a head, and
/// a lane asks for the base and sum of one chunk for its warp. The warps that had no part in the
/// chunk's output begin.
template <int kHeadDim>
__device__ __forceinline__ void merge_chunks(Worker<kHeadDim>& w, const Unit& unit) {
  constexpr int kAtOnce = 8, kInARun = 4;
  const Arguments& a = w.a;
  const int lane = this_thread() % kWarp;
  for (int i = (this_thread() + kThreads / 2) % kThreads; i < a.group * kHeadDim; i += kThreads) {
    const int head = unit.kv_head * a.group + i / kHeadDim, c = i % kHeadDim;
    const int64_t slot = (int64_t{unit.row} * a.heads + head) * a.max_chunks;
    const uint64_t *values = a.words + a.partial_at + slot * kHeadDim + c,
                   *sums = a.words + a.partial_sum_at + (slot + lane) * 2;
    float out = 0.0f, base = kMinusInfinity, sum = 0.0f;
    for (int first = 0; first < unit.chunks; first += kAtOnce) {
      // Past the last chunk: one without a visible key, which changes nothing.
      const int count = min(kAtOnce, unit.chunks - first);
      uint64_t value[kAtOnce] = {};
      WordPair total = {__float_as_uint(kMinusInfinity), 0};
      uint32_t missing = (1u << count) - 1 | (lane < count ? 1u << kAtOnce : 0);
      while (missing) {
        if (missing >> kAtOnce) total.read(sums + first * 2);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (missing >> j & 1) value[j] = read_word(values + (first + j) * kHeadDim);
        if (total.there(w.epoch)) missing &= (1u << kAtOnce) - 1;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (has(value[j], w.epoch)) missing &= ~(1u << j);
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (j == kInARun && count <= kInARun) break;
        const auto of_chunk = [&](uint64_t word) {
          return __uint_as_float(__shfl_sync(kFullMask, static_cast<uint32_t>(word), j));
        };
        const Merge merge(base, sum, of_chunk(total.first), of_chunk(total.second), a.scale_log2);
        out = merge(out, __uint_as_float(static_cast<uint32_t>(value[j])));
        base = merge.base;
        sum = merge.sum;
      }
    }
    const float mine = finish(out, sum), other = __shfl_down_sync(kFullMask, mine, 1);
    if (c % 2 == 0)
      w.send_all(a.words + a.heads_at + ((int64_t{unit.row} * a.heads + head) * kHeadDim + c) / 2,
                 pack_bf16(mine, other));
  }
}

}  // namespace nanovllm::decoder
