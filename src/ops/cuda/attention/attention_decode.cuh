// bf16 attention of a decode step: every sequence has one query row. A block of a grid that fills
// the GPU once goes through its share of the units (attention_decode_plan.cuh); a unit is a chunk
// of one KV head of one sequence, for all query heads of the group, packed as the rows of a tile.
//
// One warp copies tiles of 64 keys or values into a ring, across units, as long as there is room;
// on sm_90 with the copy engine. Eight warps compute: each has 32 keys of the chunk for the scores,
// then a part of the head's elements for the output; maxima, weights and sums change hands in
// shared memory. One warp tells other blocks of the partial results that this one leaves, and
// merges them: each takes several turns of 1 to 2 us, while memory is busy, for which those who
// compute do not wait. Before sm_90 some more may make the heads (attention_decode_heads.cuh). The
// arithmetic is that of attention.cuh. Beside a block there is room on its
// SM for one of the next kernel, which comes early and fetches what it can.
#pragma once

#include "ops/cuda/attention/attention_decode_compute.cuh"
#include "ops/cuda/attention/attention_decode_copy.cuh"
#include "ops/cuda/attention/attention_decode_heads.cuh"

namespace nanovllm {

/// Calls put(row, element, first value, second value) for all that the lane has of a result.
template <int kHeadDim, int kRows, class C, class Put>
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
        if constexpr (is_e4m3<C>)
          put(r, row, 16 * part + lane % 4 * 4 + 2 * j, values[i][0][2 * r + j],
              values[i][1][2 * r + j]);
        else
          put(r, row, 16 * part + 8 * j + lane % 4 * 2, values[i][j][2 * r],
              values[i][j][2 * r + 1]);
    }
  }
}

template <int kHeadDim, int kRows, class C>
__device__ void store_slot(const DecodeArguments& a, int slot, const float (*values)[2][4],
                           const float (&base)[kRows], const float (&sum)[kRows]) {
  const int64_t first = int64_t{slot} * a.group;
  for_each_pair_of<kHeadDim, kRows, C>(
      values, a.group, [&](int r, int row, int element, float x, float y) {
        *reinterpret_cast<float2*>(a.partial_out + (first + row) * kHeadDim + element) = {x, y};
        if (element == 0) a.partial_sum[first + row] = {base[r], sum[r]};
      });
}

/// Merges the slots of a pair into its output, `out` for the group's first head. By `threads`
/// threads, of which this is `thread`.
template <int kHeadDim>
__device__ void merge_slots(const DecodeArguments& a, __nv_bfloat16* out, const SharedPair& pair,
                            int thread, int threads) {
  constexpr int kAtOnce = 8;
  for (int i = 4 * thread; i < a.group * kHeadDim; i += 4 * threads) {
    const int row = i / kHeadDim;
    const float2* sums = a.partial_sum + int64_t{pair.first_slot} * a.group + row;
    const float* values = a.partial_out + int64_t{pair.first_slot} * a.group * kHeadDim + i;
    float4 value{};
    float base = kMinusInfinity, sum = 0.0f;
    for (int first = 0; first < pair.slots; first += kAtOnce) {
      float2 next_sum[kAtOnce];
      float4 next[kAtOnce];
      // Past the last, nothing: it changes nothing, and loads and merging need no branches.
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const bool valid = first + k < pair.slots;
        next_sum[k] = valid ? __ldcg(sums + (first + k) * a.group) : float2{kMinusInfinity, 0.0f};
        next[k] = valid ? __ldcg(reinterpret_cast<const float4*>(values + int64_t{first + k} *
                                                                              a.group * kHeadDim))
                        : float4{};
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const Merge merge(base, sum, next_sum[k].x, next_sum[k].y, a.scale_log2);
        value = {merge(value.x, next[k].x), merge(value.y, next[k].y), merge(value.z, next[k].z),
                 merge(value.w, next[k].w)};
        base = merge.base;
        sum = merge.sum;
      }
    }
    *reinterpret_cast<uint2*>(out + row * a.out_head_stride + i % kHeadDim) = {
        pack_bf16(finish(value.x, sum), finish(value.y, sum)),
        pack_bf16(finish(value.z, sum), finish(value.w, sum))};
  }
}

/// Counts the slots of a pair that this block has filled. True: all are, and this block merges
/// them. By one thread, after the others have named theirs to it.
__device__ inline bool is_last(const DecodeWork& work, const SharedPair& pair, int mine) {
  __threadfence();
  int* counter = work.counters + pair.counter;
  const bool last = atomicAdd(counter, mine) + mine == pair.slots;
  if (last) *counter = 0;
  __threadfence();
  return last;
}

/// This block has filled some of a pair's slots: whoever is last merges them. A warp of its own
/// sees to it; where slots are many or those who compute have nothing else to do, all of those.
template <int kHeadDim, int kRows, class C>
__device__ void hand_in(const DecodeArguments& a, const DecodeWork& work, const HandIn& hand,
                        bool is_idle, RingCursor& place,
                        DecodeExchange<kHeadDim, kRows, C>& exchange) {
  if (hand.slots > 0 && (is_idle || hand.pair.slots * a.group > kFewSlotRows)) {
    sync_computing();
    if (threadIdx.x == 0) exchange.is_last = is_last(work, hand.pair, hand.slots);
    sync_computing();
    if (exchange.is_last)
      merge_slots<kHeadDim>(a, hand.out, hand.pair, threadIdx.x, kDecodeWarps * kWarp);
    return;
  }
  if (threadIdx.x == 0) {
    wait_barrier(&exchange.hand_empty[place.stage], place.parity ^ 1);
    exchange.hand[place.stage] = hand;
  }
  __syncwarp();
  if (threadIdx.x % kWarp == 0) arrive(&exchange.hand_full[place.stage]);
  place = place.plus(1, kDecodeHands);
}

/// Hands in what those who compute leave to it. By a whole warp.
template <int kHeadDim, int kRows, class C>
__device__ void hand_in_all(const DecodeArguments& a, const DecodeWork& work,
                            DecodeExchange<kHeadDim, kRows, C>& exchange) {
  const int lane = threadIdx.x % kWarp;
  for (RingCursor place;; place = place.plus(1, kDecodeHands)) {
    wait_barrier(&exchange.hand_full[place.stage], place.parity);
    const HandIn hand = exchange.hand[place.stage];
    if (hand.slots == 0) return;
    __syncwarp();
    const bool last = __shfl_sync(kFullMask, lane == 0 && is_last(work, hand.pair, hand.slots), 0);
    if (lane == 0) arrive(&exchange.hand_empty[place.stage]);
    if (last) merge_slots<kHeadDim>(a, hand.out, hand.pair, lane, kWarp);
  }
}

template <int kHeadDim, int kRows, class Heads, class C>
__device__ void compute_units(const DecodeArguments& a, const DecodeWork& work,
                              const DecodeTile<kHeadDim, C>* ring,
                              DecodeExchange<kHeadDim, kRows, C>& exchange) {
  const DecodeShare& share = exchange.share;
  UnitWalk walk(a, work, share);
  RingCursor place, query, hand;
  PairState<kHeadDim, kRows> pair;
  if (walk.done()) return hand_in<kHeadDim>(a, work, {}, true, hand, exchange);
  if constexpr (!kMakesHeads<Heads>) {
    copy_queries<kHeadDim, kRows>(a, walk, exchange.query[0], threadIdx.x, kDecodeWarps * kWarp);
    commit_copies();
    wait_copies<0>();
    sync_computing();
  }
  pair.start();
  while (!walk.done()) {
    const UnitPlace at = walk.at;
    const int64_t row = walk.keys.row;
    const UnitKeys unit(walk);
    walk.advance();
    const bool pair_ends = walk.done() || !same_pair(walk.at, at),
               is_entered = share.entered.slots > 0 && same_pair(at, share.begin),
               is_left = share.left.slots > 0 && same_pair(at, share.middle);
    wait_barrier(&exchange.query_full[query.stage], query.parity);
    const ChunkState<kHeadDim, kRows> chunk = compute_unit<kHeadDim, kRows, C>(
        query.stage, pair_ends, unit, place, work.stages, ring, exchange, a.scale_log2);
    place = place.plus(2 * unit.tiles, work.stages);
    if (is_entered)
      store_slot<kHeadDim, kRows, C>(a, share.slot + at.chunk - share.begin.chunk, chunk.out,
                                     chunk.base, chunk.sum);
    else
      chunk.merge_into(pair, a.scale_log2);
    if (!pair_ends) continue;
    __nv_bfloat16* out = a.out + row * a.out_token_stride + at.head * a.group * a.out_head_stride;
    if (is_entered) {
      hand_in<kHeadDim>(a, work, {share.entered, at.chunk - share.begin.chunk + 1, out},
                        walk.done(), hand, exchange);
    } else if (is_left) {
      store_slot<kHeadDim, kRows, C>(a, share.left_slot, pair.merged, pair.base, pair.sum);
      hand_in<kHeadDim>(a, work, {share.left, 1, out}, walk.done(), hand, exchange);
    } else {
      for_each_pair_of<kHeadDim, kRows, C>(
          pair.merged, a.group, [&](int r, int row, int element, float x, float y) {
            *reinterpret_cast<uint32_t*>(out + row * a.out_head_stride + element) =
                pack_bf16(finish(x, pair.sum[r]), finish(y, pair.sum[r]));
          });
    }
    pair.start();
    query = query.plus(1, kDecodeQueries);
  }
  hand_in<kHeadDim>(a, work, {}, true, hand, exchange);  // the end
}

/// The body of the kernels below.
template <int kHeadDim, int kRows, class C, class Heads>
__device__ __forceinline__ void attend_units(const DecodeArguments& a, const DecodeWork& work,
                                             const DecodeMaps& maps, const Heads& heads) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* ring = reinterpret_cast<DecodeTile<kHeadDim, C>*>(shared);
  auto& exchange = *reinterpret_cast<DecodeExchange<kHeadDim, kRows, C>*>(ring + work.stages);
  constexpr int kShareParts = sizeof(DecodeShare) / sizeof(uint4);
  if (threadIdx.x >= kWarp && threadIdx.x < kWarp + kShareParts)
    reinterpret_cast<uint4*>(&exchange.share)[threadIdx.x - kWarp] =
        reinterpret_cast<const uint4*>(work.share + blockIdx.x)[threadIdx.x - kWarp];
  if (threadIdx.x == 0) {
    for (int i = 0; i < work.stages; ++i) {
      init_barrier(&exchange.full[i], kFullArrivals<C>);
      init_barrier(&exchange.empty[i], kDecodeWarps);
    }
    for (int i = 0; i < kDecodeQueries; ++i) {
      init_barrier(&exchange.query_full[i], kMakesHeads<Heads> ? kHeadWarps * kWarp : kWarp);
      init_barrier(&exchange.query_empty[i], kDecodeWarps);
      if (kMakesHeads<Heads>) init_barrier(&exchange.stored[i], kWarp);
    }
    for (int i = 0; i < kDecodeHands; ++i) {
      init_barrier(&exchange.hand_full[i], kDecodeWarps);
      init_barrier(&exchange.hand_empty[i], 1);
    }
#if __CUDA_ARCH__ >= 900
    fence_new_barriers();
  } else if (threadIdx.x == 2 * kWarp) {
    prefetch_map(&maps.k);
    prefetch_map(&maps.v);
    prefetch_map(&maps.k_few);
    prefetch_map(&maps.v_few);
#endif
  }
  if (!work.lets_next_wait) let_next_start();
  if constexpr (kMakesHeads<Heads>) {
    if (threadIdx.x >= kDecodeThreads) {
      const HeadMaker<kHeadDim, kRows, C> maker(a, heads, exchange);
      __syncthreads();
      maker.make_all(work);
      return;
    }
  }
  __syncthreads();
  if (threadIdx.x >= (kDecodeWarps + 1) * kWarp) {
    hand_in_all(a, work, exchange);
    return;
  }
  if (threadIdx.x >= kDecodeWarps * kWarp) {
    copy_units<kHeadDim, kRows, Heads>(a, maps, work, ring, exchange);
    return;
  }
  wait_for_previous();
  compute_units<kHeadDim, kRows, Heads>(a, work, ring, exchange);
}

/// So many blocks could stay on an SM by their registers: two do over E4M3 and with heads of 64
/// (attention_decode.cu), else one.
constexpr int decode_blocks(int head_dim) { return head_dim > 128 ? 1 : 2; }

/// Grid: the shares of the plan. Rows of sequences without keys (padding) are left alone.
///
/// May be launched before the kernel before it is done. What is read before wait_for_previous(),
/// the plan, the block tables and keys of earlier steps, is then there nevertheless, however many
/// kernels before this one are still under way, if some kernel of the step behind the plan was
/// launched without that leave: the first attention after the plan is (attention_decode.cu).
template <int kHeadDim, int kRows, class C>
__global__ void __launch_bounds__(kDecodeThreads, decode_blocks(kHeadDim))
    attention_decode_kernel(const __grid_constant__ DecodeArguments a,
                            const __grid_constant__ DecodeWork work,
                            const __grid_constant__ DecodeMaps maps) {
  attend_units<kHeadDim, kRows, C>(a, work, maps, ReadyHeads{});
}

/// The same of heads as the projection makes them, with some warps more that make them ready.
/// Before sm_90, where no kernel may be launched before the one before it is done.
template <int kHeadDim, int kRows, class C>
__global__ void __launch_bounds__(kDecodeThreads + kHeadWarps * kWarp)
    attention_raw_heads_kernel(const __grid_constant__ DecodeArguments a,
                               const __grid_constant__ DecodeWork work,
                               const __grid_constant__ RawHeadsArguments<C> heads) {
#if __CUDA_ARCH__ < 900
  attend_units<kHeadDim, kRows, C>(a, work, DecodeMaps{}, heads);
#endif
}

}  // namespace nanovllm
