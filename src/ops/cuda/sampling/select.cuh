// Choosing the top of a row of logits without sorting it.
//
// Every token has a rank key of 54 bits: its logit, mapped to an integer that orders like it, above
// its inverted id, so that equal logits rank by lower id first and no two keys are equal.
// weighted_cut() finds the smallest key of the shortest top part of the row whose weights add up to
// a target: top_k with weights of one, top_p with the probabilities. Weights are integers, so sums
// are exact in any order and atomics do no harm. This is the general way, several passes over the
// row; candidates.cuh is the short cut for the rows whose top part is small.
#pragma once

#include "ops/cuda/ptx/device.cuh"

namespace nanovllm {

constexpr int kRowThreads = 512;  // one block has one row
constexpr int kIdBits = 22;
constexpr uint64_t kMaxVocab = uint64_t{1} << kIdBits;
constexpr int kBins = 2048;
constexpr int kMaxCandidates = 1024;

/// Orders like the float (-inf lowest, NaN above +inf); both zeros are one.
__device__ inline uint32_t order_of(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float float_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

__device__ inline uint64_t rank_key(uint32_t order, int id) {
  return static_cast<uint64_t>(order) << kIdBits | (kMaxVocab - 1 - static_cast<uint64_t>(id));
}
__device__ inline uint64_t rank_key(float logit, int id) { return rank_key(order_of(logit), id); }
__device__ inline int id_of(uint64_t key) {
  return static_cast<int>(kMaxVocab - 1 - (key & (kMaxVocab - 1)));
}
__device__ inline uint32_t order_of_key(uint64_t key) {
  return static_cast<uint32_t>(key >> kIdBits);
}
__device__ inline float logit_of(uint64_t key) { return float_of(order_of_key(key)); }

/// A row of logits. wide: it begins on a 16-byte boundary.
struct LogitRow {
  const float* data;
  int vocab;
  bool wide;
};

/// Calls body(id, logit) for every token, in an order per thread that depends on the row's length
/// alone.
template <class Body>
__device__ void for_each_token(const LogitRow& row, Body&& body) {
#pragma unroll 2
  for (int first = static_cast<int>(threadIdx.x) * 4; first < row.vocab; first += kRowThreads * 4) {
    const Vec<float> logits = load_vec(row.data + first, row.vocab - first, row.wide);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + i < row.vocab) body(first + i, logits.v[i]);
  }
}

struct Candidates {
  uint64_t key[kMaxCandidates], sorted[kMaxCandidates];
};
struct Histogram {  // sums of 64 bits in halves: shared memory adds 32 bits at a time
  uint32_t low[kBins], high[kBins];
};
/// The state of the functions below that the threads of the block share.
struct SelectScratch {
  union {
    Histogram histogram;
    Candidates candidates;
  };
  unsigned long long warp_totals[kWarp];
  uint64_t prefix, before, bin_weight;
  int found, needed;
};

__device__ inline void clear(Histogram& h) {
  for (int bin = threadIdx.x; bin < kBins; bin += kRowThreads) h.low[bin] = h.high[bin] = 0;
}
__device__ inline void add_weight(Histogram& h, uint32_t bin, uint64_t weight) {
  const uint32_t low = static_cast<uint32_t>(weight), old = atomicAdd(&h.low[bin], low);
  const uint32_t high = static_cast<uint32_t>(weight >> 32) + (old + low < old);
  if (high != 0) atomicAdd(&h.high[bin], high);
}

/// The largest key of the warp.
__device__ inline uint64_t warp_max_key(uint64_t key) {
  const uint32_t order = __reduce_max_sync(kFullMask, order_of_key(key)),
                 id = static_cast<uint32_t>(key & (kMaxVocab - 1));
  return static_cast<uint64_t>(order) << kIdBits |
         __reduce_max_sync(kFullMask, order_of_key(key) == order ? id : 0);
}
/// The largest key of a block of kRowThreads, in every thread. `shared` holds one per warp; it may
/// be reused after a barrier.
__device__ inline uint64_t block_max_key(uint64_t key, uint64_t* shared) {
  key = warp_max_key(key);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = key;
  __syncthreads();
  return warp_max_key(shared[threadIdx.x % (kRowThreads / kWarp)]);
}

/// The sum of x over this thread and those before it; `total` over all of the block. There must be
/// a barrier between two calls.
__device__ inline unsigned long long inclusive_sum(unsigned long long x, SelectScratch& scratch,
                                                   unsigned long long& total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const unsigned long long other = __shfl_up_sync(kFullMask, x, offset);
    if (lane >= offset) x += other;
  }
  if (lane == kWarp - 1) scratch.warp_totals[warp] = x;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int i = 0; i < kRowThreads / kWarp; ++i) {
    if (i == warp) x += total;
    total += scratch.warp_totals[i];
  }
  return x;
}

/// Sums the histogram from its top bin down and finds the bin in which the running sum reaches
/// `wanted(total)` - `before`; leaves the bin in `prefix` (appended), the weight above it in
/// `before` and its own in `bin_weight`. False if all bins together do not reach it.
template <class Wanted>
__device__ bool find_bin(SelectScratch& scratch, int bits, Wanted&& wanted) {
  constexpr int kPerThread = kBins / kRowThreads;
  const int bins = 1 << bits;
  unsigned long long mine[kPerThread], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int bin = bins - 1 - (static_cast<int>(threadIdx.x) * kPerThread + i);
    mine[i] = bin >= 0 ? static_cast<unsigned long long>(scratch.histogram.high[bin]) << 32 |
                             scratch.histogram.low[bin]
                       : 0;
    sum += mine[i];
  }
  const unsigned long long above = inclusive_sum(sum, scratch, total) - sum;
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

/// Sorts candidates.key[0 .. count) into candidates.sorted, best first.
__device__ inline void sort_candidates(Candidates& c, int count) {
  if (count <= 128) {  // each counts who is before it
    for (int i = threadIdx.x; i < count; i += kRowThreads) {
      const uint64_t key = c.key[i];
      int place = 0;
#pragma unroll 8
      for (int j = 0; j < count; ++j) place += c.key[j] > key;
      c.sorted[place] = key;
    }
    __syncthreads();
    return;
  }
  int size = 256;  // Batcher's bitonic sort of a power of two, zeros at the end
  while (size < count) size *= 2;
  for (int i = threadIdx.x; i < size; i += kRowThreads) c.sorted[i] = i < count ? c.key[i] : 0;
  __syncthreads();
  for (int span = 2; span <= size; span *= 2)
    for (int stride = span / 2; stride > 0; stride /= 2) {
      if (const int i =
              2 * static_cast<int>(threadIdx.x) - (static_cast<int>(threadIdx.x) & (stride - 1));
          i < size) {
        const uint64_t a = c.sorted[i], b = c.sorted[i + stride];
        if ((a < b) == ((i & span) == 0)) c.sorted[i] = b, c.sorted[i + stride] = a;
      }
      // Up to a stride of 32 a warp keeps to its own 64 keys.
      if (stride > kWarp || (stride == 1 && span > kWarp))
        __syncthreads();
      else
        __syncwarp();
    }
}
static_assert(kMaxCandidates == 2 * kRowThreads);

/// How many of the sorted candidates [0, count) are needed until their weights reach wanted(sum of
/// all of them), or count + 1 if all do not; weight(logit). Called by the whole block.
template <class Weight, class Wanted>
__device__ int shortest_prefix(SelectScratch& scratch, int count, Weight&& weight,
                               Wanted&& wanted) {
  constexpr int kPerThread = kMaxCandidates / kRowThreads;
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  unsigned long long mine[kPerThread], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    mine[i] = first + i < count ? weight(logit_of(scratch.candidates.sorted[first + i])) : 0;
    sum += mine[i];
  }
  unsigned long long running = inclusive_sum(sum, scratch, total) - sum;
  const uint64_t target = wanted(total);
  if (total < target) return count + 1;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (running < target && target <= running + mine[i]) scratch.needed = first + i + 1;
    running += mine[i];
  }
  __syncthreads();
  return scratch.needed;
}

/// weighted_cut() digit by digit of the key, for rows with very many nearly equal logits.
template <class Weight>
__device__ uint64_t radix_cut(const LogitRow& row, uint64_t floor, uint64_t wanted,
                              SelectScratch& scratch, Weight&& weight) {
  constexpr int kDigits[] = {11, 11, 10, 11, 11};  // three of the logit, two of the id
  int shift = 32 + kIdBits;
  if (threadIdx.x == 0) scratch.prefix = scratch.before = 0;
  for (int digit = 0; digit < 5; ++digit) {
    const int bits = kDigits[digit];
    shift -= bits;
    clear(scratch.histogram);
    __syncthreads();
    const uint64_t prefix = scratch.prefix;
    for_each_token(row, [&](int id, float logit) {
      const uint64_t key = rank_key(logit, id);
      if (key < floor || (digit > 0 && key >> (shift + bits) != prefix)) return;
      if (const uint64_t w = weight(logit); w != 0)
        add_weight(scratch.histogram, static_cast<uint32_t>(key >> shift) & ((1u << bits) - 1), w);
    });
    __syncthreads();
    if (!find_bin(scratch, bits, [&](uint64_t) { return wanted; })) return floor;
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

/// The lowest key of the shortest top part of the row, among keys >= floor, whose weights sum to at
/// least target(total weight). weight(logit) is a function of the logit. Called by the whole block;
/// the same value in every thread. Two passes where the logits within `range` below `maximum`
/// spread, since then few tokens share the bin in which the target is reached.
template <class Weight, class Target>
__device__ uint64_t weighted_cut(const LogitRow& row, float maximum, float range, uint64_t floor,
                                 SelectScratch& scratch, Weight&& weight, Target&& target) {
  const float scale = static_cast<float>(kBins) / range;
  const auto bin_of = [&](float logit) {  // falls with the logit
    return kBins - 1 - static_cast<int>(fminf((maximum - logit) * scale, kBins - 1.0f));
  };
  __syncthreads();  // the scratch may still be read
  if (threadIdx.x == 0) scratch.prefix = scratch.before = 0, scratch.found = 0;
  clear(scratch.histogram);
  __syncthreads();
  for_each_token(row, [&](int id, float logit) {
    if (rank_key(logit, id) < floor) return;
    if (const uint64_t w = weight(logit); w != 0)
      add_weight(scratch.histogram, static_cast<uint32_t>(bin_of(logit)), w);
  });
  __syncthreads();
  uint64_t wanted = 0;
  if (!find_bin(scratch, 11, [&](uint64_t total) { return wanted = target(total); })) return floor;
  const int bin = static_cast<int>(scratch.prefix);
  for_each_token(row, [&](int id, float logit) {
    const uint64_t key = rank_key(logit, id);
    if (key < floor || bin_of(logit) != bin) return;
    if (const int at = atomicAdd(&scratch.found, 1); at < kMaxCandidates)
      scratch.candidates.key[at] = key;
  });
  __syncthreads();
  const int found = scratch.found;
  if (found > kMaxCandidates) return radix_cut(row, floor, wanted, scratch, weight);
  sort_candidates(scratch.candidates, found);
  const uint64_t missing = wanted - scratch.before;
  const int needed = shortest_prefix(scratch, found, weight, [&](uint64_t) { return missing; });
  return scratch.candidates.sorted[needed - 1];
}

}  // namespace nanovllm
