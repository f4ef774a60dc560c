// bf16 attention of a decode step: every sequence has one query row. A block of a grid that fills
// the GPU once goes through its share of the units (attention_decode_plan.cuh); a unit is a chunk
// of one KV head of one sequence, for all query heads of the group, packed as the rows of a tile.
//
// One warp copies tiles of 64 keys or values into a ring, across units, as long as there is room.
// Eight warps compute: each has 32 keys of the chunk for the scores, then a part of the head's
// elements for the output; maxima, weights and sums change hands in shared memory. The arithmetic
// is that of attention.cuh.
#pragma once

#include "ops/cuda/attention_decode_plan.cuh"
#include "ops/cuda/mbarrier.cuh"
#include "ops/cuda/mma.cuh"

namespace nanovllm {

constexpr int kDecodeWarps = 8;  // those that compute; one more copies
constexpr int kDecodeThreads = (kDecodeWarps + 1) * kWarp;
constexpr int kDecodeRows = 16;         // query heads of a group, at most
constexpr int kDecodeStages = 24;       // of the ring, at most
constexpr int kFewestDecodeStages = 5;  // a chunk of keys must be there at once
constexpr int kChunkTiles = kChunk / kTileKeys, kTileWarps = kDecodeWarps / kChunkTiles;
static_assert(kTileKeys / kTileWarps == 32);

using DecodeArguments = AttentionArguments<__nv_bfloat16>;

struct DecodeWork {
  const DecodeShare* share;  // [blocks]
  int* counters;             // [blocks], zeros between kernels
  int kv_heads, stages;
};

template <int kHeadDim>
struct DecodeTile {
  static constexpr int kPitch = kHeadDim + 8;  // an odd number of 16-byte units, for ldmatrix
  __nv_bfloat16 row[kTileKeys][kPitch];
};

/// kRows: 1 where a lane has one row (groups up to 8), 2 where it has another 8 below.
template <int kRows>
struct DecodeExchange {
  float maximum[kDecodeRows][kDecodeWarps];         // of a warp's keys
  float sum[kDecodeWarps][kRows][kWarp];            // of a lane's weights
  uint32_t weights[kChunk / 16][kWarp][2 * kRows];  // operand A of 16 keys
  uint64_t full[kDecodeStages], empty[kDecodeStages];
  bool is_last;
};

/// A walk over the units of a share.
struct UnitWalk {
  UnitPlace at, end;
  RowKeys keys;
  const int *cu_seqlens_q, *context_lens;
  int num_seqs, kv_heads, window;

  __device__ UnitWalk(const DecodeArguments& a, const DecodeWork& work, const DecodeShare& share)
      : at(share.begin),
        end(share.end),
        cu_seqlens_q(a.cu_seqlens_q),
        context_lens(a.context_lens),
        num_seqs(a.num_seqs),
        kv_heads(work.kv_heads),
        window(a.window) {
    if (at.s < num_seqs) keys = RowKeys(cu_seqlens_q, context_lens, window, at.s);
  }
  __device__ bool done() const { return at == end; }
  __device__ void advance() {
    if (at.chunk < keys.last_chunk()) {
      ++at.chunk;
      return;
    }
    if (++at.head == kv_heads) {
      at.head = 0;
      do {
        ++at.s;
        if (at.s < num_seqs) keys = RowKeys(cu_seqlens_q, context_lens, window, at.s);
      } while (at.s < num_seqs && keys.end == 0);
    }
    at.chunk = at.s < num_seqs ? keys.first_chunk() : 0;
  }
};

/// The keys of a unit that are seen, counted from the start of its chunk, and the tiles they are
/// in.
struct UnitKeys {
  int begin, end, first_tile, tiles;
  __device__ explicit UnitKeys(const UnitWalk& walk) {
    const int first = walk.at.chunk * kChunk;
    begin = max(walk.keys.low - first, 0);
    end = min(walk.keys.end - first, kChunk);
    first_tile = begin / kTileKeys;
    tiles = (end - 1) / kTileKeys + 1 - first_tile;
  }
};

/// A place in the ring: the stage, and the parity of the phase in which it is filled.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ RingPlace plus(int n, int stages) const {
    RingPlace next{stage + n, parity};
    while (next.stage >= stages) {
      next.stage -= stages;
      next.parity ^= 1;
    }
    return next;
  }
};

// -- The warp that copies --

/// Copies are read once: they need not stay in the L2 cache.
__device__ inline uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void copy_async_once(void* shared, const void* global, bool valid,
                                       uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

/// One tile of keys or values. Eight keys lie side by side whatever the block size; lane i knows
/// where keys 8i .. 8i + 7 of the chunk are (`offset`, in elements). Seen are the keys begin .. end
/// - 1 of the tile: the others of their groups of 16 become zeros, other groups are left alone.
template <int kHeadDim>
__device__ void copy_tile(DecodeTile<kHeadDim>& tile, const __nv_bfloat16* cache, int64_t offset,
                          int first_lane, int begin, int end, uint64_t policy) {
  constexpr int kParts = kHeadDim / 8;  // of a key
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int group = 0; group < kTileKeys; group += 16) {
    const int64_t low = __shfl_sync(kFullMask, offset, first_lane + group / 8),
                  high = __shfl_sync(kFullMask, offset, first_lane + group / 8 + 1);
    if (group + 16 <= begin || group >= end) continue;
    const bool whole = begin <= group && group + 16 <= end;
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      const int part = i * kWarp + lane, key = group + part / kParts;
      copy_async_once(&tile.row[key][part % kParts * 8],
                      cache + (part < kHeadDim ? low : high) + part % kHeadDim * 8,
                      whole || (begin <= key && key < end), policy);
    }
  }
}

template <int kHeadDim, int kRows>
__device__ void copy_units(const DecodeArguments& a, const DecodeWork& work,
                           const DecodeShare& share, DecodeTile<kHeadDim>* ring,
                           DecodeExchange<kRows>& exchange) {
  const int lane = threadIdx.x % kWarp, block_mask = (1 << a.block_shift) - 1;
  const uint64_t policy = read_once_policy();
  RingPlace place;
  bool waited = false;
  for (UnitWalk walk(a, work, share); !walk.done(); walk.advance()) {
    const UnitKeys unit(walk);
    const int first = walk.at.chunk * kChunk, key = first + 8 * lane;
    int64_t k_offset = 0, v_offset = 0;
    if (8 * lane + 8 > unit.begin && 8 * lane < unit.end) {
      const int64_t block = a.block_tables[walk.at.s * a.table_stride + (key >> a.block_shift)],
                    inside = int64_t{key & block_mask} * kHeadDim;
      k_offset = block * a.k_block_stride + walk.at.head * a.k_head_stride + inside;
      v_offset = block * a.v_block_stride + walk.at.head * a.v_head_stride + inside;
    }
    for (int i = 0; i < 2 * unit.tiles; ++i) {  // keys, then values
      const bool is_key = i < unit.tiles;
      const int tile = unit.first_tile + (is_key ? i : i - unit.tiles), start = tile * kTileKeys;
      // Older keys than the row's own have been in the cache since the steps before.
      if (!waited && first + start + kTileKeys >= walk.keys.end) {
        wait_for_previous();
        waited = true;
      }
      wait_barrier(&exchange.empty[place.stage], place.parity ^ 1);
      copy_tile(ring[place.stage], is_key ? a.k : a.v, is_key ? k_offset : v_offset, tile * 8,
                unit.begin - start, unit.end - start, policy);
      arrive_after_copies(&exchange.full[place.stage]);
      place = place.plus(1, work.stages);
    }
  }
  commit_copies();
  wait_copies<0>();
}

// -- The warps that compute --

/// What a warp keeps of the pair (sequence, KV head) it is at: the queries, and the result of the
/// chunks so far for its part of the head's elements. A lane has rows lane / 4 and, with two of
/// them, 8 below.
template <int kHeadDim, int kRows>
struct PairState {
  /// Sixteen elements at a time, dealt out to the warps in turn.
  static constexpr int kParts = (kHeadDim / 16 + kDecodeWarps - 1) / kDecodeWarps;
  using Part = float[2][4];  // two products of 8 elements
  uint32_t q[kHeadDim / 16][4];
  Part merged[kParts];
  float base[kRows], sum[kRows];

  __device__ void start(const DecodeArguments& a, const UnitPlace& at) {
    const int lane = threadIdx.x % kWarp;
    const __nv_bfloat16* from = a.q + a.cu_seqlens_q[at.s] * a.q_token_stride;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + 8 * r;
      const auto* pairs = reinterpret_cast<const uint32_t*>(
          from + (at.head * a.group + row) * a.q_head_stride + lane % 4 * 2);
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          q[k][2 * half + r] = r < kRows && row < a.group ? pairs[8 * k + 4 * half] : 0;
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i)
#pragma unroll
      for (int e = 0; e < 8; ++e) merged[i][e / 4][e % 4] = 0.0f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      base[r] = kMinusInfinity;
      sum[r] = 0.0f;
    }
  }
};

/// One chunk's own result, in the same lanes.
template <int kHeadDim, int kRows>
struct ChunkState {
  static constexpr int kParts = PairState<kHeadDim, kRows>::kParts;
  typename PairState<kHeadDim, kRows>::Part out[kParts];
  float base[kRows], sum[kRows];

  __device__ void merge_into(PairState<kHeadDim, kRows>& pair, float scale_log2) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Merge merge(pair.base[r], pair.sum[r], base[r], sum[r], scale_log2);
#pragma unroll
      for (int i = 0; i < kParts; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e)
            pair.merged[i][j][e] = merge(pair.merged[i][j][e], out[i][j][e]);
      pair.base[r] = merge.base;
      pair.sum[r] = merge.sum;
    }
  }
};

/// The scores of the warp's 32 keys (those from 32 * warp of the chunk), masked.
template <int kHeadDim, int kRows>
__device__ void score_keys(float (&score)[4][4], const PairState<kHeadDim, kRows>& pair,
                           const DecodeTile<kHeadDim>& tile, const UnitKeys& unit, int warp) {
  const int lane = threadIdx.x % kWarp, row = warp % kTileWarps * 32;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k)
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      uint32_t b[4];
      load_matrices(b,
                    &tile.row[row + 8 * j + lane / 16 * 8 + lane % 8][16 * k + lane / 8 % 2 * 8]);
      mma_m16n8k16(score[j], pair.q[k], b[0], b[1]);
      mma_m16n8k16(score[j + 1], pair.q[k], b[2], b[3]);
    }
  if (unit.begin <= 32 * warp && 32 * warp + 32 <= unit.end) return;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = 32 * warp + 8 * j + lane % 4 * 2 + e % 2;
      if (key < unit.begin || key >= unit.end) score[j][e] = kMinusInfinity;
    }
}

/// Leaves the weights of the warp's keys and their sums to the others.
template <int kRows>
__device__ void share_weights(DecodeExchange<kRows>& exchange, float (&score)[4][4],
                              const float (&base)[kRows], int warp, float scale_log2) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float group[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s = score[2 * g + e / 2][2 * r + e % 2];
        s = weight_of(s, base[r], scale_log2);
      }
      const float(&low)[4] = score[2 * g], (&high)[4] = score[2 * g + 1];
      group[g] = group_sum(low[2 * r], low[2 * r + 1], high[2 * r], high[2 * r + 1]);
      uint32_t* weights = exchange.weights[2 * warp + g][lane];
      weights[r] = pack_bf16(low[2 * r], low[2 * r + 1]);
      weights[kRows + r] = pack_bf16(high[2 * r], high[2 * r + 1]);
    }
    exchange.sum[warp][r][lane] = __fadd_rn(group[0], group[1]);
  }
}

/// Adds one tile's weighted values, of the elements that are this warp's.
template <int kHeadDim, int kRows>
__device__ void add_values(ChunkState<kHeadDim, kRows>& chunk, const DecodeTile<kHeadDim>& tile,
                           const DecodeExchange<kRows>& exchange, const UnitKeys& unit, int index,
                           int warp) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int g = 0; g < kTileKeys / 16; ++g) {
    const int group = index * (kTileKeys / 16) + g;
    if (16 * group + 16 <= unit.begin || 16 * group >= unit.end) continue;
    uint32_t p[4] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      p[r] = exchange.weights[group][lane][r];
      p[2 + r] = exchange.weights[group][lane][kRows + r];
    }
#pragma unroll
    for (int i = 0; i < chunk.kParts; ++i) {
      const int part = warp + i * kDecodeWarps;
      if (part >= kHeadDim / 16) break;
      uint32_t v[4];
      load_matrices_transposed(v, &tile.row[16 * g + lane % 16][16 * part + lane / 16 * 8]);
      mma_m16n8k16(chunk.out[i][0], p, v[0], v[1]);
      mma_m16n8k16(chunk.out[i][1], p, v[2], v[3]);
    }
  }
}

__device__ inline void sync_computing() { sync_threads<1, kDecodeWarps * kWarp>(); }

/// One unit, whose first stage is at `place`.
template <int kHeadDim, int kRows>
__device__ ChunkState<kHeadDim, kRows> compute_unit(const PairState<kHeadDim, kRows>& pair,
                                                    const UnitKeys& unit, RingPlace place,
                                                    int stages, const DecodeTile<kHeadDim>* ring,
                                                    DecodeExchange<kRows>& exchange,
                                                    float scale_log2) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float score[4][4] = {};
  float maximum[kRows];
  if (32 * warp + 32 > unit.begin && 32 * warp < unit.end) {
    const RingPlace mine = place.plus(warp / kTileWarps - unit.first_tile, stages);
    wait_barrier(&exchange.full[mine.stage], mine.parity);
    score_keys(score, pair, ring[mine.stage], unit, warp);
  } else {
#pragma unroll
    for (int e = 0; e < 16; ++e) score[e / 4][e % 4] = kMinusInfinity;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    maximum[r] = kMinusInfinity;
#pragma unroll
    for (int e = 0; e < 8; ++e) maximum[r] = fmaxf(maximum[r], score[e / 2][2 * r + e % 2]);
    maximum[r] = quad_max(maximum[r]);
    if (lane % 4 == 0) exchange.maximum[lane / 4 + 8 * r][warp] = maximum[r];
  }
  sync_computing();  // maxima are there, and keys and old weights no longer needed
  if (warp == 0 && lane < kDecodeWarps)
    for (int i = 0; i < unit.tiles; ++i) arrive(&exchange.empty[place.plus(i, stages).stage]);

  ChunkState<kHeadDim, kRows> chunk{};
  float factor[kChunkTiles][kRows], mine[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    chunk.base[r] = kMinusInfinity;
    const float* maxima = exchange.maximum[lane / 4 + 8 * r];
#pragma unroll
    for (int t = 0; t < kChunkTiles; ++t) {
      chunk.base[r] = next_base(chunk.base[r], fmaxf(maxima[2 * t], maxima[2 * t + 1]), scale_log2,
                                factor[t][r]);
      if (t == warp / kTileWarps) mine[r] = finite_or_zero(chunk.base[r]);
    }
  }
  share_weights(exchange, score, mine, warp, scale_log2);
  sync_computing();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int t = 0; t < kChunkTiles; ++t)
      chunk.sum[r] =
          __fmaf_rn(chunk.sum[r], factor[t][r],
                    __fadd_rn(exchange.sum[2 * t][r][lane], exchange.sum[2 * t + 1][r][lane]));
    chunk.sum[r] = quad_sum(chunk.sum[r]);
  }
  place = place.plus(unit.tiles, stages);
#pragma unroll
  for (int t = 0; t < kChunkTiles; ++t) {
    if (t < unit.first_tile || t >= unit.first_tile + unit.tiles) continue;
    wait_barrier(&exchange.full[place.stage], place.parity);
    bool rescales = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) rescales |= factor[t][r] != 1.0f;
    if (__any_sync(kFullMask, rescales)) {
#pragma unroll
      for (int i = 0; i < chunk.kParts; ++i)
#pragma unroll
        for (int e = 0; e < 4 * kRows; ++e) {
          float& value = chunk.out[i][e / (2 * kRows)][e % (2 * kRows)];
          value = __fmul_rn(value, factor[t][e % (2 * kRows) / 2]);
        }
    }
    add_values(chunk, ring[place.stage], exchange, unit, t, warp);
    __syncwarp();
    if (lane == 0) arrive(&exchange.empty[place.stage]);
    place = place.plus(1, stages);
  }
  return chunk;
}

/// Calls put(row, element, first value, second value) for all that the lane has of a result.
template <int kHeadDim, int kRows, class Put>
__device__ void for_each_pair_of(const float (*values)[2][4], int group, Put&& put) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = lane / 4 + 8 * r;
    if (row >= group) continue;
#pragma unroll
    for (int i = 0; i < PairState<kHeadDim, kRows>::kParts; ++i) {
      const int part = warp + i * kDecodeWarps;
      if (part >= kHeadDim / 16) break;
#pragma unroll
      for (int j = 0; j < 2; ++j)
        put(r, row, 16 * part + 8 * j + lane % 4 * 2, values[i][j][2 * r], values[i][j][2 * r + 1]);
    }
  }
}

template <int kHeadDim, int kRows>
__device__ void store_slot(const DecodeArguments& a, int slot, const float (*values)[2][4],
                           const float (&base)[kRows], const float (&sum)[kRows]) {
  const int64_t first = int64_t{slot} * a.group;
  for_each_pair_of<kHeadDim, kRows>(
      values, a.group, [&](int r, int row, int element, float x, float y) {
        *reinterpret_cast<float2*>(a.partial_out + (first + row) * kHeadDim + element) = {x, y};
        if (element == 0) a.partial_sum[first + row] = {base[r], sum[r]};
      });
}

/// Merges the slots of a pair into its output. By all that compute.
template <int kHeadDim>
__device__ void merge_slots(const DecodeArguments& a, const UnitPlace& at, const SharedPair& pair) {
  constexpr int kAtOnce = 8;
  const int64_t token = a.cu_seqlens_q[at.s];
  for (int i = threadIdx.x; i < a.group * kHeadDim; i += kDecodeWarps * kWarp) {
    const int row = i / kHeadDim, element = i % kHeadDim;
    const float2* sums = a.partial_sum + int64_t{pair.first_slot} * a.group + row;
    const float* values = a.partial_out + int64_t{pair.first_slot} * a.group * kHeadDim + i;
    float value = 0.0f, base = kMinusInfinity, sum = 0.0f;
    for (int first = 0; first < pair.slots; first += kAtOnce) {
      float2 next_sum[kAtOnce];
      float next_value[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const bool valid = first + k < pair.slots;  // else nothing: it changes nothing
        next_sum[k] = valid ? __ldcg(sums + (first + k) * a.group) : float2{kMinusInfinity, 0.0f};
        next_value[k] = valid ? __ldcg(values + int64_t{first + k} * a.group * kHeadDim) : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const Merge merge(base, sum, next_sum[k].x, next_sum[k].y, a.scale_log2);
        value = merge(value, next_value[k]);
        base = merge.base;
        sum = merge.sum;
      }
    }
    a.out[token * a.out_token_stride + (at.head * a.group + row) * a.out_head_stride + element] =
        __float2bfloat16_rn(finish(value, sum));
  }
}

/// This block has filled `mine` of the pair's slots: whoever is last merges them.
template <int kHeadDim, int kRows>
__device__ void hand_in(const DecodeArguments& a, const DecodeWork& work, const UnitPlace& at,
                        const SharedPair& pair, int mine, DecodeExchange<kRows>& exchange) {
  __threadfence();
  sync_computing();
  if (threadIdx.x == 0) {
    int* counter = work.counters + pair.counter;
    exchange.is_last = atomicAdd(counter, mine) + mine == pair.slots;
    if (exchange.is_last) *counter = 0;
  }
  sync_computing();
  if (!exchange.is_last) return;
  __threadfence();
  merge_slots<kHeadDim>(a, at, pair);
}

template <int kHeadDim, int kRows>
__device__ void compute_units(const DecodeArguments& a, const DecodeWork& work,
                              const DecodeShare& share, const DecodeTile<kHeadDim>* ring,
                              DecodeExchange<kRows>& exchange) {
  UnitWalk walk(a, work, share);
  RingPlace place;
  PairState<kHeadDim, kRows> pair;
  int slot = share.slot, entered = 0;  // slots of the pair that an earlier block began
  bool is_entered = share.entered.slots > 0, is_new = true;
  while (!walk.done()) {
    const UnitPlace at = walk.at;
    const UnitKeys unit(walk);
    if (is_new) pair.start(a, at);
    const ChunkState<kHeadDim, kRows> chunk =
        compute_unit(pair, unit, place, work.stages, ring, exchange, a.scale_log2);
    place = place.plus(2 * unit.tiles, work.stages);
    if (is_entered) {
      store_slot<kHeadDim>(a, slot++, chunk.out, chunk.base, chunk.sum);
      ++entered;
    } else {
      chunk.merge_into(pair, a.scale_log2);
    }
    walk.advance();
    is_new = !same_pair(walk.at, at);
    if (!is_new && !walk.done()) continue;
    if (is_entered) {
      hand_in<kHeadDim>(a, work, at, share.entered, entered, exchange);
      is_entered = false;
    } else if (!is_new) {  // the share ends inside the pair
      store_slot<kHeadDim>(a, slot, pair.merged, pair.base, pair.sum);
      hand_in<kHeadDim>(a, work, at, share.left, 1, exchange);
    } else {
      __nv_bfloat16* out = a.out + a.cu_seqlens_q[at.s] * a.out_token_stride;
      for_each_pair_of<kHeadDim, kRows>(
          pair.merged, a.group, [&](int r, int row, int element, float x, float y) {
            *reinterpret_cast<uint32_t*>(out + (at.head * a.group + row) * a.out_head_stride +
                                         element) =
                pack_bf16(finish(x, pair.sum[r]), finish(y, pair.sum[r]));
          });
    }
  }
}

/// Grid: the shares of the plan. Rows of sequences without keys (padding) are left alone. May be
/// launched early if the plan was there before the kernel before it began, and only that kernel and
/// those before it in this step store the keys of the step's own rows.
template <int kHeadDim, int kRows>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    attention_decode_kernel(const DecodeArguments a, const DecodeWork work) {
  extern __shared__ uint4 shared[];
  auto* ring = reinterpret_cast<DecodeTile<kHeadDim>*>(shared);
  auto& exchange = *reinterpret_cast<DecodeExchange<kRows>*>(ring + work.stages);
  const DecodeShare share = work.share[blockIdx.x];
  if (static_cast<int>(threadIdx.x) < work.stages) {
    init_barrier(&exchange.full[threadIdx.x], kWarp);
    init_barrier(&exchange.empty[threadIdx.x], kDecodeWarps);
  }
  __syncthreads();
  if (threadIdx.x >= kDecodeWarps * kWarp) {
    copy_units(a, work, share, ring, exchange);
    return;
  }
  wait_for_previous();
  let_next_start();
  compute_units(a, work, share, ring, exchange);
}

}  // namespace nanovllm
