// Attention of the decoder layers' kernel: one unit is the query heads of one KV head of one row
// over one chunk of 256 keys. The arithmetic is that of attention.cuh's other kernels, spread over
// four warpgroups: each scores a tile of 64 keys for all heads of the group; later the first ones
// make 64 of the output's columns each. Keys, and columns of values, are rows of wgmma's A, heads
// the columns of its B.
#pragma once

#include "ops/cuda/decoder/decoder_heads.cuh"
#include "ops/cuda/ptx/gemm_wgmma.cuh"

namespace nanovllm::decoder {

/// Key `row` of a tile in shared memory, the 16 bytes from element `column` on: each half (64
/// elements) of the tile by itself, in the copy engine's 128-byte pattern.
__device__ inline __nv_bfloat16* key_in_tile(unsigned char* tile, uint32_t row, uint32_t column) {
  return reinterpret_cast<__nv_bfloat16*>(tile + (column / 64 * kTileKeys + row) * 128 +
                                          ((column % 64 / 8 ^ (row % 8)) * 16));
}

/// Names [8 columns][head][8] in shared memory: the next 16 columns are 16 further on.
__device__ inline uint32_t describe_heads(const void* p) {
  return static_cast<uint32_t>(anew(8u << 16 | shared_address(p) >> 4));
}

template <int kHeadDim>
struct UnitWorker {
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
    __nv_bfloat16* const cache =
        is_key ? a.k_cache + w.layer * a.k_layer_stride : a.v_cache + w.layer * a.v_layer_stride;
    const int64_t block = slot >> a.block_shift, offset = slot & ((1 << a.block_shift) - 1);
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
      uint32_t to = shared_address(
          is_query ? reinterpret_cast<HeadPart*>(&w.shared.attention.q[lane % kLanes / 2][head]) +
                         lane % 2
                   : new_in_tile(is_key ? key_place(tiles - 1) : value_place(tiles - 1)));
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
      if (lane < kLanes) store_shared(to, x.pair[0], x.pair[1]);
    } else if (const int others = kWarps - kMultiplying - a.group - 2; head >= 0) {
      clear_values(warp < kKeyWarp ? head - a.group : others - 1, others);
    }
    return x;
  }

  // -- What is found before the words are there --

  struct Found {
    uint32_t keys;                 // this warp's tile of keys, as wgmma names it
    uint32_t values[kChunkTiles];  // the columns of this warp's warpgroup, of each tile
    uint32_t visible;              // of this lane's scores, a bit each
    int from;                      // the lane whose score it needs
    uint64_t* outlet;              // for partial results: its columns', or a row's base and sum
  };
  __device__ Found find() const {
    Found f;
    const uint32_t stages = shared_address(w.ring.data);
    f.keys = __shfl_sync(
        kFullMask,
        stages + key_place(min(warp / 4, tiles - 1)).stage * static_cast<uint32_t>(kStageBytes), 0);
#pragma unroll
    for (int i = 0; i < kChunkTiles; ++i) {
      const uint32_t place = value_place(min(i, tiles - 1)).stage;
      f.values[i] = __shfl_sync(
          kFullMask,
          stages / 16 + place * (kStageBytes / 16) + warp / 4 * (kTileKeys * 128 / 16) + (1u << 16),
          0);
    }
    const int last = min(unit.position, first_key + tiles * kTileKeys - 1);
    f.visible = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first_key + 16 * warp + 8 * (i / 2) + lane % 4 * 2 + i % 2;
      f.visible |= static_cast<uint32_t>(key >= unit.low && key <= last) << i;
    }
    f.from = lane % 4 * 8 + lane / 8;
    const bool has_columns = warp < kHeadDim / 16;
    const int slot = slot_of(has_columns ? lane % 4 * 2 : lane / 4);
    f.outlet = w.a.words + (has_columns ? w.a.partial_at + slot * kHeadDim + 16 * warp + lane / 4
                                        : w.a.partial_sum_at + slot * 2);
    find_now(f.keys);
#pragma unroll
    for (uint32_t& v : f.values) find_now(v);
    find_now(f.visible);
    find_now(f.from);
    find_now(f.outlet);
    return f;
  }

  /// Of a head of the group, among the partial results.
  __device__ int slot_of(int of_group) const {
    return (unit.row * w.a.heads + unit.kv_head * w.a.group + of_group) * w.a.max_chunks +
           unit.chunk - unit.first_chunk;
  }

  // -- Scores and weights --

  /// Of this warp's 16 keys: scores[j][e] of row lane / 4 and key 8j + lane % 4 * 2 + e.
  __device__ void multiply_keys(const Found& f, float (&scores)[2][2]) const {
    const uint64_t k = tile_at(f.keys), q = describe_heads(&w.shared.attention.q);
    float c[1][4] = {};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step)
      product<8>(c[0], k + step / 4 * (kTileKeys * 128 / 16) + step % 4 * 2, q + 16 * step);
    wgmma_commit();
    wgmma_wait<0>();
    pin(c);
    // A lane has key lane / 4 (and 8 further on) of the heads lane % 4 * 2 and the next.
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float even = __shfl_sync(kFullMask, c[0][2 * j], f.from + 4 * e),
                    odd = __shfl_sync(kFullMask, c[0][2 * j + 1], f.from + 4 * e);
        scores[j][e] = lane / 4 % 2 ? odd : even;
      }
  }

  /// The scores of this warp's keys, masked; leaves their maximum. Tiles that the unit lacks are
  /// masked as a whole: no weight or sum need ask for them.
  __device__ void score(const Found& f, float (&scores)[2][2]) const {
    if (warp / 4 < tiles) multiply_keys(f, scores);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(f.visible >> i & 1)) scores[i / 2][i % 2] = kMinusInfinity;
    const float maximum =
        quad_max(fmaxf(fmaxf(scores[0][0], scores[0][1]), fmaxf(scores[1][0], scores[1][1])));
    if (lane % 4 == 0) w.shared.attention.maximum[lane / 4][warp] = maximum;
  }

  /// The base of row lane / 4 for each tile: next_base(), without branches, and without the
  /// factors, of which most warps have no need.
  struct Steps {
    float base[kChunkTiles];
    bool moves[kChunkTiles];
  };
  __device__ Steps steps() const {
    Steps result;
    float maximum[kChunkTiles];
#pragma unroll
    for (int i = 0; i < kChunkTiles; ++i) {
      const float4 m =
          *reinterpret_cast<const float4*>(&w.shared.attention.maximum[lane / 4][4 * i]);
      maximum[i] = fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w));
    }
    float base = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < kChunkTiles; ++i) {
      const float excess = __fmul_rn(__fsub_rn(maximum[i], base), w.a.scale_log2);
      result.moves[i] = (excess > kBaseSlack) | (base == kMinusInfinity);
      result.base[i] = base = result.moves[i] ? maximum[i] : base;
    }
    return result;
  }
  __device__ float factor_of(const Steps& steps, int tile) const {
    const float before = tile > 0 ? steps.base[tile - 1] : kMinusInfinity;
    return steps.moves[tile] ? rescaling(before, finite_or_zero(steps.base[tile]), w.a.scale_log2)
                             : 1.0f;
  }

  /// The weights of this warp's keys, for all to multiply, and their sum in each lane.
  __device__ void weigh(const float (&scores)[2][2], const Steps& steps) const {
    const int tile = warp / 4;
    float base = steps.base[0];
#pragma unroll
    for (int i = 1; i < kChunkTiles; ++i)
      if (tile == i) base = steps.base[i];
    float weight[2][2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        weight[j][e] = weight_of(scores[j][e], finite_or_zero(base), w.a.scale_log2);
    // p[2 * warp + j][lane / 4].pair[lane % 4]
    auto* const p = reinterpret_cast<uint32_t*>(w.shared.attention.p) + 64 * warp + lane;
#pragma unroll
    for (int j = 0; j < 2; ++j) p[32 * j] = pack_bf16(weight[j][0], weight[j][1]);
    w.shared.attention.sum[warp][lane] =
        group_sum(weight[0][0], weight[0][1], weight[1][0], weight[1][1]);
  }

  /// The weights of a row: of each of its quad's lanes, tile by tile; then of all.
  __device__ float sum_weights(const Steps& steps) const {
    const auto& part = w.shared.attention.sum;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunkTiles; ++i)
      if (i < tiles)
        sum = __fmaf_rn(sum, factor_of(steps, i),
                        tile_sum(part[4 * i][lane], part[4 * i + 1][lane], part[4 * i + 2][lane],
                                 part[4 * i + 3][lane]));
    return quad_sum(sum);
  }

  // -- The chunk's output --

  /// out += a tile of values x its weights. A: the values' transpose.
  __device__ static void multiply_tile(float (&out)[1][4], uint32_t values, uint64_t weights) {
    const uint64_t a = uint64_t{0x40000040} << 32 | values;
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step)
      wgmma_columns_k16(out, a + 128 * step, weights + 16 * step);
  }

  /// Whether the base of a row moves behind the first tile.
  __device__ bool any_moves(const Steps& steps) const {
    bool moves = false;
#pragma unroll
    for (int i = 1; i < kChunkTiles; ++i) moves |= i < tiles && steps.moves[i];
    return __any_sync(kFullMask, moves && lane / 4 < w.a.group);
  }

  /// The chunk's output, by the warpgroups that have columns of it: out[2 * h + e] is column
  /// lane / 4 + 8h of the warp's sixteen, of head lane % 4 * 2 + e.
  __device__ __forceinline__ void multiply_values(const Found& f, const Steps& steps, bool straight,
                                                  float (&out)[1][4]) const {
    const uint64_t p = describe_heads(&w.shared.attention.p);
    if (straight) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kChunkTiles; ++i) multiply_tile(out, f.values[i], p + 64 * i);
      wgmma_commit();
      wgmma_wait<0>();
      pin(out);
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunkTiles; ++i) {
      if (i == tiles) break;
      if (i > 0) {  // before the first tile there is nothing to rescale
        const float of_row = factor_of(steps, i);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float factor = __shfl_sync(kFullMask, of_row, (lane % 4 * 2 + e) * 4);
          out[0][e] = __fmul_rn(out[0][e], factor);
          out[0][2 + e] = __fmul_rn(out[0][2 + e], factor);
        }
      }
      pin(out);
      wgmma_fence();
      multiply_tile(out, f.values[i], p + 64 * i);
      wgmma_commit();
      wgmma_wait<0>();
      pin(out);
    }
  }

  /// Sends the bases and sums of the chunk's rows: by a warp without columns of the output.
  __device__ void send_sums(const Found& f, const Steps& steps) const {
    const float sum = sum_weights(steps);
    if (lane % 4 == 0 && lane / 4 < w.a.group)
      send(f.outlet, tagged(__float_as_uint(steps.base[kChunkTiles - 1]), w.epoch),
           tagged(__float_as_uint(sum), w.epoch));
  }

  /// Sends partial results.
  __device__ void send_parts(const Found& f, const float (&out)[1][4]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (lane % 4 * 2 + e >= w.a.group) break;
      uint64_t* const to = f.outlet + (e == 0 ? 0 : w.a.max_chunks * kHeadDim);
      send(to, tagged(__float_as_uint(out[0][e]), w.epoch));
      send(to + 8, tagged(__float_as_uint(out[0][2 + e]), w.epoch));
    }
  }

  /// Sends merged results of a row that has no other chunk: merging them into nothing would change
  /// nothing.
  __device__ void send_outputs(const Steps& steps, const float (&out)[1][4]) const {
    const int column = 16 * warp + lane / 4;
    const float sum = sum_weights(steps);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int of_group = lane % 4 * 2 + e;
      const float of_head = __shfl_sync(kFullMask, sum, of_group * 4);
      const int head = unit.kv_head * w.a.group + of_group;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float mine = finish(out[0][2 * half + e], of_head),
                    other = __shfl_down_sync(kFullMask, mine, 4);
        if (of_group < w.a.group && lane / 4 % 2 == 0)
          w.send_all(w.a.words + w.a.heads_at +
                         ((unit.row * w.a.heads + head) * kHeadDim + column + 8 * half) / 2,
                     pack_bf16(mine, other));
      }
    }
  }

  /// `waits`: until qkv's product, beside which this begins, has been made.
  __device__ __forceinline__ void run(bool waits) const {
    const Found found = find();
    if (waits) w.await_operand();
    const HeadPart prepared = prepare();
    fence_shared_for_async();
    // One warp for each stage: whoever passes the barrier may read them all.
    if (warp < 2 * tiles) w.ring.wait_full(w.ring.place(warp));
    w.together();
    float scores[2][2] = {};
    score(found, scores);
    w.together();
    if (warp == kWarps - 1 && lane < tiles) w.ring.release(key_place(lane), kWarps);
    const Steps now = steps();
    weigh(scores, now);
    fence_shared_for_async();
    const bool straight = !any_moves(now) && tiles == kChunkTiles;
    w.together();
    if (warp < kHeadDim / 16) {
      float out[1][4] = {};
      multiply_values(found, now, straight, out);
      if (unit.chunks > 1)
        send_parts(found, out);
      else
        send_outputs(now, out);
    } else if (warp == kWarps - 1 && unit.chunks > 1) {
      send_sums(found, now);
    }
    // Late: the fences before would wait for it.
    if (has_new_key && (warp == kKeyWarp || warp == kValueWarp))
      store_new(prepared, warp == kKeyWarp);
    __syncwarp();
    if (lane < tiles) w.ring.release(value_place(lane), 1);
  }
};

}  // namespace nanovllm::decoder
