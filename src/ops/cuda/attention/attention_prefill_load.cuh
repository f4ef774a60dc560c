// Prefill on Hopper (attention_prefill.cuh): what a block keeps in shared memory, and its first
// warpgroup, which fills it. One warp finds the items and feeds tiles of K through a ring
// with the copy engine, another those of V; two warps fetch the queries of the next item.
#pragma once

#include "ops/cuda/attention/attention_work.cuh"
#include "ops/cuda/ptx/mma.cuh"
#include "ops/cuda/ptx/wgmma.cuh"

namespace nanovllm {

/// A warpgroup that loads, two that compute; over E4M3 one more that loads.
template <class C>
constexpr int kPrefillThreads = is_e4m3<C> ? 512 : 384;
constexpr int kConsumers = 2, kConsumerRows = 64, kConsumerThreads = 128;
constexpr int kQueryThreads = 64;  // warps 2 and 3

/// Beside tiles that were E4M3: the scales of their rows, and the next tiles as they are in the
/// cache (attention_prefill_widen.cuh): in slots, of keys and of values, by thread.
template <int kHeadDim, class C>
struct PrefillNumbers {
  static constexpr int kStages = kHeadDim == 128 ? 4 : 8;
};
template <int kHeadDim>
struct PrefillNumbers<kHeadDim, E4m3> {
  static constexpr int kStages = kHeadDim == 128 ? 3 : 8;
  uint4 raw[2][2][kTileKeys * kHeadDim / 16 / kConsumerThreads][kConsumerThreads];
  float k_scale[kStages][kTileKeys], v_scale[kStages][kTileKeys];
  // of the values, by halves: a scale that times a weight of zero is none
  union {
    bool half[kTileKeys / kWarp];
    uint16_t any;
  } has_odd_scale[kStages];
};

template <int kHeadDim, class C>
struct alignas(1024) PrefillShared {
  static constexpr int kStages = PrefillNumbers<kHeadDim, C>::kStages;
  static constexpr int kParts = kHeadDim / 8;  // 16-byte units of a row
  static constexpr int kTileBytes = kTileKeys * kHeadDim * 2;
  using Tile = __nv_bfloat16[kHeadDim / kSwizzleColumns][kTileKeys][kSwizzleColumns];
  Tile k[kStages], v[kStages];
  uint4 q[kItemRows][kParts];  // unit c of row r at c ^ r % 8: ldmatrix meets no bank twice
  float4 merged[kConsumers][kHeadDim / 8][kConsumerThreads];  // the chunks before this one
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t partial, q_full, q_empty, item_full[2], item_empty[2];
  PrefillItem items[2];
  [[no_unique_address]] PrefillNumbers<kHeadDim, C> numbers;
};

/// Copies tiles of K or V of one item. By a whole warp: a lane has one box of each tile, rows of
/// one block in a column of 64 elements, or none.
template <int kHeadDim>
class TileCopier {
 public:
  using Shared = PrefillShared<kHeadDim, __nv_bfloat16>;
  using Tile = typename Shared::Tile;

  __device__ TileCopier(const PrefillArguments& a, const CUtensorMap* map, const PrefillItem& item)
      : map_(map),
        table_(a.block_tables + item.sequence * a.table_stride),
        block_shift_(a.block_shift),
        kv_head_(item.kv_head),
        first_key_(item.first_key),
        context_len_(item.context_len) {
    constexpr int kHalves = kHeadDim / kSwizzleColumns;
    const int rows = min(kTileKeys, 1 << a.block_shift), lane = threadIdx.x % kWarp;
    half_ = lane % kHalves;
    row_ = lane / kHalves * rows;
    rows_ = rows;
    next_block_ = block(item.first_tile * kTileKeys);
  }
  /// Keys first .. first + 63, completing on `barrier`; tiles one after another.
  __device__ void copy(Tile& tile, uint64_t* barrier, int first) {
    const int block_index = next_block_, key = first + row_;
    next_block_ = block(first + kTileKeys);  // is there when it is needed
    if (threadIdx.x % kWarp == 0) arrive_expecting(barrier, Shared::kTileBytes);
    __syncwarp();
    if (row_ < kTileKeys)
      copy_box(tile[half_][row_], map_, barrier, half_ * kSwizzleColumns,
               key & ((1 << block_shift_) - 1), kv_head_, block_index);
  }

 private:
  /// -1, for which zeros are copied, where no row sees a key.
  __device__ int block(int first) const {
    const int key = first + row_;
    return row_ < kTileKeys && key + rows_ > first_key_ && key < context_len_
               ? table_[key >> block_shift_]
               : -1;
  }
  const CUtensorMap* map_;
  const int* table_;
  int block_shift_, kv_head_, first_key_, context_len_, half_, row_, rows_, next_block_;
};

/// Slots that no row of the item sees hold anything, NaN too, and 0 * NaN is not 0: zeros outside
/// the rows begin .. end - 1 of a tile of values. By a whole warp.
template <int kHeadDim>
__device__ void clear_outside(typename TileCopier<kHeadDim>::Tile& tile, int begin, int end) {
  constexpr int kUnits = kSwizzleColumns / 8, kHalves = kHeadDim / kSwizzleColumns;
  for (int i = threadIdx.x % kWarp; i < kTileKeys * kHalves * kUnits; i += kWarp) {
    const int row = i / (kHalves * kUnits);
    if (begin <= row && row < end) continue;
    reinterpret_cast<uint4*>(tile[i / kUnits % kHalves][row])[i % kUnits] = uint4{};
  }
  fence_shared_for_async();
  __syncwarp();
}

/// A value that is the same in all lanes, in a way that the compiler knows it, too: it then
/// computes with it once for the warp.
__device__ inline int uniform(int x) { return __shfl_sync(kFullMask, x, 0); }

/// Item n, as warp 0 left it.
template <int kHeadDim, class C>
__device__ PrefillItem take_item(PrefillShared<kHeadDim, C>& shared, int n) {
  wait_barrier(&shared.item_full[n % 2], n / 2 % 2);
  const PrefillItem& x = shared.items[n % 2];
  const PrefillItem item{.sequence = uniform(x.sequence),
                         .kv_head = uniform(x.kv_head),
                         .first_token = uniform(x.first_token),
                         .first_position = uniform(x.first_position),
                         .first_row = uniform(x.first_row),
                         .rows = uniform(x.rows),
                         .context_len = uniform(x.context_len),
                         .first_key = uniform(x.first_key),
                         .first_tile = uniform(x.first_tile),
                         .end_tile = uniform(x.end_tile)};
  arrive(&shared.item_empty[n % 2]);
  return item;
}

/// Warp 0: finds items and copies their keys.
template <int kHeadDim>
__device__ void load_keys_of_items(PrefillShared<kHeadDim, __nv_bfloat16>& shared,
                                   const PrefillArguments& a, const CUtensorMap* map) {
  constexpr unsigned kStages = PrefillShared<kHeadDim, __nv_bfloat16>::kStages;
  const bool leader = threadIdx.x == 0;
  ItemFinder finder(a);
  int index = static_cast<int>(blockIdx.x);
  unsigned at = 0;
  for (int n = 0;; ++n) {
    const int slot = n % 2;
    const PrefillItem item = finder.find(index);
    wait_barrier(&shared.item_empty[slot], (n / 2 + 1) % 2);
    if (leader) {
      shared.items[slot] = item;
      arrive(&shared.item_full[slot]);
    }
    if (item.sequence < 0) break;
    if (leader) index = static_cast<int>(gridDim.x) + atomicAdd(&a.counters[0], 1);
    TileCopier<kHeadDim> copier(a, map, item);
    for (int tile = item.first_tile; tile < item.end_tile; ++tile, ++at) {
      wait_barrier(&shared.k_empty[at % kStages], (at / kStages + 1) % 2);
      copier.copy(shared.k[at % kStages], &shared.k_full[at % kStages], tile * kTileKeys);
    }
    index = __shfl_sync(kFullMask, index, 0);
  }
  // The last block leaves the counters as it found them.
  if (leader && atomicAdd(&a.counters[1], 1) == static_cast<int>(gridDim.x) - 1) {
    a.counters[0] = 0;
    a.counters[1] = 0;
  }
}

/// Warp 1: copies the values of the items.
template <int kHeadDim>
__device__ void load_values_of_items(PrefillShared<kHeadDim, __nv_bfloat16>& shared,
                                     const PrefillArguments& a, const CUtensorMap* map) {
  constexpr unsigned kStages = PrefillShared<kHeadDim, __nv_bfloat16>::kStages;
  unsigned at = 0, partials = 0;
  for (int n = 0;; ++n) {
    const PrefillItem item = take_item(shared, n);
    if (item.sequence < 0) return;
    TileCopier<kHeadDim> copier(a, map, item);
    for (int tile = item.first_tile; tile < item.end_tile; ++tile, ++at) {
      const unsigned stage = at % kStages;
      wait_barrier(&shared.v_empty[stage], (at / kStages + 1) % 2);
      const int first = tile * kTileKeys, begin = item.first_key - first,
                end = item.context_len - first;
      if (begin <= 0 && end >= kTileKeys) {
        copier.copy(shared.v[stage], &shared.v_full[stage], first);
        continue;
      }
      copier.copy(shared.v[stage], &shared.partial, first);
      wait_barrier(&shared.partial, partials++ % 2);
      clear_outside<kHeadDim>(shared.v[stage], begin, end);
      if (threadIdx.x % kWarp == 0) arrive(&shared.v_full[stage]);
    }
  }
}

/// Begins to fetch the queries of item n, by `threads` neighbours, a power of two.
template <int threads, int kHeadDim, class C>
__device__ void copy_item_queries(PrefillShared<kHeadDim, C>& shared, const PrefillArguments& a,
                                  const PrefillItem& item, int n) {
  constexpr int kParts = PrefillShared<kHeadDim, C>::kParts;
  wait_barrier(&shared.q_empty, (n + 1) % 2);
  for (int i = threadIdx.x % threads; i < kItemRows * kParts; i += threads) {
    const int row = i / kParts, c = i % kParts;
    const int packed = min(item.first_row + row, item.rows - 1);  // those past the end: any
    const int in_sequence = token_of(packed, a.group_reciprocal);
    const int64_t token = item.first_token + in_sequence;
    const int head = (item.kv_head - in_sequence) * a.group + packed;
    copy_async(&shared.q[row][c ^ row % 8],
               a.q + token * a.q_token_stride + head * a.q_head_stride + c * 8, true);
  }
  arrive_after_copies(&shared.q_full);
}

/// Warps 2 and 3: fetch the queries of the items.
template <int kHeadDim>
__device__ void load_queries_of_items(PrefillShared<kHeadDim, __nv_bfloat16>& shared,
                                      const PrefillArguments& a) {
  for (int n = 0;; ++n) {
    const PrefillItem item = take_item(shared, n);
    if (item.sequence < 0) return;
    copy_item_queries<kQueryThreads>(shared, a, item, n);
  }
}

}  // namespace nanovllm
