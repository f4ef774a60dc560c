// The warp of the decode kernel that copies: keys, values and queries, from the cache to the ring.
#pragma once

#include "ops/cuda/attention/attention_decode_work.cuh"

namespace nanovllm {

/// The cache as the copy engine sees it: [blocks, KV heads, block size, head_dim], in boxes of 128
/// bytes of many keys for tiles that are seen whole, of few for others. Unused before sm_90.
struct DecodeMaps {
  CUtensorMap k, v, k_few, v_few;
};
/// The keys of a box. Copying takes about 70 ns a box, however small.
__host__ __device__ constexpr int box_keys(int block_shift, bool is_whole) {
  const int most = is_whole ? kTileKeys : kFewKeys;
  return most < 1 << block_shift ? most : 1 << block_shift;
}
/// How many arrivals fill a stage: with the copy engine one, which tells how many bytes come, and
/// one of each lane for the scales of E4M3.
#if __CUDA_ARCH__ >= 900
template <class C>
constexpr int kFullArrivals = is_e4m3<C> ? kWarp + 1 : 1;
#else
template <class C>
constexpr int kFullArrivals = kWarp;
#endif

/// The queries of a pair, by `threads` threads; rows past the group become zeros.
template <int kHeadDim, int kRows>
__device__ void copy_queries(const DecodeArguments& a, const UnitWalk& walk,
                             __nv_bfloat16 (*rows)[query_pitch(kHeadDim)], int thread,
                             int threads) {
  const __nv_bfloat16* from =
      a.q + walk.keys.row * a.q_token_stride + walk.at.head * a.group * a.q_head_stride;
  for (int part = thread; part < kRows * kHeadDim; part += threads) {
    const int row = part / (kHeadDim / 8), element = part % (kHeadDim / 8) * 8;
    const bool valid = row < a.group;
    copy_async(rows[row] + element, valid ? from + row * a.q_head_stride + element : a.q, valid);
  }
}

/// Copies the tiles of one unit after another. Of keys that no row sees, some are copied, too, but
/// none from blocks of the cache that the sequence does not have.
template <int kHeadDim, class C>
class UnitCopier {
 public:
  using Tile = DecodeTile<kHeadDim, C>;
  using Scales = StageScales<C>;

  __device__ UnitCopier(const DecodeArguments& a, const DecodeMaps& maps) : a_(a), maps_(maps) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      constexpr int kOfKey = kHeadDim / Tile::kPart;
      const int piece = static_cast<int>(threadIdx.x) % kWarp + i * kWarp, key = piece / kOfKey % 8,
                unit = piece % kOfKey;
      place_[i] = (unit / 8 * kTileKeys + key) * static_cast<int>(sizeof(Tile::slice[0][0])) +
                  (unit % 8 ^ key) * 16;
    }
  }

  /// In lane i: where keys 8i .. 8i + 7 of the unit's chunk are, if the sequence has them.
  __device__ int find_block(const UnitWalk& walk) const {
    const UnitKeys unit(walk);
    const int lane = threadIdx.x % kWarp, key = walk.at.chunk * kChunk + 8 * lane;
    if (8 * lane >= unit.end) return 0;
    return a_.block_tables[walk.at.s * a_.table_stride + (key >> a_.block_shift)];
  }
  __device__ void begin(const UnitWalk& walk, int block) {
    at_ = walk.at;
    keys_end_ = walk.keys.end;
    block_ = block;
  }
  /// Before whatever this step's kernels have made is read.
  __device__ void wait_for_step() {
    if (!waited_) wait_for_previous();
    waited_ = true;
  }
  /// Whether the newest key is in tile `index` of the unit's chunk.
  __device__ bool has_newest(int index) const {
    return at_.chunk * kChunk + (index + 1) * kTileKeys >= keys_end_;
  }
  /// Tile `index` of the unit's chunk; beside keys all scales of the tile, for stage `stage`.
  template <bool is_key>
  __device__ void copy(Tile& tile, uint64_t* full, const UnitKeys& unit, int index, Scales& scales,
                       int stage) {
#if __CUDA_ARCH__ >= 900
    copy_boxes<is_key>(tile, full, unit, index * kTileKeys);
    if constexpr (is_e4m3<C>) {
      if (is_key) copy_scales(scales, stage, unit, index * kTileKeys);
      arrive_after_copies(full);
    }
#else
    copy_parts(tile, unit, index * kTileKeys, static_cast<const C*>(is_key ? a_.k : a_.v),
               is_key ? a_.k_block_stride : a_.v_block_stride,
               is_key ? a_.k_head_stride : a_.v_head_stride);
    if constexpr (is_key && is_e4m3<C>) copy_scales(scales, stage, unit, index * kTileKeys);
    arrive_after_copies(full);
#endif
  }

 private:
  /// A box to a lane.
  template <bool is_key>
  __device__ void copy_boxes(Tile& tile, uint64_t* full, const UnitKeys& unit, int first) {
    const bool is_whole = unit.begin <= first && first + kTileKeys <= unit.end;
    const int lane = threadIdx.x % kWarp, keys = box_keys(a_.block_shift, is_whole);
    const int slice = lane % Tile::kSlices, row = lane / Tile::kSlices * keys, key = first + row;
    const bool mine = row < kTileKeys && key + keys > unit.begin && key < unit.end;
    const int block = __shfl_sync(kFullMask, block_, key / 8);
    const int boxes = __popc(__ballot_sync(kFullMask, mine));
    // The row's own key, its sequence's last, may be the work of the kernel before; the others have
    // been in the cache since earlier steps.
    if (at_.chunk * kChunk + first + kTileKeys >= keys_end_) wait_for_step();
    if (lane == 0) arrive_expecting(full, boxes * keys * kSliceBytes);
    __syncwarp();
    if (mine)
      copy_box_once(
          tile.slice[slice][row],
          is_key ? (is_whole ? &maps_.k : &maps_.k_few) : (is_whole ? &maps_.v : &maps_.v_few),
          full, slice * Tile::kColumns, key & ((1 << a_.block_shift) - 1), at_.head, block);
  }
  /// Pieces of 16 bytes, straight code: one warp has to keep up with the SM's share of the memory.
  __device__ void copy_parts(Tile& tile, const UnitKeys& unit, int first, const C* cache,
                             int64_t block_stride, int64_t head_stride) const {
    const int lane = threadIdx.x % kWarp, mask = (1 << a_.block_shift) - 1;
    const int64_t offset =
        block_ * block_stride + at_.head * head_stride + int64_t{8 * lane & mask} * kHeadDim;
    char* const to = reinterpret_cast<char*>(&tile);
#pragma unroll
    for (int row = 0; row < kTileKeys; row += 8) {
      const C* from =
          cache + __shfl_sync(kFullMask, offset, (first + row) / 8) + lane * Tile::kPart;
      if (first + row + 8 <= unit.begin || first + row >= unit.end) continue;
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        if (kOfEight % kWarp == 0 || lane + i * kWarp < kOfEight)
          copy_async(to + place_[i] + row * sizeof(tile.slice[0][0]),
                     from + i * kWarp * Tile::kPart, true);
    }
  }

  /// Four scales a lane: of keys, and of their values. What no row sees may be left out.
  __device__ void copy_scales(Scales& scales, int stage, const UnitKeys& unit, int first) const {
    constexpr int kQuads = kTileKeys / 4;
    const int lane = threadIdx.x % kWarp, row = lane % kQuads * 4, key = first + row,
              size = 1 << a_.block_shift;
    const bool is_key = lane < kQuads;
    const int block = __shfl_sync(kFullMask, block_, key / 8);
    if (key + 4 <= unit.begin || key >= unit.end) return;
    const E4m3* from = static_cast<const E4m3*>(is_key ? a_.k : a_.v) +
                       block * (is_key ? a_.k_block_stride : a_.v_block_stride) +
                       at_.head * (is_key ? a_.k_head_stride : a_.v_head_stride) + size * kHeadDim +
                       (key & (size - 1)) * static_cast<int>(sizeof(float));
    copy_async(is_key ? &scales.k_scale[stage][row] : &scales.v_scale[stage][row], from, true);
  }

  const DecodeArguments& a_;
  const DecodeMaps& maps_;
  UnitPlace at_{};
  int keys_end_ = 0, block_ = 0;
  bool waited_ = false;
  /// Where the lane's pieces of eight keys go, in bytes from the first of them.
  static constexpr int kOfEight = 8 * kHeadDim / Tile::kPart,
                       kPieces = (kOfEight + kWarp - 1) / kWarp;
  int place_[kPieces];
};

/// Copies the units of a share and, where heads are ready, the queries of all pairs but the first.
/// By a whole warp.
template <int kHeadDim, int kRows, class Heads, class C>
__device__ void copy_units(const DecodeArguments& a, const DecodeMaps& maps, const DecodeWork& work,
                           DecodeTile<kHeadDim, C>* ring,
                           DecodeExchange<kHeadDim, kRows, C>& exchange) {
  const int lane = threadIdx.x % kWarp;
  UnitWalk walk(a, work, exchange.share);
  UnitCopier<kHeadDim, C> copier(a, maps);
  RingCursor place, query;
  const auto copy_tiles = [&](auto is_key, const UnitKeys& unit) {
    for (int i = 0; i < unit.tiles; ++i) {
      wait_barrier(&exchange.empty[place.stage], place.parity ^ 1);
      if constexpr (kMakesHeads<Heads> && is_key)
        if (copier.has_newest(unit.first_tile + i))
          wait_barrier(&exchange.stored[query.stage], query.parity);
      copier.template copy<is_key>(ring[place.stage], &exchange.full[place.stage], unit,
                                   unit.first_tile + i, exchange, place.stage);
      place = place.plus(1, work.stages);
    }
  };
  if (!kMakesHeads<Heads>) arrive(&exchange.query_full[0]);  // who computes fetches the first
  int block = exchange.share.blocks[lane];
  for (UnitPlace before = walk.at; !walk.done();) {
    if (!same_pair(walk.at, before)) {
      query = query.plus(1, kDecodeQueries);
      if constexpr (!kMakesHeads<Heads>) {
        copier.wait_for_step();
        wait_barrier(&exchange.query_empty[query.stage], query.parity ^ 1);
        copy_queries<kHeadDim, kRows>(a, walk, exchange.query[query.stage], lane, kWarp);
        arrive_after_copies(&exchange.query_full[query.stage]);
      }
    }
    before = walk.at;
    const UnitKeys unit(walk);
    copier.begin(walk, block);
    walk.advance();
    copy_tiles(std::true_type{}, unit);
    if (!walk.done()) block = copier.find_block(walk);  // is there when it is needed
    copy_tiles(std::false_type{}, unit);
  }
  commit_copies();
  wait_copies<0>();
}

}  // namespace nanovllm
