// Prefill on Hopper over a cache of E4M3: the first warpgroup of a block fills the rings with tiles
// that have become bf16, as wgmma reads them, once for all rows of the item. Each thread widens the
// pieces that it copied itself, a tile later, and so waits for no other. What no row sees may be
// any number: its score is masked, and its weight zero.
#pragma once

#include "ops/cuda/attention/attention_prefill_load.cuh"

namespace nanovllm {

/// A thread's pieces, 16 numbers each, of the tiles of one item: of two neighbouring rows of keys
/// and the same of values, one in every slice of 64 elements. Eight neighbours have four pieces of
/// two rows, one even and one odd, whose places in a tile then meet no bank twice.
template <int kHeadDim>
class TileWidener {
 public:
  using Shared = PrefillShared<kHeadDim, E4m3>;
  using Tile = typename Shared::Tile;
  static constexpr int kSlices = kHeadDim / kSwizzleColumns, kPieces = 2 * kSlices;

  __device__ TileWidener(Shared& shared, const PrefillArguments& a, const PrefillItem& item)
      : shared_(shared),
        a_(a),
        table_(a.block_tables + item.sequence * a.table_stride),
        keys_(static_cast<const E4m3*>(a.k) + item.kv_head * a.k_head_stride),
        values_(static_cast<const E4m3*>(a.v) + item.kv_head * a.v_head_stride),
        first_key_(item.first_key),
        last_key_(item.context_len - 1) {
    const int pair = static_cast<int>(threadIdx.x) / 4, piece = static_cast<int>(threadIdx.x) % 4;
    row_ = 2 * pair + pair % 2;
    column_ = piece * 16;
    place_ = row_ * kSwizzleColumns * 2 + (2 * piece ^ row_ % 8) * 16;
  }

  /// Begins to copy the keys and values first .. first + 63 to raw slot `slot`; of what no row
  /// sees, whatever there is.
  __device__ void copy(int first, int slot) const {
    const int key = first + row_;
    const int64_t block = block_of(key);
    const int in_block = (key & mask()) * kHeadDim + column_;
    const E4m3* from[2] = {keys_ + block * a_.k_block_stride + in_block,
                           values_ + block * a_.v_block_stride + in_block};
    const int other = row_ % 2 == 0 ? kHeadDim : -kHeadDim;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        copy_async(&shared_.numbers.raw[slot][half][i][threadIdx.x],
                   from[half] + (i / kSlices) * other + i % kSlices * kSwizzleColumns, true);
  }
  /// A scale of that tile: of a key, of threads from 64 on of a value; anything of what no row
  /// sees.
  __device__ float load_scale(int first) const {
    const int key = first + static_cast<int>(threadIdx.x) % kTileKeys;
    const int64_t block = block_of(key);
    const E4m3* part = threadIdx.x < kTileKeys ? keys_ + block * a_.k_block_stride
                                               : values_ + block * a_.v_block_stride;
    return reinterpret_cast<const float*>(part + (mask() + 1) * kHeadDim)[key & mask()];
  }
  /// The keys of a raw slot become those of a stage, elements in the order of widen_e4m3().
  __device__ void widen_keys(int slot, int stage, float scale) const {
    uint4 raw[kPieces];
    take(raw, slot, 0);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint4 even, odd;
      widen(raw[i], even, odd);
      put(shared_.k[stage], i, even, odd);
    }
    if (threadIdx.x < kTileKeys) shared_.numbers.k_scale[stage][threadIdx.x] = scale;
  }
  /// The values, elements in their own order.
  __device__ void widen_values(int slot, int stage, float scale) const {
    uint4 raw[kPieces];
    take(raw, slot, 1);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      uint4 even, odd;
      widen(raw[i], even, odd);
      const auto first = [](uint32_t e, uint32_t o) { return __byte_perm(e, o, 0x5410); };
      const auto second = [](uint32_t e, uint32_t o) { return __byte_perm(e, o, 0x7632); };
      put(shared_.v[stage], i,
          {first(even.x, odd.x), second(even.x, odd.x), first(even.y, odd.y),
           second(even.y, odd.y)},
          {first(even.z, odd.z), second(even.z, odd.z), first(even.w, odd.w),
           second(even.w, odd.w)});
    }
    if (threadIdx.x < kTileKeys) return;
    shared_.numbers.v_scale[stage][threadIdx.x - kTileKeys] = scale;
    const bool is_odd = __any_sync(kFullMask, !(0.0f <= scale && scale <= 0x1.fffffep127f));
    if (threadIdx.x % kWarp == 0)
      shared_.numbers.has_odd_scale[stage][(threadIdx.x - kTileKeys) / kWarp] = is_odd;
  }

 private:
  __device__ int mask() const { return (1 << a_.block_shift) - 1; }
  /// Of a key, or of one that a row sees.
  __device__ int block_of(int key) const {
    return table_[min(max(key, first_key_), last_key_) >> a_.block_shift];
  }
  /// All of the thread's pieces at once: the stores of those before would keep the others waiting.
  __device__ void take(uint4 (&raw)[kPieces], int slot, int half) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) raw[i] = shared_.numbers.raw[slot][half][i][threadIdx.x];
  }
  __device__ static void widen(const uint4& raw, uint4& even, uint4& odd) {
    widen_e4m3(raw.x, even.x, odd.x);
    widen_e4m3(raw.y, even.y, odd.y);
    widen_e4m3(raw.z, even.z, odd.z);
    widen_e4m3(raw.w, even.w, odd.w);
  }
  /// Piece i's two units of 16 bytes, swizzled: unit u of row r is at u ^ r % 8.
  __device__ void put(Tile& tile, int i, const uint4& low, const uint4& high) const {
    char* const to = reinterpret_cast<char*>(&tile) + i % kSlices * sizeof(tile[0]);
    const int place = place_ ^ (i / kSlices) * (kSwizzleColumns * 2 + 16);  // of the row beside
    *reinterpret_cast<uint4*>(to + place) = low;
    *reinterpret_cast<uint4*>(to + (place ^ 16)) = high;
  }

  Shared& shared_;
  const PrefillArguments& a_;
  const int* table_;
  const E4m3 *keys_, *values_;  // of the item's head
  int first_key_, last_key_;
  int row_, column_;  // of the first piece; the other row is row_ ^ 1
  int place_;         // of its first unit, in bytes from the tile
};

/// By a warp whose lanes have written their part of a stage.
__device__ inline void hand_over(uint64_t* full) {
  fence_shared_for_async();
  __syncwarp();
  if (threadIdx.x % kWarp == 0) arrive(full);
}

/// Items of growing numbers, one after another, which it leaves to the others. By warp 0.
class ItemSource {
 public:
  __device__ explicit ItemSource(const PrefillArguments& a)
      : a_(a), finder_(a), index_(static_cast<int>(blockIdx.x)) {}
  /// Item n.
  template <class Shared>
  __device__ PrefillItem next(Shared& shared, int n) {
    const int slot = n % 2;
    const PrefillItem item = finder_.find(__shfl_sync(kFullMask, index_, 0));
    wait_barrier(&shared.item_empty[slot], (n / 2 + 1) % 2);
    if (threadIdx.x == 0) {
      shared.items[slot] = item;
      arrive(&shared.item_full[slot]);
      if (item.sequence >= 0) index_ = static_cast<int>(gridDim.x) + atomicAdd(&a_.counters[0], 1);
    }
    return item;
  }
  /// The last block leaves the counters as it found them.
  __device__ void end() const {
    if (threadIdx.x == 0 && atomicAdd(&a_.counters[1], 1) == static_cast<int>(gridDim.x) - 1) {
      a_.counters[0] = 0;
      a_.counters[1] = 0;
    }
  }

 private:
  const PrefillArguments& a_;
  ItemFinder finder_;
  int index_;
};

/// The first warpgroup: its warp 0 finds the items, and all fill the rings.
template <int kHeadDim>
__device__ void widen_items(PrefillShared<kHeadDim, E4m3>& shared, const PrefillArguments& a) {
  constexpr unsigned kStages = PrefillShared<kHeadDim, E4m3>::kStages;
  const bool finds = threadIdx.x < kWarp;
  ItemSource source(a);
  unsigned at = 0;
  for (int n = 0;; ++n) {
    const PrefillItem item = finds ? source.next(shared, n) : take_item(shared, n);
    if (item.sequence < 0) break;
    copy_item_queries<kConsumerThreads>(shared, a, item, n);
    const TileWidener<kHeadDim> widener(shared, a, item);
    int first = item.first_tile * kTileKeys;
    widener.copy(first, 0);
    commit_copies();
    float scale = widener.load_scale(first);
    for (int tile = item.first_tile; tile < item.end_tile; ++tile, ++at) {
      const int slot = (tile - item.first_tile) % 2;
      const float mine = scale;
      first += kTileKeys;
      if (tile + 1 < item.end_tile) {
        widener.copy(first, 1 - slot);
        scale = widener.load_scale(first);
      }
      commit_copies();
      wait_copies<1>();
      const unsigned stage = at % kStages, parity = (at / kStages + 1) % 2;
      wait_barrier(&shared.k_empty[stage], parity);
      widener.widen_keys(slot, static_cast<int>(stage), mine);
      hand_over(&shared.k_full[stage]);
      wait_barrier(&shared.v_empty[stage], parity);
      widener.widen_values(slot, static_cast<int>(stage), mine);
      hand_over(&shared.v_full[stage]);
    }
  }
  if (finds) source.end();
}

}  // namespace nanovllm
