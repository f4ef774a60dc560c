// Shared by the warps of the decode kernel (attention_decode.cuh): its sizes, what they
// exchange in shared memory, and the walk over a share's units, which all do alike.
#pragma once

#include "ops/cuda/attention/attention_decode_plan.cuh"
#include "ops/cuda/ptx/mma.cuh"
#include "ops/cuda/ptx/tma.cuh"

namespace nanovllm {

constexpr int kDecodeWarps = 8;  // those that compute; one more copies, and one hands in
constexpr int kDecodeThreads = (kDecodeWarps + 2) * kWarp;
constexpr int kHeadWarps = 4;      // besides, where heads are made (attention_decode_heads.cuh)
constexpr int kDecodeRows = 16;    // query heads of a group, at most
constexpr int kDecodeQueries = 2;  // pairs whose queries are there at a time
constexpr int kDecodeStages = 16;  // of the ring, at most
constexpr int kFewestDecodeStages = 5;  // a chunk of keys must be there at once
constexpr int kChunkTiles = kChunk / kTileKeys, kTileWarps = kDecodeWarps / kChunkTiles;
static_assert(kTileKeys / kTileWarps == 32);
constexpr int kSliceBytes = 128;  // of a row of a tile, that lie together
constexpr int kFewKeys = 16;      // that are copied at once where a tile is not seen whole

using DecodeArguments = AttentionArguments<__nv_bfloat16>;

struct DecodeWork {
  const DecodeShare* share;  // [blocks]
  int* counters;             // [blocks], zeros between kernels
  int kv_heads, stages;
  bool lets_next_wait;  // until blocks end, and takes no room beside them before
};

/// Keys or values, of type C: slices of 128 bytes of a row, in which 16 bytes u of key k lie at
/// u ^ k % 8, as the copy engine swizzles them and so that ldmatrix meets no bank twice. A last
/// slice may be half empty.
template <int kHeadDim, class C>
struct alignas(1024) DecodeTile {
  static constexpr int kColumns = kSliceBytes / static_cast<int>(sizeof(C)), kPart = kColumns / 8;
  static constexpr int kSlices = (kHeadDim + kColumns - 1) / kColumns;
  C slice[kSlices][kTileKeys][kColumns];

  /// 16 bytes of a key: from element `first`, a multiple of 16, or with `second` the next.
  __device__ C* part(int key, int first, int second = 0) {
    return slice[first / kColumns][key] + (first % kColumns / kPart ^ second ^ key % 8) * kPart;
  }
  __device__ const C* part(int key, int first, int second = 0) const {
    return const_cast<DecodeTile*>(this)->part(key, first, second);
  }
};

/// Of the keys and values of stages that hold keys, where they are E4M3.
template <class C>
struct StageScales {};
template <>
struct alignas(16) StageScales<E4m3> {
  float k_scale[kDecodeStages][kTileKeys], v_scale[kDecodeStages][kTileKeys];
};

/// Slots of a pair, so many of them new. None: there is no more to hand in.
struct HandIn {
  SharedPair pair;
  int slots;
  __nv_bfloat16* out;  // the pair's, for the group's first head
};
constexpr int kDecodeHands = 2;   // of a block that are under way
constexpr int kFewSlotRows = 64;  // of all slots of a pair, that one warp merges

/// Elements from a query to the next: an odd number of 16-byte units, for ldmatrix.
__host__ __device__ constexpr int query_pitch(int head_dim) { return head_dim + 8; }

/// kRows: 1 where a lane has one row (groups up to 8), 2 where it has another 8 below.
template <int kHeadDim, int kRows, class C>
struct DecodeExchange : StageScales<C> {
  DecodeShare share;
  __nv_bfloat16 query[kDecodeQueries][8 * kRows][query_pitch(kHeadDim)];
  float maximum[8 * kRows][kDecodeWarps];           // of a warp's keys
  float sum[kDecodeWarps][kRows][kWarp];            // of a lane's weights
  uint32_t weights[kChunk / 16][kWarp][2 * kRows];  // operand A of 16 keys
  uint64_t full[kDecodeStages], empty[kDecodeStages];
  uint64_t query_full[kDecodeQueries], query_empty[kDecodeQueries];
  uint64_t stored[kDecodeQueries];  // the pair's newest key and value, where this block stores them
  HandIn hand[kDecodeHands];
  uint64_t hand_full[kDecodeHands], hand_empty[kDecodeHands];
  bool is_last;
};

/// Heads are there as attention takes them.
struct ReadyHeads {};
template <class Heads>
constexpr bool kMakesHeads = !std::is_same_v<Heads, ReadyHeads>;

/// A walk over the units of a share: first those of the pair that a later block goes on with, then
/// the others. What several blocks share is thus done while there is other work, and the keys that
/// come first are old ones, which can be fetched before the kernel before this one has ended.
struct UnitWalk {
  UnitPlace at, end;
  RowKeys keys;

  __device__ UnitWalk(const DecodeArguments& a, const DecodeWork& work, const DecodeShare& share)
      : at(share.middle),
        end(share.end),
        keys(share.middle_keys),
        a_(a),
        work_(work),
        share_(share) {
    if (at == end) begin_rest();
  }
  __device__ bool done() const { return at == end; }
  __device__ void advance() {
    step();
    if (at == end && !in_rest_) begin_rest();
  }

 private:
  __device__ void begin_rest() {
    in_rest_ = true;
    at = share_.begin;
    end = share_.middle;
    keys = share_.keys;
  }
  __device__ void step() {
    if (at.chunk < keys.last_chunk()) {
      ++at.chunk;
      return;
    }
    if (++at.head == work_.kv_heads) {
      // No look at the next sequence, for which all would wait, if it is none of the share's.
      if (end.head == 0 && at.s + 1 == end.s) {
        at = end;
        return;
      }
      at.head = 0;
      do {
        ++at.s;
        if (at.s < a_.num_seqs) keys = RowKeys(a_.cu_seqlens_q, a_.context_lens, a_.window, at.s);
      } while (at.s < a_.num_seqs && keys.end == 0);
    }
    at.chunk = at.s < a_.num_seqs ? keys.first_chunk() : 0;
  }

  const DecodeArguments& a_;
  const DecodeWork& work_;
  const DecodeShare& share_;
  bool in_rest_ = false;
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

}  // namespace nanovllm
