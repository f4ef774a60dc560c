// The warps of the decode kernel that make heads of what the projection made: queries on their way
// to shared memory, and of a sequence's newest token key and value on their way to the cache, from
// where the warp that copies fetches them behind a barrier. No other block reads them. The
// arithmetic is rotary.cuh's. A block waits for its first queries, so that several warps have two
// of them each (of 128 elements), and the last the key and the value.
#pragma once

#include "ops/cuda/attention/attention_decode_work.cuh"
#include "ops/cuda/rowwise/rotary.cuh"

namespace nanovllm {

template <class C>
using RawHeadsArguments = FusedArguments<__nv_bfloat16, C>;

/// Makes a warp's part of the heads of a share's pairs, one pair after another.
template <int kHeadDim, int kRows, class C>
class HeadMaker {
 public:
  using Exchange = DecodeExchange<kHeadDim, kRows, C>;

  /// Asks for what depends on no share.
  __device__ HeadMaker(const DecodeArguments& a, const RawHeadsArguments<C>& heads,
                       Exchange& exchange)
      : a_(a),
        heads_(heads),
        exchange_(exchange),
        warp_((static_cast<int>(threadIdx.x) - kDecodeThreads) / kWarp) {
    if (!heads.q_norm) return;
    const int c = static_cast<int>(threadIdx.x) % kLanes * 8;
    q_weights_ = Words::at(heads.q_norm + c);
    k_weights_ = Words::at(heads.k_norm + c);
  }
  __device__ void make_all(const DecodeWork& work) const {
    UnitWalk walk(a_, work, exchange_.share);
    for (RingCursor place; !walk.done(); place = place.plus(1, kDecodeQueries)) {
      if (heads_.q_norm)
        make<true>(walk, place);
      else
        make<false>(walk, place);
    }
  }

 private:
  static constexpr int kLanes = kHeadDim / 8, kAtOnce = kWarp / kLanes,
                       kParts = 8 * kRows / kAtOnce,  // of a pair's queries, warps in turns
      kOwn = (kParts + kHeadWarps - 1) / kHeadWarps;

  /// Makes the heads of the pair that `walk` is at, and takes it to the next one.
  template <bool kNorm>
  __device__ void make(UnitWalk& walk, const RingCursor& place) const {
    const RowKeys keys = walk.keys;
    UnitPlace at = walk.at;
    TokenHeads<kNorm, kLanes, C> token(heads_, keys.row);
    const bool is_key = token.head == 0, stores = warp_ == kHeadWarps - 1;
    Words query[kOwn], newest{};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int q = first_of(i) + token.head;
      query[i] = q < a_.group ? Words::at(heads_.q.head(keys.row, at.head * a_.group + q) + token.c)
                              : Words{};
    }
    token.load_angles(keys.end - 1);
    int slot = -1;
    if (stores) {
      newest = Words::at((is_key ? heads_.k : heads_.v).head(keys.row, at.head) + token.c);
      slot = heads_.slots[keys.row];
    }
    const bool begins_with_newest = at.chunk == keys.last_chunk();
    do {
      at = walk.at;
      walk.advance();
    } while (!walk.done() && same_pair(walk.at, at));
    const bool has_newest = at.chunk == keys.last_chunk();
    // Then whoever copies has seen the end of the phase of `stored` before this one, too.
    wait_barrier(&exchange_.query_empty[place.stage], place.parity ^ 1);
    const auto store = [&] {
      if (!stores) return;
      if (has_newest) {
        const Words turned = token.turn(newest, k_weights_);
        store_row(is_key ? heads_.k_cache : heads_.v_cache,
                  is_key ? heads_.k_pages : heads_.v_pages, slot, at.head, token.c,
                  vector(is_key ? turned : newest), token.head < 2 && slot >= 0, kLanes);
      }
      arrive(&exchange_.stored[place.stage]);
    };
    // Whichever is needed first.
    if (begins_with_newest) store();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int q = first_of(i) + token.head;
      if (first_of(i) >= 8 * kRows) break;
      if (first_of(i) < a_.group) {
        const Words turned = token.turn(query[i], q_weights_);
        query[i] = q < a_.group ? turned : Words{};
      }
      *reinterpret_cast<Words*>(&exchange_.query[place.stage][q][token.c]) = query[i];
    }
    arrive(&exchange_.query_full[place.stage]);
    if (!begins_with_newest) store();
  }
  /// The first query of the warp's part i.
  __device__ int first_of(int i) const { return (warp_ + i * kHeadWarps) * kAtOnce; }
  __device__ static const Vec<__nv_bfloat16>& vector(const Words& x) {
    return reinterpret_cast<const Vec<__nv_bfloat16>&>(x);
  }

  const DecodeArguments& a_;
  const RawHeadsArguments<C>& heads_;
  Exchange& exchange_;
  int warp_;
  Words q_weights_{}, k_weights_{};
};

}  // namespace nanovllm
