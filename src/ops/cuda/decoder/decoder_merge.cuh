// The merge of attention's chunks, of the decoder layers' kernel.
#pragma once

#include "ops/cuda/decoder/decoder_layers.cuh"

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
    uint64_t* outlet =
        a.words + a.heads_at + ((int64_t{unit.row} * a.heads + head) * kHeadDim + c) / 2;
    find_now(outlet);
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
      const auto float_of = [](uint64_t word) {
        return __uint_as_float(static_cast<uint32_t>(word));
      };
      // A lane finds the factors of its chunk (attention.cuh's Merge), from the bases before it.
      float after = fmaxf(base, float_of(total.first));
#pragma unroll
      for (int offset = 1; offset < kAtOnce; offset *= 2)
        after = fmaxf(after, __shfl_up_sync(kFullMask, after, offset));
      const float up = __shfl_up_sync(kFullMask, after, 1), before = lane == 0 ? base : up,
                  common = finite_or_zero(after),
                  old_factor = rescaling(before, common, a.scale_log2),
                  new_factor = rescaling(float_of(total.first), common, a.scale_log2);
      base = __shfl_sync(kFullMask, after, kAtOnce - 1);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (j >= kInARun && j % 2 == 0 && count <= j) break;
        const auto of_chunk = [&](float x) { return __shfl_sync(kFullMask, x, j); };
        const float old = of_chunk(old_factor), fresh = of_chunk(new_factor);
        sum = __fmaf_rn(of_chunk(float_of(total.second)), fresh, __fmul_rn(sum, old));
        out = __fmaf_rn(float_of(value[j]), fresh, __fmul_rn(out, old));
      }
    }
    const float mine = finish(out, sum), other = __shfl_down_sync(kFullMask, mine, 1);
    if (c % 2 == 0) w.send_all(outlet, pack_bf16(mine, other));
  }
}

}  // namespace nanovllm::decoder
