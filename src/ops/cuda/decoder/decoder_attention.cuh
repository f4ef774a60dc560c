// Attention of the decoder layers' kernel: one unit is the query heads of one KV head of one row
// over one chunk of 256 keys. The arithmetic is that of attention.cuh's other kernels, spread over
// four warpgroups: each scores a tile of 64 keys for all heads of the group; later the first ones
// make 64 of the output's columns each. Keys, and columns of values, are rows of wgmma's A, heads
// the columns of its B. Over E4M3 sixteen elements of a head are in the order of widen_e4m3().
#pragma once

#include "ops/cuda/decoder/decoder_unit.cuh"
#include "ops/cuda/ptx/gemm_wgmma.cuh"

namespace nanovllm::decoder {

/// Names [8 columns][head][8] in shared memory: the next 16 columns are 16 further on.
__device__ inline uint32_t describe_heads(const void* p) {
  return static_cast<uint32_t>(anew(8u << 16 | shared_address(p) >> 4));
}

/// C: of the cache's elements.
template <int kHeadDim, class C>
struct UnitWorker : UnitTiles<kHeadDim, C> {
  using Tiles = UnitTiles<kHeadDim, C>;
  using Tiles::w, Tiles::unit, Tiles::lane, Tiles::warp, Tiles::tiles, Tiles::first_key,
      Tiles::has_new_key, Tiles::kKeyWarp, Tiles::kValueWarp;

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
    f.keys = __shfl_sync(kFullMask,
                         stages + this->key_place(min(warp / 4, tiles - 1)).stage *
                                      static_cast<uint32_t>(kStageBytes),
                         0);
#pragma unroll
    for (int i = 0; i < kChunkTiles; ++i) {
      const uint32_t place = this->value_place(min(i, tiles - 1)).stage;
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
    f.outlet = w.a.words + (has_columns ? w.a.partial_at + slot * kHeadDim + 16 * warp +
                                              lane / 4 * (is_e4m3<C> ? 2 : 1)
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

  /// Calls body(i, the scale of the lane's i-th key, or of its value): of numbers of E4M3.
  template <class Body>
  __device__ __forceinline__ void for_scales(int of_values, const Body& body) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 16 * warp + 8 * (i / 2) + lane % 4 * 2 + i % 2;
      body(i, first_key + key == unit.position ? w.shared.attention.new_scale[of_values]
                                               : w.shared.attention.scales[of_values][key]);
    }
  }

  /// The scores of this warp's keys, masked; leaves their maximum. Tiles that the unit lacks are
  /// masked as a whole: no weight or sum need ask for them.
  __device__ void score(const Found& f, float (&scores)[2][2]) const {
    if (warp / 4 < tiles) multiply_keys(f, scores);
    if constexpr (is_e4m3<C>)
      for_scales(0, [&](int i, float scale) {
        scores[i / 2][i % 2] = __fmul_rn(scores[i / 2][i % 2], scale);
      });
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
    w.shared.attention.sum[warp][lane] =
        group_sum(weight[0][0], weight[0][1], weight[1][0], weight[1][1]);
    if constexpr (is_e4m3<C>)
      for_scales(1, [&](int i, float scale) {
        weight[i / 2][i % 2] = scaled_weight(weight[i / 2][i % 2], scale);
      });
    // p[2 * warp + j][lane / 4].pair[lane % 4]
    auto* const p = reinterpret_cast<uint32_t*>(w.shared.attention.p) + 64 * warp + lane;
#pragma unroll
    for (int j = 0; j < 2; ++j) p[32 * j] = pack_bf16(weight[j][0], weight[j][1]);
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
  /// lane / 4 + 8h of the warp's sixteen, over E4M3 2 (lane / 4) + h, of head lane % 4 * 2 + e.
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
      send(to + (is_e4m3<C> ? 1 : 8), tagged(__float_as_uint(out[0][2 + e]), w.epoch));
    }
  }

  /// Sends merged results of a row that has no other chunk: merging them into nothing would change
  /// nothing.
  __device__ void send_outputs(const Steps& steps, const float (&out)[1][4]) const {
    const int column = 16 * warp + lane / 4 * (is_e4m3<C> ? 2 : 1);
    const float sum = sum_weights(steps);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int of_group = lane % 4 * 2 + e;
      const float of_head = __shfl_sync(kFullMask, sum, of_group * 4);
      const int head = unit.kv_head * w.a.group + of_group;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float mine = finish(out[0][2 * half + e], of_head);
        float other;
        if constexpr (is_e4m3<C>)
          other = finish(out[0][2 + e], of_head);
        else
          other = __shfl_down_sync(kFullMask, mine, 4);
        if (of_group < w.a.group && (is_e4m3<C> ? half == 0 : lane / 4 % 2 == 0))
          w.send_all(w.a.words + w.a.heads_at +
                         ((unit.row * w.a.heads + head) * kHeadDim + column + 8 * half) / 2,
                     pack_bf16(mine, other));
      }
    }
  }

  /// `beside`: this begins while the block makes qkv's product; `waits`: until that is made.
  __device__ __forceinline__ void run(bool beside, bool waits) const {
    if constexpr (is_e4m3<C>) {
      const int thread = this_thread() - kMultiplying * kWarp;
      const UnitScales<kHeadDim> scales(w, unit, first_key, thread);
      const Found found = find();
      this->widen(beside, waits);
      scales.copy(w, thread);
      multiply(found, this->prepare());
    } else {
      const Found found = find();
      if (waits) w.await_operand();
      multiply(found, this->prepare());
    }
  }

  /// The unit's products, of queries that are there.
  __device__ __forceinline__ void multiply(const Found& found, const HeadPart& prepared) const {
    if constexpr (is_e4m3<C>) wait_copies<0>();
    fence_shared_for_async();
    // One warp for each stage: whoever passes the barrier may read them all.
    if (warp < (this->waits_late() ? tiles : 2 * tiles)) w.ring.wait_full(w.ring.place(warp));
    w.together();
    float scores[2][2] = {};
    score(found, scores);
    w.together();
    if (warp == kWarps - 1 && lane < tiles) w.ring.release(this->key_place(lane), kWarps);
    const Steps now = steps();
    weigh(scores, now);
    if (this->waits_late()) {
      if (warp >= tiles && warp < 2 * tiles) w.ring.wait_full(w.ring.place(warp));
      this->put_value(prepared);
    }
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
      this->store_new(prepared, warp == kKeyWarp);
    __syncwarp();
    if (lane < tiles) w.ring.release(this->value_place(lane), 1);
  }
};

}  // namespace nanovllm::decoder
