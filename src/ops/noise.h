// The sampling noise: a function of (seed, position, token id) and nothing else, so that a seeded
// request draws the same tokens alone, in any batch, after preemption and on a prefix hit; the same
// bits on every backend.
//
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One call
// serves four neighbouring token ids.
#pragma once

#include <cstdint>

namespace nanovllm {

struct Philox4 {
  uint32_t x[4];
};

/// Of Philox4x32: what a round multiplies by, and what it adds to the keys.
constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u,
                   kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;

constexpr Philox4 philox4x32_10(Philox4 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxFactor0} * counter.x[0],
                   p1 = uint64_t{kPhiloxFactor1} * counter.x[2];
    counter = {{static_cast<uint32_t>(p1 >> 32) ^ counter.x[1] ^ key0, static_cast<uint32_t>(p1),
                static_cast<uint32_t>(p0 >> 32) ^ counter.x[3] ^ key1, static_cast<uint32_t>(p0)}};
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  return counter;
}

/// Random bits of the tokens 4 * group .. 4 * group + 3 at `position`.
constexpr Philox4 noise_bits(uint64_t seed, uint32_t position, uint32_t group) {
  return philox4x32_10({{group, position, 0u, 0u}}, static_cast<uint32_t>(seed),
                       static_cast<uint32_t>(seed >> 32));
}

/// Uniform in (0, 1), never an end: 23 bits, centred, so that every value is exact in f32.
constexpr float noise_uniform(uint32_t bits) {
  return (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f;
}

/// Gumbel noise is -log(-log(u)); with these bounds a kernel may skip tokens that cannot win.
constexpr float kMinGumbel = -2.82f, kMaxGumbel = 16.64f;

}  // namespace nanovllm
