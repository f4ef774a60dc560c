// bf16 attention of a decode step: every sequence has one query row. A block of a grid that fills
// the GPU once goes through its share of the units (attention_decode_plan.cuh); a unit is a chunk
// of one KV head of one sequence, for all query heads of the group, packed as the rows of a tile.
//
// Four warps copy tiles of 64 keys or values into a ring, 16 each, across units, as long as there
// is room. Eight warps compute: each has 32 keys of the chunk for the scores, then a part of the
// head's elements for the output; maxima, weights and sums change hands in shared memory. The
// arithmetic is that of attention.cuh.
#pragma once

#include "ops/cuda/attention_decode_compute.cuh"
#include "ops/cuda/attention_decode_copy.cuh"

namespace nanovllm {

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

/// Merges the slots of a pair into its output, `out` for the group's first head. By all that
/// compute.
template <int kHeadDim>
__device__ void merge_slots(const DecodeArguments& a, __nv_bfloat16* out, const SharedPair& pair) {
  constexpr int kAtOnce = 16;
  for (int i = threadIdx.x; i < a.group * kHeadDim; i += kDecodeWarps * kWarp) {
    const int row = i / kHeadDim;
    const float2* sums = a.partial_sum + int64_t{pair.first_slot} * a.group + row;
    const float* values = a.partial_out + int64_t{pair.first_slot} * a.group * kHeadDim + i;
    float value = 0.0f, base = kMinusInfinity, sum = 0.0f;
    for (int first = 0; first < pair.slots; first += kAtOnce) {
      float2 next_sum[kAtOnce];
      float next_value[kAtOnce];
      // Past the last, nothing: it changes nothing, and loads and merging need no branches.
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const bool valid = first + k < pair.slots;
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
    out[row * a.out_head_stride + i % kHeadDim] = __float2bfloat16_rn(finish(value, sum));
  }
}

/// This block has filled `mine` of the pair's slots: whoever is last merges them.
template <int kHeadDim, int kRows>
__device__ void hand_in(const DecodeArguments& a, const DecodeWork& work, __nv_bfloat16* out,
                        const SharedPair& pair, int mine,
                        DecodeExchange<kHeadDim, kRows>& exchange) {
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
  merge_slots<kHeadDim>(a, out, pair);
}

template <int kHeadDim, int kRows>
__device__ void compute_units(const DecodeArguments& a, const DecodeWork& work,
                              const DecodeShare& share, const DecodeTile<kHeadDim>* ring,
                              DecodeExchange<kHeadDim, kRows>& exchange) {
  UnitWalk walk(a, work, share);
  RingPlace place;
  PairState<kHeadDim, kRows> pair;
  if (walk.done()) return;
  copy_queries<kHeadDim, kRows>(a, walk, exchange.query[0], threadIdx.x, kDecodeWarps * kWarp);
  commit_copies();
  wait_copies<0>();
  sync_computing();
  pair.start();
  int query = 0;
  int slot = share.slot, entered = 0;  // slots of the pair that an earlier block began
  bool is_entered = share.entered.slots > 0;
  while (!walk.done()) {
    const UnitPlace at = walk.at;
    const int64_t row = walk.keys.row;
    const UnitKeys unit(walk);
    const bool pair_ends = at.chunk == walk.keys.last_chunk();
    const ChunkState<kHeadDim, kRows> chunk = compute_unit<kHeadDim, kRows>(
        query, pair_ends, unit, place, work.stages, ring, exchange, a.scale_log2);
    place = place.plus(2 * unit.tiles, work.stages);
    if (is_entered) {
      store_slot<kHeadDim>(a, slot++, chunk.out, chunk.base, chunk.sum);
      ++entered;
    } else {
      chunk.merge_into(pair, a.scale_log2);
    }
    walk.advance();
    if (!pair_ends && !walk.done()) continue;
    __nv_bfloat16* out = a.out + row * a.out_token_stride + at.head * a.group * a.out_head_stride;
    if (is_entered) {
      hand_in<kHeadDim>(a, work, out, share.entered, entered, exchange);
      is_entered = false;
    } else if (!pair_ends) {  // the share does
      store_slot<kHeadDim>(a, slot, pair.merged, pair.base, pair.sum);
      hand_in<kHeadDim>(a, work, out, share.left, 1, exchange);
    } else {
      for_each_pair_of<kHeadDim, kRows>(
          pair.merged, a.group, [&](int r, int row, int element, float x, float y) {
            *reinterpret_cast<uint32_t*>(out + row * a.out_head_stride + element) =
                pack_bf16(finish(x, pair.sum[r]), finish(y, pair.sum[r]));
          });
    }
    pair.start();
    query = (query + 1) % kDecodeQueries;
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
  auto& exchange = *reinterpret_cast<DecodeExchange<kHeadDim, kRows>*>(ring + work.stages);
  const DecodeShare share = work.share[blockIdx.x];
  if (static_cast<int>(threadIdx.x) < work.stages) {
    init_barrier(&exchange.full[threadIdx.x], kCopyWarps * kWarp);
    init_barrier(&exchange.empty[threadIdx.x], kDecodeWarps);
  }
  if (threadIdx.x < kDecodeQueries) init_barrier(&exchange.query_empty[threadIdx.x], kDecodeWarps);
  __syncthreads();
  if (threadIdx.x >= kDecodeWarps * kWarp) {
    copy_units(a, work, share, ring, exchange);
    return;
  }
  wait_for_previous();
  if (!work.lets_next_wait) let_next_start();
  compute_units(a, work, share, ring, exchange);
}

}  // namespace nanovllm
