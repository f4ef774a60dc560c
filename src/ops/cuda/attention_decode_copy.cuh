// The warps of the decode kernel that copy: keys, values and queries, from the cache to the ring.
#pragma once

#include "ops/cuda/attention_decode_work.cuh"

namespace nanovllm {

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

/// Sixteen keys (or values) by one warp: `low` and `high` are the first and the last eight, which
/// lie side by side whatever the block size. Seen are those begin .. end - 1, the others become
/// zeros.
template <int kHeadDim>
__device__ void copy_keys(__nv_bfloat16 (*rows)[kHeadDim + 8], const __nv_bfloat16* low,
                          const __nv_bfloat16* high, int begin, int end, uint64_t policy) {
  constexpr int kParts = kHeadDim / 8;  // of 16 bytes, of a key
  const int lane = threadIdx.x % kWarp;
  const auto copy = [&](auto valid) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      const int part = i * kWarp + lane, key = part / kParts;
      const __nv_bfloat16* from = (part < kHeadDim ? low : high - kHeadDim * 8) + part * 8;
      // Where a warp copies whole keys, the places of a lane are a fixed distance apart.
      __nv_bfloat16* to = kWarp % kParts == 0 ? rows[lane / kParts] + lane % kParts * 8 +
                                                    i * (kWarp / kParts) * (kHeadDim + 8)
                                              : rows[key] + part % kParts * 8;
      copy_async_once(to, from, valid(key), policy);
    }
  };
  if (begin <= 0 && 16 <= end)
    copy([](int) { return true; });
  else
    copy([=](int key) { return begin <= key && key < end; });
}

/// The queries of a pair, by `threads` threads; rows past the group become zeros.
template <int kHeadDim, int kRows>
__device__ void copy_queries(const DecodeArguments& a, const UnitWalk& walk,
                             __nv_bfloat16 (*rows)[DecodeTile<kHeadDim>::kPitch], int thread,
                             int threads) {
  const __nv_bfloat16* from =
      a.q + walk.keys.row * a.q_token_stride + walk.at.head * a.group * a.q_head_stride;
  for (int part = thread; part < kRows * kHeadDim; part += threads) {
    const int row = part / (kHeadDim / 8), element = part % (kHeadDim / 8) * 8;
    const bool valid = row < a.group;
    copy_async(rows[row] + element, valid ? from + row * a.q_head_stride + element : a.q, valid);
  }
}

/// Copies every 16 keys of a tile that are this warp's; the first warp, the queries of all pairs
/// but the first, before the keys, so that who has waited for keys has them. Lane i knows where
/// keys 8i .. 8i + 7 of the chunk are.
template <int kHeadDim, int kRows>
__device__ void copy_units(const DecodeArguments& a, const DecodeWork& work,
                           const DecodeShare& share, DecodeTile<kHeadDim>* ring,
                           DecodeExchange<kHeadDim, kRows>& exchange) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp - kDecodeWarps;
  const int block_mask = (1 << a.block_shift) - 1;
  const uint64_t policy = read_once_policy();
  RingPlace place, query;
  bool waited = false;
  UnitPlace before = share.begin;
  for (UnitWalk walk(a, work, share); !walk.done(); before = walk.at, walk.advance()) {
    if (warp == 0 && !same_pair(walk.at, before)) {
      query = query.plus(1, kDecodeQueries);
      if (!waited) wait_for_previous();
      waited = true;
      wait_barrier(&exchange.query_empty[query.stage], query.parity ^ 1);
      copy_queries<kHeadDim, kRows>(a, walk, exchange.query[query.stage], lane, kWarp);
    }
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
      const int tile = unit.first_tile + (is_key ? i : i - unit.tiles);
      const int64_t offset = is_key ? k_offset : v_offset;
      const __nv_bfloat16* cache = is_key ? a.k : a.v;
      wait_barrier(&exchange.empty[place.stage], place.parity ^ 1);
#pragma unroll
      for (int g = 0; g < kTileKeys / 16; g += kCopyWarps) {
        const int in_tile = 16 * (g + warp), start = tile * kTileKeys + in_tile;
        // The row's own key, its sequence's last, may be the work of the kernel before; the others
        // have been in the cache since earlier steps.
        if (!waited && first + start + 16 >= walk.keys.end) {
          wait_for_previous();
          waited = true;
        }
        const int64_t low = __shfl_sync(kFullMask, offset, start / 8),
                      high = __shfl_sync(kFullMask, offset, start / 8 + 1);
        if (start + 16 > unit.begin && start < unit.end)
          copy_keys<kHeadDim>(&ring[place.stage].row[in_tile], cache + low, cache + high,
                              unit.begin - start, unit.end - start, policy);
      }
      arrive_after_copies(&exchange.full[place.stage]);
      place = place.plus(1, work.stages);
    }
  }
  commit_copies();
  wait_copies<0>();
}

}  // namespace nanovllm
