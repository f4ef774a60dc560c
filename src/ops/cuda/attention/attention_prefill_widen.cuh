// Prefill on Hopper over a cache of E4M3: two warpgroups of a block fill the rings with tiles that
// have become bf16, as wgmma reads them, once for all rows of the item, one of keys and one of
// values. Each thread widens the pieces that it copied itself, a tile later, and so waits for no
// other. What no row sees may be any number: its score is masked, and its weight zero.
#pragma once

#include "ops/cuda/attention/attention_prefill_load.cuh"

namespace nanovllm {

/// A thread's pieces, 16 numbers each, of the tiles of keys or values of one item: of two
/// neighbouring rows, one in every slice of 64 elements. Eight neighbours have four pieces of two
/// rows, one even and one odd, whose places in a tile then meet no bank twice.
template <int kHeadDim, bool is_key>
class TileWidener {
 public:
  using Shared = PrefillShared<kHeadDim, E4m3>;
  using Tile = typename Shared::Tile;
  static constexpr int kSlices = kHeadDim / kSwizzleColumns, kPieces = 2 * kSlices;

  __device__ TileWidener(Shared& shared, const PrefillArguments& a) : shared_(shared), a_(a) {
    const int pair = thread() / 4, piece = thread() % 4;
    row_ = 2 * pair + pair % 2;
    column_ = piece * 16;
    place_ = row_ * kSwizzleColumns * 2 + (2 * piece ^ row_ % 8) * 16;
  }

  /// The next copies are of `item`.
  __device__ void begin(const PrefillItem& item) {
    table_ = a_.block_tables + item.sequence * a_.table_stride;
    cache_ = static_cast<const E4m3*>(is_key ? a_.k : a_.v) +
             item.kv_head * (is_key ? a_.k_head_stride : a_.v_head_stride);
    first_key_ = item.first_key;
    last_key_ = item.context_len - 1;
  }
  /// Begins to copy rows first .. first + 63 to raw slot `slot`; of what no row sees, whatever
  /// there is.
  __device__ void copy(int first, unsigned slot) const {
    const int key = first + row_;
    const E4m3* from = block_of(key) + (key & mask()) * kHeadDim + column_;
    const int other = row_ % 2 == 0 ? kHeadDim : -kHeadDim;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      copy_async(&raw(slot, i), from + (i / kSlices) * other + i % kSlices * kSwizzleColumns, true);
  }
  /// The scale of a row of that tile, in the first 64 threads; anything of what no row sees.
  __device__ float load_scale(int first) const {
    if (thread() >= kTileKeys) return 0.0f;
    const int key = first + thread();
    return reinterpret_cast<const float*>(block_of(key) + (mask() + 1) * kHeadDim)[key & mask()];
  }
  /// A raw slot becomes a stage of the ring: keys with elements in the order of widen_e4m3(),
  /// values in their own.
  __device__ void widen(unsigned slot, unsigned stage, float scale) const {
#pragma unroll
    for (int first = 0; first < kPieces; first += 2) {
      uint4 numbers[2];  // both at once: stores of the one before would keep the other waiting
#pragma unroll
      for (int i = 0; i < 2; ++i) numbers[i] = raw(slot, first + i);
#pragma unroll
      for (int i = 0; i < 2; ++i) widen_piece(numbers[i], stage, first + i);
    }
    if (thread() >= kTileKeys) return;
    auto& numbers_of = shared_.numbers;
    (is_key ? numbers_of.k_scale : numbers_of.v_scale)[stage][thread()] = scale;
    if constexpr (!is_key) {
      const bool is_odd = __any_sync(kFullMask, !(0.0f <= scale && scale <= 0x1.fffffep127f));
      if (thread() % kWarp == 0) numbers_of.has_odd_scale[stage].half[thread() / kWarp] = is_odd;
    }
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x) % kConsumerThreads; }
  __device__ int mask() const { return (1 << a_.block_shift) - 1; }
  /// The head's rows in the block of a key, or of one that a row sees.
  __device__ const E4m3* block_of(int key) const {
    const int block = table_[min(max(key, first_key_), last_key_) >> a_.block_shift];
    return cache_ + block * (is_key ? a_.k_block_stride : a_.v_block_stride);
  }
  __device__ uint4& raw(unsigned slot, int i) const {
    return shared_.numbers.raw[slot][is_key ? 0 : 1][i][thread()];
  }
  __device__ void widen_piece(const uint4& numbers, unsigned stage, int i) const {
    uint4 even, odd;
    widen_e4m3(numbers.x, even.x, odd.x);
    widen_e4m3(numbers.y, even.y, odd.y);
    widen_e4m3(numbers.z, even.z, odd.z);
    widen_e4m3(numbers.w, even.w, odd.w);
    if constexpr (is_key) {
      put(shared_.k[stage], i, even, odd);
    } else {
      const auto first = [](uint32_t e, uint32_t o) { return __byte_perm(e, o, 0x5410); };
      const auto second = [](uint32_t e, uint32_t o) { return __byte_perm(e, o, 0x7632); };
      put(shared_.v[stage], i,
          {first(even.x, odd.x), second(even.x, odd.x), first(even.y, odd.y),
           second(even.y, odd.y)},
          {first(even.z, odd.z), second(even.z, odd.z), first(even.w, odd.w),
           second(even.w, odd.w)});
    }
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
  const int* table_ = nullptr;
  const E4m3* cache_ = nullptr;  // of the item's head
  int first_key_ = 0, last_key_ = 0;
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

/// A warpgroup that fills the ring of keys or of values; next(n): item n. Copies run a tile ahead,
/// from one item into the next.
template <bool is_key, int kHeadDim, class Next>
__device__ void widen_items(PrefillShared<kHeadDim, E4m3>& shared, const PrefillArguments& a,
                            Next&& next) {
  constexpr unsigned kStages = PrefillShared<kHeadDim, E4m3>::kStages;
  TileWidener<kHeadDim, is_key> widener(shared, a);
  float scale = 0.0f;
  int tile = 0, end_tile = 0, n = 0;  // to be copied next; of item n - 1
  // Begins to copy a tile to a raw slot. False: there are no more.
  const auto copy_next = [&](unsigned slot) {
    if (tile == end_tile) {
      const PrefillItem item = next(n);
      if (item.sequence < 0) return false;
      widener.begin(item);
      tile = item.first_tile;
      end_tile = item.end_tile;
      if (!is_key) copy_item_queries<kConsumerThreads>(shared, a, item, n);
      ++n;
    }
    widener.copy(tile * kTileKeys, slot);
    scale = widener.load_scale(tile * kTileKeys);
    ++tile;
    return true;
  };
  bool is_there = copy_next(0);
  commit_copies();
  for (unsigned at = 0; is_there; ++at) {
    const float mine = scale;
    is_there = copy_next((at + 1) % 2);
    commit_copies();
    wait_copies<1>();
    const unsigned stage = at % kStages;
    wait_barrier(&(is_key ? shared.k_empty : shared.v_empty)[stage], (at / kStages + 1) % 2);
    widener.widen(at % 2, stage, mine);
    hand_over(&(is_key ? shared.k_full : shared.v_full)[stage]);
  }
}

/// The first warpgroup: its warp 0 finds the items, and all widen their keys.
template <int kHeadDim>
__device__ void widen_keys_of_items(PrefillShared<kHeadDim, E4m3>& shared,
                                    const PrefillArguments& a) {
  const bool finds = threadIdx.x < kWarp;
  ItemSource source(a);
  widen_items<true>(shared, a,
                    [&](int n) { return finds ? source.next(shared, n) : take_item(shared, n); });
  if (finds) source.end();
}

/// The last warpgroup: widens the items' values, and fetches their queries.
template <int kHeadDim>
__device__ void widen_values_of_items(PrefillShared<kHeadDim, E4m3>& shared,
                                      const PrefillArguments& a) {
  widen_items<false>(shared, a, [&](int n) { return take_item(shared, n); });
}

}  // namespace nanovllm
