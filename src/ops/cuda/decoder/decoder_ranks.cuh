// Sums over ranks in the decoder layers' kernel. Where o and down give one rank's part of a sum,
// every rank sends its part to all ranks, in words as blocks exchange them; who needs the sum adds
// up the parts, in the order of the ranks. Their places alternate from layer to layer: to write a
// place again a rank needs what all others have made of the layer between, and for that they have
// read it.
#pragma once

#include "ops/cuda/comm/peer_exchange.cuh"
#include "ops/cuda/decoder/decoder_layers.cuh"

namespace nanovllm::decoder {

__device__ inline uint64_t* part_at(const Arguments& a, int at, int product, int from,
                                    uint32_t epoch) {
  const int64_t place = (static_cast<int64_t>(epoch & 1) * 2 + (product == kDown)) * a.world + from;
  return a.parts[at] + place * a.part_words;
}

/// A pair of this rank's part of o or down, to all ranks.
__device__ inline void send_to_ranks(const Arguments& a, int product, int64_t at, uint32_t pair,
                                     uint32_t epoch) {
#pragma unroll 1
  for (int r = 0; r < a.world; ++r)
    asm volatile(
        "st.relaxed.sys.global.u64 [%0], %1;" ::"l"(part_at(a, r, product, a.rank, epoch) + at),
        "l"(tagged(pair, epoch))
        : "memory");
}

/// Eight elements, from pair `at` on, of the output of o or down, of which several ranks have
/// parts.
__device__ __forceinline__ Packed receive_output(const Arguments& a, int product, int64_t at,
                                                 uint32_t epoch) {
  // Asked for together: one after another, each would be waited for.
  constexpr int kAtOnce = 4;
  float2 sum[4];
#pragma unroll 1
  for (int first = 0; first < a.world; first += kAtOnce) {
    Eight part[kAtOnce] = {};
    const uint32_t wanted = (1u << min(kAtOnce, a.world - first)) - 1;
    uint32_t missing = wanted;
    for (unsigned looks = 0; missing; ++looks) {
      if (looks % 1024 == 1023 && *a.stop) break;  // nobody will answer
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (missing >> j & 1) part[j].read(part_at(a, a.rank, product, first + j, epoch) + at);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (part[j].there(epoch)) missing &= ~(1u << j);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (!(wanted >> j & 1)) break;
      const Packed values = part[j].values();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 value = unpack(values.pair[i]);
        sum[i] = first + j == 0 ? value : float2{sum[i].x + value.x, sum[i].y + value.y};
      }
    }
  }
  Packed result;
#pragma unroll
  for (int i = 0; i < 4; ++i) result.pair[i] = pack_bf16(sum[i].x, sum[i].y);
  return result;
}

}  // namespace nanovllm::decoder
