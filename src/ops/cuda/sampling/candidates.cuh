// From a scan of a row to its top tokens, by a block: the maxima of the row's chunks tell in which
// few chunks the top tokens are, and only those are read again.
#pragma once

#include "ops/cuda/sampling/row_scan.cuh"

namespace nanovllm {

/// A scanned row, as the block that finishes it sees it. `maximum` is finite.
struct ScannedRow {
  LogitRow logits;
  const float* chunk_max;
  int chunks;
  float maximum, lowest;  // of the finite chunk maxima
};

struct GatherScratch {
  int chunk[kMaxCandidates], bins[kRowThreads];
  int chunks, wanted_bin;
  uint32_t pivot, warp_lowest[kWarp];
  uint64_t warp_keys[2][kWarp];
};

/// The finds of a scan's warps in a row, put together.
struct RowSummary {
  uint64_t keys[2];  // the largest of each kind
  float lowest;      // finite chunk maximum
};

/// Makes the scratch ready; a barrier must follow.
__device__ inline void clear(SelectScratch& scratch, GatherScratch& g) {
  g.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    g.chunks = scratch.found = 0;
    g.wanted_bin = kRowThreads;
    g.pivot = ~0u;
  }
}

/// Also makes the scratch ready. Called by the whole block, first of all.
__device__ inline RowSummary summarise(const RowScan& scan, int row, SelectScratch& scratch,
                                       GatherScratch& g) {
  uint64_t keys[2] = {0, 0};
  for (int i = threadIdx.x; i < scan.warps; i += kRowThreads)
    for (int j = 0; j < 2; ++j) {
      const uint64_t key = scan.keys_of(row)[i][j];
      keys[j] = key > keys[j] ? key : keys[j];
    }
  const float* chunk_max = scan.chunk_max_of(row);
  uint32_t lowest = ~0u;
#pragma unroll 4
  for (int i = threadIdx.x; i < scan.tiles * kChunksPerTile; i += kRowThreads)
    if (const uint32_t order = order_of(chunk_max[i]); order > kMinusInfinityOrder)
      lowest = min(lowest, order);
  lowest = __reduce_min_sync(kFullMask, lowest);
  clear(scratch, g);
  for (int j = 0; j < 2; ++j) keys[j] = warp_max_key(keys[j]);
  const int warp = threadIdx.x / kWarp, other = threadIdx.x % (kRowThreads / kWarp);
  if (threadIdx.x % kWarp == 0) {
    g.warp_keys[0][warp] = keys[0];
    g.warp_keys[1][warp] = keys[1];
    g.warp_lowest[warp] = lowest;
  }
  __syncthreads();
  return {{warp_max_key(g.warp_keys[0][other]), warp_max_key(g.warp_keys[1][other])},
          float_of(__reduce_min_sync(kFullMask, g.warp_lowest[other]))};
}

/// Lists the chunks whose maximum qualifies and leaves the order of the lowest one in g.pivot.
template <class Qualifies>
__device__ void list_chunks(const ScannedRow& row, GatherScratch& g, Qualifies&& qualifies) {
  for (int i = threadIdx.x; i < row.chunks; i += kRowThreads) {
    const float maximum = row.chunk_max[i];
    if (!qualifies(maximum)) continue;
    atomicMin(&g.pivot, order_of(maximum));
    if (const int at = atomicAdd(&g.chunks, 1); at < kMaxCandidates) g.chunk[at] = i;
  }
  __syncthreads();
}

/// Lists the chunks of the highest maxima: at least `wanted`, and few more. False if there are not
/// as many; then all with a finite token are listed. Called by the whole block.
__device__ inline bool list_top_chunks(const ScannedRow& row, int wanted, SelectScratch& scratch,
                                       GatherScratch& g) {
  const float scale = static_cast<float>(kRowThreads) / (row.maximum - row.lowest);
  const auto bin_of = [&](float x) {  // grows as x falls
    return static_cast<int>(fminf((row.maximum - x) * scale, kRowThreads - 1.0f));
  };
  for (int i = threadIdx.x; i < row.chunks; i += kRowThreads)
    if (const float x = row.chunk_max[i]; x >= row.lowest) atomicAdd(&g.bins[bin_of(x)], 1);
  __syncthreads();
  const int mine = g.bins[threadIdx.x];
  unsigned long long total;
  const int reached =
      static_cast<int>(inclusive_sum(static_cast<unsigned long long>(mine), scratch, total));
  if (reached - mine < wanted && wanted <= reached) g.wanted_bin = static_cast<int>(threadIdx.x);
  __syncthreads();
  const int bin = g.wanted_bin;
  list_chunks(row, g, [&](float x) { return x >= row.lowest && bin_of(x) <= bin; });
  return bin < kRowThreads;
}

/// Puts the keys of the listed chunks' tokens from `pivot` on into scratch.candidates and returns
/// how many there are, or more than kMaxCandidates if they do not fit. Called by the whole block.
__device__ inline int gather_candidates(const ScannedRow& row, uint32_t pivot,
                                        SelectScratch& scratch, const GatherScratch& g) {
  constexpr int kLanes = kScanChunk / 4;  // that read a chunk
  const int chunks = g.chunks, lane = static_cast<int>(threadIdx.x) % kLanes;
  if (chunks > kMaxCandidates) return chunks;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) / kLanes; i < chunks; i += kRowThreads / kLanes) {
    const int chunk = g.chunk[i];
    const int first = chunk / kChunksPerTile * kTile + lane / 4 * kWarp * 4 +
                      chunk % kChunksPerTile * 16 + lane % 4 * 4;
    const Vec<float> logits =
        load_vec(row.logits.data + first, row.logits.vocab - first, row.logits.wide);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t order = order_of(logits.v[j]);
      if (order < pivot || first + j >= row.logits.vocab) continue;
      if (const int at = atomicAdd(&scratch.found, 1); at < kMaxCandidates)
        scratch.candidates.key[at] = rank_key(order, first + j);
    }
  }
  __syncthreads();
  return scratch.found;
}

}  // namespace nanovllm
