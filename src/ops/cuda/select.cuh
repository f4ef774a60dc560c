// Choosing the top of a row of logits without sorting it.
//
// Every token has a rank key of 54 bits: its logit, mapped to an integer that orders like it, above
// its inverted id, so that equal logits rank by lower id first and no two keys are equal.
// radix_cut() finds the smallest key of the shortest top part of the row whose weights add up to a
// target, digit by digit: top_k with weights of one, top_p with the probabilities. Weights are
// integers, so sums are exact in any order and atomics do no harm.
#pragma once

#include "ops/cuda/device.cuh"

namespace nanovllm {

constexpr int kRowThreads = 1024;  // one block has one row
constexpr int kIdBits = 22;
constexpr uint64_t kMaxVocab = uint64_t{1} << kIdBits;
constexpr int kBins = 2048;

/// Orders like the float (-inf lowest, NaN above +inf); both zeros are one.
__device__ inline uint32_t order_of(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float float_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

__device__ inline uint64_t rank_key(float logit, int id) {
  return static_cast<uint64_t>(order_of(logit)) << kIdBits |
         (kMaxVocab - 1 - static_cast<uint64_t>(id));
}
__device__ inline int id_of(uint64_t key) {
  return static_cast<int>(kMaxVocab - 1 - (key & (kMaxVocab - 1)));
}

/// Calls body(id, logit) for every token, in an order per thread that depends on the row's length
/// alone.
template <class Body>
__device__ void for_each_token(const float* row, int vocab, bool wide, Body&& body) {
  for (int first = threadIdx.x * 4; first < vocab; first += kRowThreads * 4) {
    const Vec<float> logits = load_vec(row + first, vocab - first, wide);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + i < vocab) body(first + i, logits.v[i]);
  }
}

struct SelectScratch {
  unsigned long long histogram[kBins];
  unsigned long long warp_totals[kWarp];
  uint64_t prefix, before, bin_weight;
};

/// Sums the histogram from its top bin down and finds the bin in which the running sum reaches
/// `wanted(total)` - `before`; leaves the bin in `prefix` (appended), the weight above it in
/// `before` and its own in `bin_weight`. False if all bins together do not reach it.
template <class Wanted>
__device__ bool find_bin(SelectScratch& scratch, int bits, Wanted&& wanted) {
  constexpr int kPerThread = kBins / kRowThreads;
  const int bins = 1 << bits, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  unsigned long long mine[kPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int bin = bins - 1 - (static_cast<int>(threadIdx.x) * kPerThread + i);
    mine[i] = bin >= 0 ? scratch.histogram[bin] : 0;
    sum += mine[i];
  }
  unsigned long long inclusive = sum;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const unsigned long long other = __shfl_up_sync(kFullMask, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == kWarp - 1) scratch.warp_totals[warp] = inclusive;
  __syncthreads();
  unsigned long long above = inclusive - sum, total = 0;
  for (int i = 0; i < kRowThreads / kWarp; ++i) {
    if (i < warp) above += scratch.warp_totals[i];
    total += scratch.warp_totals[i];
  }
  const uint64_t before = scratch.before, prefix = scratch.prefix, target = wanted(total);
  const bool reached = before + total >= target;
  __syncthreads();  // all have read what one of them writes now
  uint64_t running = before + above;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (reached && running < target && target <= running + mine[i]) {
      scratch.prefix =
          prefix << bits |
          static_cast<uint64_t>(bins - 1 - (static_cast<int>(threadIdx.x) * kPerThread + i));
      scratch.before = running;
      scratch.bin_weight = mine[i];
    }
    running += mine[i];
  }
  __syncthreads();
  return reached;
}

/// The lowest key of the shortest top part of the row, among keys >= floor, whose weights sum to at
/// least target(total weight). weight(logit) is a function of the logit. Called by the whole block;
/// the same value in every thread.
template <class Weight, class Target>
__device__ uint64_t radix_cut(const float* row, int vocab, bool wide, uint64_t floor,
                              SelectScratch& scratch, Weight&& weight, Target&& target) {
  constexpr int kDigits[] = {11, 11, 10, 11, 11};  // three of the logit, two of the id
  int shift = 32 + kIdBits;
  uint64_t wanted = 0;
  if (threadIdx.x == 0) scratch.prefix = scratch.before = 0;
  for (int digit = 0; digit < 5; ++digit) {
    const int bits = kDigits[digit];
    shift -= bits;
    for (int bin = threadIdx.x; bin < kBins; bin += kRowThreads) scratch.histogram[bin] = 0;
    __syncthreads();
    const uint64_t prefix = scratch.prefix;
    for_each_token(row, vocab, wide, [&](int id, float logit) {
      const uint64_t key = rank_key(logit, id);
      if (key < floor || (digit > 0 && key >> (shift + bits) != prefix)) return;
      if (const unsigned long long w = weight(logit); w != 0)
        atomicAdd(&scratch.histogram[key >> shift & ((1u << bits) - 1)], w);
    });
    __syncthreads();
    const bool reached = find_bin(scratch, bits, [&](uint64_t total) {
      if (digit == 0) wanted = target(total);
      return wanted;
    });
    if (!reached) return floor;
    const uint64_t missing = wanted - scratch.before;
    // The whole bin is needed: nothing below this digit matters.
    if (scratch.bin_weight == missing) break;
    // Once the logit is complete all keys of the bin weigh the same, and all but one may be too
    // few.
    if (shift <= kIdBits) {
      const uint32_t order = static_cast<uint32_t>(scratch.prefix >> (kIdBits - shift));
      if (scratch.bin_weight - weight(float_of(order)) < missing) break;
    }
  }
  const uint64_t cut = scratch.prefix << shift;
  __syncthreads();  // before the scratch is used again
  return cut > floor ? cut : floor;
}

}  // namespace nanovllm
