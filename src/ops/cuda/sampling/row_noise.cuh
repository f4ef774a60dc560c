// noise_bits() of one row (ops/noise.h), of which most tokens' noise is asked for: what they share
// is found once. A call is 37 instructions and five loads, where noise_bits() has 57.
#pragma once

#include <cstdint>

#include "ops/noise.h"

namespace nanovllm {

/// The round keys of a seed, and the words of the counter that are the same for all tokens.
class RowNoise {
 public:
  __device__ RowNoise(uint64_t seed, uint32_t position) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    // Of the counter {group, position, 0, 0}, round 0 makes {this ^ key0, 0, ..., ...}.
    const uint64_t first = uint64_t{kPhiloxFactor0} * (position ^ key0);
    words_[0] = key1;
#pragma unroll
    for (int round = 1; round < kRounds; ++round) {
      key0 += kPhiloxStep0;
      key1 += kPhiloxStep1;
      words_[2 * round] = key0;
      words_[2 * round + 1] = key1;
    }
    words_[1] = words_[2];
    words_[2] = high(first) ^ words_[3];
    words_[3] = low(first);
  }
  /// As noise_bits(seed, position, group).
  __device__ Philox4 bits(uint32_t group) const {
    uint4 key[kRounds / 2];
#pragma unroll
    for (int i = 0; i < kRounds / 2; ++i) key[i] = reinterpret_cast<const uint4*>(words_)[i];
    const uint64_t first = uint64_t{kPhiloxFactor0} * group,
                   second = uint64_t{kPhiloxFactor1} * (high(first) ^ key[0].x);
    Philox4 counter{{high(second) ^ key[0].y, low(second), low(first) ^ key[0].z, key[0].w}};
#pragma unroll
    for (int round = 2; round < kRounds; ++round) {
      const uint4& two = key[round / 2];
      const uint64_t p0 = uint64_t{kPhiloxFactor0} * counter.x[0],
                     p1 = uint64_t{kPhiloxFactor1} * counter.x[2];
      counter = {{high(p1) ^ counter.x[1] ^ (round % 2 ? two.z : two.x), low(p1),
                  high(p0) ^ counter.x[3] ^ (round % 2 ? two.w : two.y), low(p0)}};
    }
    return counter;
  }

 private:
  static constexpr int kRounds = 10;
  static __device__ uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }
  static __device__ uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }

  // Of round 0 the second key; of round 1 the first key, what the third word begins with and the
  // fourth word; of each later round both keys.
  alignas(16) uint32_t words_[2 * kRounds];
};

}  // namespace nanovllm
