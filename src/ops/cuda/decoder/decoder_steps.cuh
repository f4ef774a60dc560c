// The parts of the decoder layers' kernel beside products, attention and norms: the warp that
// brings the operands from memory, and the gathering of what other blocks sent.
#pragma once

#include "ops/cuda/decoder/decoder_mixture.cuh"

namespace nanovllm::decoder {

#if __CUDA_ARCH__ >= 900

// -- The warp that brings weights, keys and values --

template <bool kInt4 = false>
__device__ inline void bring_matrix(Ring& ring, const CUtensorMap* map, const MatrixCut& cut,
                                    int first, int more_underway) {
  const int rows = cut.columns_of_tile, grid = static_cast<int>(gridDim.x);
  int calm = cut.calm_stages;
  for (int tile = blockIdx.x; tile < cut.tiles; tile += grid, calm -= cut.stages) {
    // In the last round of several some blocks have no tile: they leave room for the others.
    const int more =
        more_underway + (tile >= grid && tile - tile % grid + grid > cut.tiles ? 2 : 0);
    const auto bring = kInt4 ? bring_records : bring_tile;
    bring(ring, map, cut, tile * rows, first, calm, cut.underway + more, cut.underway_later + more);
  }
}

/// The tiles of keys, then those of values, of a unit. Lanes have a half (64 elements, or 128 of
/// E4M3) of a box of up to 64 keys each. C: of the cache's elements.
template <int kHeadDim, class C>
__device__ __forceinline__ void bring_keys(Ring& ring, const Arguments& a, const Unit& unit,
                                           int layer, int most_underway) {
  constexpr int kHalves = is_e4m3<C> ? 1 : kHeadDim / 64;
  const int lane = threadIdx.x % kWarp, box = lane / kHalves, half = lane % kHalves;
  const int shift = min(a.block_shift, 6), boxes = kTileKeys >> shift;
  const int tiles = unit.tiles();
  for (int i = 0; i < 2 * tiles; ++i) {
    const CUtensorMap* map = i < tiles ? &a.k : &a.v;
    const int first = (unit.first_tile() + i % tiles) * kTileKeys, key = first + (box << shift);
    const int present = min(boxes, (unit.position - first >> shift) + 1);
    const RingCursor place = ring.place();
    ring.pace(most_underway);
    ring.advance();
    ring.wait_empty(place);
    const int half_bytes = 128 << shift;
    if (lane == 0) arrive_expecting(&ring.full[place.stage], present * kHalves * half_bytes);
    __syncwarp();
    if (box < present) {
      const int block = a.block_tables[unit.row * a.table_stride + (key >> a.block_shift)];
      copy_box(ring.at(place) + (half + is_e4m3<C>)*kTileKeys * 128 + box * half_bytes, map,
               &ring.full[place.stage], 0, key & ((1 << a.block_shift) - 1), half,
               block * a.kv_heads + unit.kv_head, layer);
    }
    __syncwarp();
  }
}

/// Brings the vectors of a layer as near as the L2 cache: the blocks a line each, in turns.
__device__ inline void prefetch_vectors(const Arguments& a, int head_dim, int layer) {
  const int lane = threadIdx.x % kWarp;
  const auto prefetch = [&](const __nv_bfloat16* vector, int size) {
    constexpr int kLine = 64;  // elements
    if (vector)
      for (int c = blockIdx.x * kLine; c < size; c += gridDim.x * kLine)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(vector + layer * a.layer_stride + c));
  };
  if (lane < 2) prefetch(a.norms[lane], a.hidden);
  if (lane == 2) prefetch(a.q_norm, head_dim);
  if (lane == 3) prefetch(a.k_norm, head_dim);
  if (lane >= 4 && lane < 4 + kProducts) {
    const MatrixCut& cut = a.cuts[lane - 4];
    prefetch(cut.bias, cut.columns * (lane - 4 == kGateUp ? 2 : 1));
  }
}

/// All lanes are where the first one is, which alone has brought something.
__device__ __forceinline__ void follow_first_lane(Ring& ring) {
  ring.next = {__shfl_sync(kFullMask, ring.next.stage, 0),
               __shfl_sync(kFullMask, ring.next.parity, 0)};
}

template <int kHeadDim, bool kMixture, class C, bool kInt4>
__device__ __forceinline__ void bring_all(Ring ring, const Arguments& a, Shared<kHeadDim>& shared,
                                          uint32_t epoch) {
  const int* contexts = shared.context;
#pragma unroll 1
  for (int layer = 0; layer < a.layers; ++layer) {
    if (layer == 0 || a.window[layer] != a.window[layer - 1]) {
      __syncwarp();
      if (threadIdx.x % kWarp < OwnUnits::kFound)
        shared.brought.find(a, contexts, layer, threadIdx.x % kWarp);
      __syncwarp();
    }
    const int units = shared.brought.count;
    // A block that has keys to bring besides is given more of the way until it has done so.
    const int more_underway = min(units, 1);
    if (layer == 0) prefetch_vectors(a, kHeadDim, 0);
    if (layer + 1 < a.layers) prefetch_vectors(a, kHeadDim, layer + 1);
    if (kMixture && layer == 0) prefetch_router(a, 0);
    if (kMixture && layer + 1 < a.layers) prefetch_router(a, layer + 1);
#pragma unroll 1
    for (int product = 0; product < (kMixture ? kGateUp : kProducts); ++product) {
      if (threadIdx.x % kWarp == 0)
        bring_matrix<kInt4>(ring, &a.maps[product], a.cuts[product],
                            kInt4 ? layer : layer * a.layer_atoms,
                            product <= kOut ? more_underway : 0);
      follow_first_lane(ring);
      if (product != kQkv) continue;
#pragma unroll 1
      for (int i = 0; i < units; ++i) {
        Unit unit;
        shared.brought.get(unit, a, contexts, layer, i);
        bring_keys<kHeadDim, C>(ring, a, unit, layer, a.most_underway + more_underway + min(i, 1));
      }
    }
    if constexpr (kMixture) {
      if (threadIdx.x % kWarp == 0)
        bring_matrix(ring, &a.maps[kRouter], a.cuts[kRouter], layer * a.layer_atoms, 0);
      follow_first_lane(ring);
      bring_experts<kInt4>(ring, a, shared, layer, epoch + layer);
    }
  }
}

#endif

// -- The gathering of operands --

/// The wait of a block without units of attention before it asks for attention's output: it would
/// ask for long, and all such blocks together keep the L2 cache so busy that the others wait for
/// it. So one thread asks for a word of a chunk's output, where chunks are merged, which comes an
/// exchange earlier, or else for the first word.
template <int kHeadDim>
__device__ __forceinline__ void await_chunks(const Worker<kHeadDim>& w) {
  const int position = w.shared.context[0] - 1;
  if (w.shared.units.count > 0 || position < 0) return;
  const bool merged = position / kChunk > first_key(position, w.a.window[w.layer]) / kChunk;
  const int64_t head = blockIdx.x % w.a.heads;  // each line is asked for by a few
  const uint64_t* first = merged ? w.a.words + w.a.partial_at + head * w.a.max_chunks * kHeadDim
                                 : inbox(w.a, w.a.heads_at);
  if (this_thread() == 0)
    while (!has(read_word(first), w.epoch)) continue;
  w.together();
}

/// gather() of few words: each of the warps that did not multiply asks for 512 bytes in a row at a
/// time. `thread`: in the order of ready_thread().
template <int kHeadDim>
__device__ __forceinline__ void gather_few(Worker<kHeadDim>& w, const MatrixCut& cut, int64_t sent,
                                           int units, int total, bool absent, int thread) {
  const int first = cut.early_atoms * kAtomDepth;
  WordPair pair[kPairsGathered] = {};
  uint32_t missing = 0;
  uint2* to[kPairsGathered];
#pragma unroll
  for (int j = 0; j < kPairsGathered; ++j) {
    const int i = thread + j * kGathering, row = i / (2 * units), c = i % (2 * units) * 4;
    to[j] = reinterpret_cast<uint2*>(&w.operand_of_half(cut, row, first + c)) + c / 4 % 2;
    if (i >= 2 * total) break;
    if (absent && w.shared.context[w.has_pairs(cut) ? row / 2 : row] <= 0)
      *to[j] = uint2{};
    else
      missing |= 1u << j;
  }
  const uint64_t* from = inbox(w.a, sent + thread * 2);
  receive_all(pair, missing, w.epoch, [&](int j) { return from + j * kGathering * 2; });
#pragma unroll
  for (int j = 0; j < kPairsGathered; ++j)
    if (missing >> j & 1)
      *to[j] = uint2{static_cast<uint32_t>(pair[j].first), static_cast<uint32_t>(pair[j].second)};
}

/// gather() of the lean kernel, which gives each part as soon as it is there: a product begins with
/// the first, and the others come meanwhile.
template <int kHeadDim>
__device__ __forceinline__ void gather_parts(const Worker<kHeadDim>& w, const MatrixCut& cut,
                                             int64_t sent, bool absent) {
  constexpr int kOfHalf = kPairsOfPart / 2;
  const int thread = w.ready_thread(), of_half = cut.atoms * (kAtomDepth / 4), total = 2 * of_half;
  if (thread >= kGathering) return;
  const bool waits = !absent || w.shared.context[0] > 0;
  uint32_t from[kPairsGathered], to[kPairsGathered];
#pragma unroll
  for (int j = 0; j < kPairsGathered; ++j) {
    const int i = thread + j * kGathering, half = i / kOfHalf % 2,
              pair = i / kPairsOfPart * kOfHalf + i % kOfHalf;
    from[j] = (half * of_half + pair) * 2;
    to[j] = shared_address(w.operand) + cut.operand_at + (pair / 2 * 2 + half) * 16 + pair % 2 * 8;
    find_now(from[j]);
    find_now(to[j]);
  }
  const uint64_t* words = inbox(w.a, sent);
  WordPair pair[kPairsGathered] = {};
#pragma unroll
  for (int j = 0; j < kPairsGathered; ++j) {
    if (thread + j * kGathering >= total) break;
    while (waits && !pair[j].there(w.epoch))
#pragma unroll
      for (int k = j; k < kPairsGathered; ++k)
        if (thread + k * kGathering < total && !pair[k].there(w.epoch))
          pair[k].read(words + from[k]);
    store_shared(to[j], static_cast<uint32_t>(pair[j].first),
                 static_cast<uint32_t>(pair[j].second));
    fence_shared_for_async();
    w.give_part((thread + j * kGathering) / kPairsOfPart);
  }
}

/// The same of many words, by all warps, of a single row by those that do not multiply. A thread
/// has four elements of 32 of a row, a line of the L2 cache, which serves halves of lines as
/// slowly; the threads next to these eight have the same of the next row.
template <class Worker>
__device__ __forceinline__ void gather_many(Worker& w, const MatrixCut& cut, int64_t sent,
                                            int columns, bool absent, int thread) {
  constexpr bool kSingle = Worker::kHasSingleRow;
  constexpr int kAtOnce = kSingle ? 8 : 6, kInARow = 32, kOfRow = kInARow / 4,
                kRows = (kSingle ? kGathering : kThreads) / kOfRow;
  // Of a single row there are one or two, its halves.
  const auto over_rows = [&](int x, int rows) { return kSingle ? x >> (rows - 1) : x / rows; };
  const int rows = w.places(cut), step = over_rows(kRows, rows),
            first_block = over_rows(thread / kOfRow, rows),
            row = thread / kOfRow - first_block * rows, column = thread % kOfRow * 4,
            blocks = columns / kInARow;
  const bool has_row = thread / kOfRow < step * rows;
  const bool is_sent = !absent || w.shared.context[w.has_pairs(cut) ? row / 2 : row] > 0;
#pragma unroll 1
  for (int block = has_row ? first_block : blocks; block < blocks; block += kAtOnce * step) {
    const int first = block * kInARow + column;
    WordPair pair[kAtOnce] = {};
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (is_sent && block + j * step < blocks) missing |= 1u << j;
    const uint64_t* from = inbox(w.a, sent + (int64_t{row} * columns + first) / 2);
    receive_all(pair, missing, w.epoch, [&](int j) { return from + j * step * kInARow / 2; });
    uint2* to = reinterpret_cast<uint2*>(&w.operand_of_half(cut, row, first)) + first / 4 % 2;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (block + j * step < blocks)
        to[j * step * rows * kInARow / 4] =
            uint2{static_cast<uint32_t>(pair[j].first), static_cast<uint32_t>(pair[j].second)};
  }
}

/// The operand is what the blocks sent: [row][columns]. `absent`: rows without a sequence are
/// zeros.
template <class Worker>
__device__ __forceinline__ void gather(Worker& w, const MatrixCut& cut, int64_t sent, bool absent) {
  if (w.lean) return gather_parts(w, cut, sent, absent);
  if (absent) await_chunks(w);
  const int first_column = cut.early_atoms * kAtomDepth;
  sent += first_column / 2;
  const int columns = cut.atoms * kAtomDepth - first_column, total = w.places(cut) * columns / 8,
            thread = w.ready_thread();
  if constexpr (Worker::kIsFp8) {
    return gather_quantised(w, cut, sent, absent, thread);
  } else if constexpr (Worker::kHasSingleRow) {
    if (thread >= kGathering) return;
    gather_many(w, cut, sent, columns, absent, thread);
  } else if (2 * total > kPairsGathered * kGathering) {
    // Warps of wgmma end together; of mma.sync one may still read what the others would overwrite.
    if (Worker::kIsInt4 && w.multiplying(absent ? kQkv : kGateUp) > kMultiplying)
      w.together();
    else if (Worker::kIsInt4 && this_thread() < kMultiplying * kWarp)
      w.multiplied();
    gather_many(w, cut, sent, columns, absent, thread);
  } else {
    // The others have sent outputs, for which their fence would wait.
    if (thread >= kGathering) return;
    gather_few(w, cut, sent, columns / 8, total, absent, thread);
  }
  fence_shared_for_async();
}

}  // namespace nanovllm::decoder
