// What the warps of the decode kernel have in common (attention_decode.cuh): its sizes, what they
// exchange in shared memory, and the walk over a share's units, which all do alike.
#pragma once

#include "ops/cuda/attention_decode_plan.cuh"
#include "ops/cuda/mbarrier.cuh"
#include "ops/cuda/mma.cuh"

namespace nanovllm {

constexpr int kDecodeWarps = 8;  // those that compute
constexpr int kCopyWarps = 4;
constexpr int kDecodeThreads = (kDecodeWarps + kCopyWarps) * kWarp;
constexpr int kDecodeRows = 16;         // query heads of a group, at most
constexpr int kDecodeQueries = 2;       // pairs whose queries are there at a time
constexpr int kDecodeStages = 24;       // of the ring, at most
constexpr int kFewestDecodeStages = 5;  // a chunk of keys must be there at once
constexpr int kChunkTiles = kChunk / kTileKeys, kTileWarps = kDecodeWarps / kChunkTiles;
static_assert(kTileKeys / kTileWarps == 32);

using DecodeArguments = AttentionArguments<__nv_bfloat16>;

struct DecodeWork {
  const DecodeShare* share;  // [blocks]
  int* counters;             // [blocks], zeros between kernels
  int kv_heads, stages;
  bool lets_next_wait;  // until blocks end, and takes no room beside them before
};

template <int kHeadDim>
struct DecodeTile {
  static constexpr int kPitch = kHeadDim + 8;  // an odd number of 16-byte units, for ldmatrix
  __nv_bfloat16 row[kTileKeys][kPitch];
};

/// kRows: 1 where a lane has one row (groups up to 8), 2 where it has another 8 below.
template <int kHeadDim, int kRows>
struct DecodeExchange {
  __nv_bfloat16 query[kDecodeQueries][8 * kRows][DecodeTile<kHeadDim>::kPitch];
  float maximum[8 * kRows][kDecodeWarps];           // of a warp's keys
  float sum[kDecodeWarps][kRows][kWarp];            // of a lane's weights
  uint32_t weights[kChunk / 16][kWarp][2 * kRows];  // operand A of 16 keys
  uint64_t full[kDecodeStages], empty[kDecodeStages], query_empty[kDecodeQueries];
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
        keys(share.keys),
        cu_seqlens_q(a.cu_seqlens_q),
        context_lens(a.context_lens),
        num_seqs(a.num_seqs),
        kv_heads(work.kv_heads),
        window(a.window) {}
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

}  // namespace nanovllm
