// A unit of attention before its products, of the decoder layers' kernel: its stages of the ring,
// and in them the step's own key and value; the queries.
#pragma once

#include "ops/cuda/decoder/decoder_numbers.cuh"

namespace nanovllm::decoder {

/// Key `row` of a tile in shared memory, the 16 bytes from element `column` on: each half (64
/// elements) of the tile by itself, in the copy engine's 128-byte pattern.
__device__ inline __nv_bfloat16* key_in_tile(unsigned char* tile, uint32_t row, uint32_t column) {
  return reinterpret_cast<__nv_bfloat16*>(tile + (column / 64 * kTileKeys + row) * 128 +
                                          ((column % 64 / 8 ^ (row % 8)) * 16));
}

/// The tiles of a unit, and the heads that go with them. C: of the cache's elements.
template <int kHeadDim, class C>
struct UnitTiles {
  static constexpr int kLanes = HeadWorker<kHeadDim>::kLanes;
  Worker<kHeadDim>& w;
  const Unit& unit;
  const int lane = this_thread() % kWarp, warp = this_thread() / kWarp;
  const int tiles = unit.tiles(), first_key = unit.first_tile() * kTileKeys;
  const bool has_new_key = unit.position / kChunk == unit.chunk;

  __device__ RingCursor key_place(int tile) const { return w.ring.place(tile); }
  __device__ RingCursor value_place(int tile) const { return w.ring.place(tiles + tile); }

  // -- Query, new key and new value --

  /// Where this lane's part of the new key or value goes: the tile that was read from the cache
  /// before.
  __device__ HeadPart* new_in_tile(RingCursor place) const {
    w.ring.wait_full(place);
    return reinterpret_cast<HeadPart*>(
               key_in_tile(w.ring.at(place), unit.position % kTileKeys, lane % kLanes / 2 * 8)) +
           lane % 2;
  }
  /// The new key or value: into the cache, of which this step asks no more.
  __device__ void store_new(const HeadPart& x, bool is_key) const {
    const Arguments& a = w.a;
    const int slot = w.shared.slot[unit.row];
    if (lane >= kLanes || slot < 0) return;
    const int64_t block = slot >> a.block_shift, offset = slot & ((1 << a.block_shift) - 1);
    if constexpr (is_e4m3<C>)
      return store_numbers(w, x, is_key, block, unit.kv_head, static_cast<int>(offset), lane);
    __nv_bfloat16* const cache =
        is_key ? a.k_cache + w.layer * a.k_layer_stride : a.v_cache + w.layer * a.v_layer_stride;
    reinterpret_cast<HeadPart*>(
        cache + ((block * a.kv_heads + unit.kv_head << a.block_shift) + offset) * kHeadDim)[lane] =
        x;
  }

  /// Values that no query sees are multiplied by 0, and must be finite: the last tile's end and,
  /// of a window, the first one's start. By some warps, of which this is one.
  __device__ void clear_values(int of_these, int these) const {
    const auto clear = [&](int tile, int begin, int end) {
      if (begin >= end) return;
      const RingCursor place = value_place(tile);
      w.ring.wait_full(place);
      // A key's 16 bytes at a time, the same ones of each.
      constexpr int kOfKey = kHeadDim / 8, kKeys = kWarp / kOfKey;
      unsigned char* const data = w.ring.at(place);
#pragma unroll 1
      for (int key = begin + of_these * kKeys + lane / kOfKey; key < end; key += these * kKeys)
        *reinterpret_cast<uint4*>(key_in_tile(data, key, lane % kOfKey * 8)) = uint4{};
    };
    if (has_new_key) clear(tiles - 1, unit.position % kTileKeys + 1, kTileKeys);
    clear(0, 0, unit.low - first_key);
  }

  /// The warps with the new key and the new value: they have no columns of the output.
  static constexpr int kKeyWarp = kWarps - 3, kValueWarp = kWarps - 2;
  static_assert(kMultiplying + kMaxGroup <= kKeyWarp && kHeadDim / 16 <= kKeyWarp);

  /// The unit's numbers, but for the new row, which is not there yet. While the block multiplies
  /// qkv
  /// (`beside`; `waits`: for its end) the other warps begin with the stages of the round of the
  /// ring in which qkv's began: a barrier does not tell the next round from the one before.
  __device__ __forceinline__ void widen(bool beside, bool waits) const {
    constexpr int kOfStage = kTileKeys / 8;
    const MatrixCut& qkv = w.a.cuts[kQkv];
    const int all = 2 * tiles * kOfStage;
    int end = 0;
    if (beside)
      end = min(all, max(0, w.ring.stages - qkv.stages * tiles_of_block(qkv.tiles)) * kOfStage);
    int i = end > 0 ? warp - kMultiplying : warp, step = end > 0 ? kWarps - kMultiplying : kWarps;
#pragma unroll 1
    for (bool last = false;; last = true) {
#pragma unroll 1
      for (; i < end && i >= 0; i += step) {
        const int stage = i / kOfStage, row = i % kOfStage * 8;
        const RingCursor place = w.ring.place(stage);
        w.ring.wait_full(place);
        __syncwarp();
        const int first = first_key + (stage < tiles ? stage : stage - tiles) * kTileKeys + row;
        widen_rows<kHeadDim>(shared_address(w.ring.at(place)) + row * 128, unit.position - first,
                             lane);
      }
      if (last) return;
      if (waits) w.await_operand();
      i = end + warp, end = all, step = kWarps;
    }
  }

  /// Where this lane's part of a query, or of the new key or value, goes.
  __device__ uint32_t part_place(bool is_query, bool is_key, int head) const {
    const auto newest = [&] { return is_key ? key_place(tiles - 1) : value_place(tiles - 1); };
    if constexpr (is_e4m3<C>) {
      const int sixteen = lane % kLanes / 4;
      if (!is_query) w.ring.wait_full(newest());
      return shared_address(
                 is_query
                     ? reinterpret_cast<__nv_bfloat16*>(&w.shared.attention.q[2 * sixteen][head])
                     : key_in_tile(w.ring.at(newest()), unit.position % kTileKeys, 16 * sixteen)) +
             lane % 4 * 4;
    } else {
      return shared_address(
          is_query ? reinterpret_cast<HeadPart*>(&w.shared.attention.q[lane % kLanes / 2][head]) +
                         lane % 2
                   : new_in_tile(newest()));
    }
  }
  /// Puts it there; leaves what store_new() stores.
  __device__ HeadPart put_part(HeadPart x, uint32_t to, bool is_query, bool is_key) const {
    if constexpr (is_e4m3<C>) {
      uint32_t even, odd;
      if (is_query) {
        in_widened_order({x.pair[0], x.pair[1]}, even, odd);
      } else {
        const float* of_heads = is_key ? w.a.k_scales : w.a.v_scales;
        const int of_layer = w.layer * w.a.scales_layer_stride;
        x = quantise_part<kLanes>(x, of_heads ? of_heads[of_layer + unit.kv_head] : 0.0f);
        widen_e4m3(x.pair[0], even, odd);
        if (lane == 0) w.shared.attention.new_scale[!is_key] = __uint_as_float(x.pair[1]);
      }
      if (lane >= kLanes) return x;
      store_shared(to, even);
      store_shared(is_query ? to + sizeof w.shared.attention.q[0] : to ^ 16, odd);
    } else if (lane < kLanes) {
      store_shared(to, x.pair[0], x.pair[1]);
    }
    return x;
  }

  /// Whether values are waited for behind the scores: the ring has no room for two units, and the
  /// next one's keys are asked for when this one's have been read.
  __device__ bool waits_late() const { return w.many && !is_e4m3<C>; }
  /// The work that prepare() leaves for then, by the same warps.
  __device__ __forceinline__ void put_value(const HeadPart& x) const {
    const int of_these = warp - kMultiplying - w.a.group,
              these = kWarps - kMultiplying - w.a.group - 2;
    if (warp == kValueWarp && has_new_key) {
      HeadPart* const to = new_in_tile(value_place(tiles - 1));
      if (lane < kLanes) *to = x;
    } else if (of_these >= 0 && warp != kKeyWarp && warp != kValueWarp) {
      clear_values(warp < kKeyWarp ? of_these : these - 1, these);
    }
  }

  /// The query heads are the first of those warps' that did not multiply before, and go on; two
  /// have the new key and value, and the others clear. Leaves the new key or value.
  __device__ HeadPart prepare() const {
    const Arguments& a = w.a;
    const int head = warp - kMultiplying;
    const bool is_query = head >= 0 && head < a.group, is_key = warp == kKeyWarp;
    HeadPart x{};
    if (is_query || (has_new_key && (is_key || warp == kValueWarp))) {
      const __nv_bfloat16* norm = is_query ? a.q_norm : is_key ? a.k_norm : nullptr;
      const HeadWorker<kHeadDim> worker{w, unit.row, lane};
      typename HeadWorker<kHeadDim>::Turn turn{};
      uint2 weight{};
      if (is_query || is_key) turn = worker.find_turn();
      if (norm) weight = load_early_four(w.of_layer(norm) + lane % kLanes * 4);
      const bool is_put = is_query || is_key || !waits_late();
      uint32_t to = is_put ? part_place(is_query, is_key, head) : 0;
      find_now(to);
      const Packed eight =
          worker.receive(is_query ? unit.kv_head * a.group + head
                                  : a.heads + (is_key ? 0 : a.kv_heads) + unit.kv_head);
      x = worker.part_of(eight);
      if (norm) {
        const float reciprocal = worker.reciprocal_of(eight);
        x.pair[0] = normalised(x.pair[0], reciprocal, weight.x);
        x.pair[1] = normalised(x.pair[1], reciprocal, weight.y);
      }
      if (is_query || is_key) worker.rotate(x, turn);
      if (is_put) x = put_part(x, to, is_query, is_key);
    } else if (const int others = kWarps - kMultiplying - a.group - 2;
               !is_e4m3<C> && !waits_late() && head >= 0) {
      clear_values(warp < kKeyWarp ? head - a.group : others - 1, others);
    }
    return x;
  }
};

}  // namespace nanovllm::decoder
