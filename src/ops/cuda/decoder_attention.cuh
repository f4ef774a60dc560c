// Attention of the decoder layers' kernel: one unit is the query heads of one KV head of one row
// over one chunk of 256 keys. The arithmetic is that of attention.cuh's other kernels, spread over
// sixteen warps: a warp scores 16 keys for all heads of the group, and later makes 8 of the
// output's columns.
#pragma once

#include "ops/cuda/decoder_layers.cuh"

namespace nanovllm::decoder {

/// Key `row` of a tile in shared memory, the 16 bytes from element `column` on: boxes of up to 64
/// keys, each half (64 elements) of a box by itself, in the copy engine's 128-byte pattern.
template <int kHeadDim>
__device__ __nv_bfloat16* key_in_tile(unsigned char* tile, uint32_t box_shift, uint32_t row,
                                      uint32_t column) {
  const uint32_t box = row >> box_shift, in_box = row & ((1u << box_shift) - 1);
  const uint32_t line = (box * (kHeadDim / 64) + column / 64 << box_shift) + in_box;
  return reinterpret_cast<__nv_bfloat16*>(tile + line * 128 +
                                          ((column % 64 / 8 ^ (in_box % 8)) * 16));
}

template <int kHeadDim>
struct UnitWorker {
  Worker<kHeadDim>& w;
  const Unit& unit;
  const int thread = this_thread(), lane = thread % kWarp, warp = thread / kWarp;
  const int box_shift = min(w.a.block_shift, 6);
  const int tiles = unit.tiles(), first_key = unit.first_tile() * kTileKeys;
  const bool has_new_key = unit.position / kChunk == unit.chunk;

  __device__ Ring::Place key_place(int tile) const { return w.ring.place(tile); }
  __device__ Ring::Place value_place(int tile) const { return w.ring.place(tiles + tile); }

  using HeadPart = Packed;  // of a head: lane i has the elements 8i ..

  /// Head `head` of the row's q, k, v as the projection made it.
  __device__ HeadPart receive_head(int head) const {
    const MatrixCut& qkv = w.a.cuts[kQkv];
    const int64_t first = qkv.words + (int64_t{unit.row} * qkv.columns + head * kHeadDim) / 2;
    HeadPart values{};
    if (lane * 8 < kHeadDim) values = Eight{}.receive(w.a.words + first + lane * 4, w.epoch);
    __syncwarp();
    return values;
  }

  /// Normalises a head, as rotary.cu does.
  __device__ void normalise_head(HeadPart& x, const HeadPart& weight) const {
    const float reciprocal = reciprocal_rms(warp_sum(add_squares(0.0f, x)), kHeadDim, w.a.eps);
    normalise(x, reciprocal, weight);
  }

  /// Rotates it. Both halves of the rotated part are whole lanes.
  __device__ void rotate_head(HeadPart& x) const {
    const int half = w.a.half_rotary, lanes = half / 8;
    const bool is_first = lane < lanes;
    const float* table = w.shared.cos_sin[unit.row] + (is_first ? lane : lane - lanes) * 8;
    HeadPart other;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      other.pair[i] = __shfl_sync(kFullMask, x.pair[i], is_first ? lane + lanes : lane - lanes);
    if (lane >= 2 * lanes) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 mine = unpack(x.pair[i]), partner = unpack(other.pair[i]);
      const auto turn = [&](float of_mine, float of_partner, int element) {
        const Pair turned = rotate(is_first ? of_mine : of_partner, is_first ? of_partner : of_mine,
                                   table[element], table[half + element]);
        return is_first ? turned.first : turned.second;
      };
      x.pair[i] = pack_bf16(turn(mine.x, partner.x, 2 * i), turn(mine.y, partner.y, 2 * i + 1));
    }
  }

  /// The new key or value: into the cache, and into the tile that was read from there before.
  __device__ void store_new(const HeadPart& x, __nv_bfloat16* cache, Ring::Place place) const {
    const int slot = w.shared.slot[unit.row], c = lane * 8;
    if (c < kHeadDim && slot >= 0) {
      const int64_t block = slot >> w.a.block_shift, offset = slot & ((1 << w.a.block_shift) - 1);
      *reinterpret_cast<HeadPart*>(
          cache + ((block * w.a.kv_heads + unit.kv_head << w.a.block_shift) + offset) * kHeadDim +
          c) = x;
    }
    w.ring.wait_full(place);
    if (c < kHeadDim)
      *reinterpret_cast<HeadPart*>(
          key_in_tile<kHeadDim>(w.ring.at(place), box_shift, unit.position % kTileKeys, c)) = x;
    fence_shared_for_async();
  }

  /// Values that no query sees are multiplied by 0, and must be finite: the last tile's end and,
  /// of a window, the first one's start.
  __device__ void clear_values() const {
    const auto clear = [&](int tile, int begin, int end) {
      if (begin >= end) return;
      const Ring::Place place = value_place(tile);
      w.ring.wait_full(place);
      for (int i = lane; i < (end - begin) * (kHeadDim / 8); i += kWarp)
        *reinterpret_cast<uint4*>(key_in_tile<kHeadDim>(
            w.ring.at(place), box_shift, begin + i / (kHeadDim / 8), i % (kHeadDim / 8) * 8)) =
            uint4{};
    };
    if (has_new_key) clear(tiles - 1, unit.position % kTileKeys + 1, kTileKeys);
    clear(0, 0, unit.low - first_key);
    fence_shared_for_async();
  }

  /// Warps 0 .. group have the query heads, the next two the new key and value.
  __device__ void prepare() const {
    const Arguments& a = w.a;
    const int role = warp - a.group;  // below 0: a query head; 0: the key; 1: the value
    if (role < 0 || (role < 2 && has_new_key)) {
      const __nv_bfloat16* norm = role < 1 ? w.of_layer(role < 0 ? a.q_norm : a.k_norm) : nullptr;
      HeadPart weight{};
      if (norm && lane * 8 < kHeadDim) weight = load_early(norm + lane * 8);
      HeadPart x = receive_head(role < 0 ? unit.kv_head * a.group + warp
                                         : a.heads + role * a.kv_heads + unit.kv_head);
      if (norm) normalise_head(x, weight);
      if (role < 1) rotate_head(x);
      if (role >= 0)
        store_new(x,
                  role == 0 ? a.k_cache + w.layer * a.k_layer_stride
                            : a.v_cache + w.layer * a.v_layer_stride,
                  role == 0 ? key_place(tiles - 1) : value_place(tiles - 1));
      else if (lane * 8 < kHeadDim)
        *reinterpret_cast<HeadPart*>(&w.shared.attention.q[warp][lane * 8]) = x;
    } else if (warp == kWarps - 1) {
      clear_values();
    }
  }

  /// Of this warp's 16 keys: scores[j][e] of row lane / 4 and key 8j + lane % 4 * 2 + e.
  __device__ void multiply_keys(float (&scores)[2][4]) const {
    const int group = warp % 4;
    const Ring::Place place = key_place(warp / 4);
    // A step of 16 elements further is two units of 16 bytes: those bits of the address change.
    const unsigned char* first = reinterpret_cast<const unsigned char*>(key_in_tile<kHeadDim>(
        w.ring.at(place), box_shift, 16 * group + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8));
    const __nv_bfloat16* q = &w.shared.attention.q[lane % 8][lane / 8 * 8];
#pragma unroll
    for (int kk = 0; kk < kHeadDim; kk += 32) {
      uint32_t of_q[4];
      load_matrices(of_q, q + kk);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int at = kk + 16 * step;
        const uint32_t a[4] = {of_q[2 * step], 0, of_q[2 * step + 1], 0};
        uint32_t k[4];
        const uintptr_t half = reinterpret_cast<uintptr_t>(first) + (at / 64 << box_shift + 7);
        load_matrices(k, reinterpret_cast<const __nv_bfloat16*>(half ^ at % 64 * 2));
        mma_m16n8k16(scores[0], a, k[0], k[1]);
        mma_m16n8k16(scores[1], a, k[2], k[3]);
      }
    }
  }

  /// The scores of this warp's keys, masked; leaves their maximum. Tiles that the unit lacks are
  /// masked as a whole: no weight or sum need ask for them.
  __device__ void score(float (&scores)[2][4]) const {
    const int tile = warp / 4, group = warp % 4;
    const int last = min(unit.position, first_key + tiles * kTileKeys - 1);
    if (tile < tiles) multiply_keys(scores);
    float maximum = kMinusInfinity;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = first_key + tile * kTileKeys + 16 * group + 8 * j + lane % 4 * 2 + e;
        if (key < unit.low || key > last) scores[j][e] = kMinusInfinity;
        maximum = fmaxf(maximum, scores[j][e]);
      }
    maximum = quad_max(maximum);
    if (lane % 4 == 0) w.shared.attention.maximum[lane / 4][warp] = maximum;
  }

  /// The base of row lane / 4 for each tile, and the factors that it brings.
  struct Steps {
    float base[kChunkTiles], factor[kChunkTiles];
  };
  __device__ Steps steps() const {
    Steps result;
    float base = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < kChunkTiles; ++i) {
      const float4 m =
          *reinterpret_cast<const float4*>(&w.shared.attention.maximum[lane / 4][4 * i]);
      base = next_base(base, fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w)), w.a.scale_log2,
                       result.factor[i]);
      result.base[i] = base;
    }
    return result;
  }

  /// The weights of this warp's keys, for all to multiply, and their sum in each lane.
  __device__ void weigh(const float (&scores)[2][4], const Steps& steps) const {
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
#pragma unroll
    for (int j = 0; j < 2; ++j)
      *reinterpret_cast<uint32_t*>(
          &w.shared.attention.p[lane / 4][16 * warp + 8 * j + lane % 4 * 2]) =
          pack_bf16(weight[j][0], weight[j][1]);
    w.shared.attention.sum[warp][lane] =
        group_sum(weight[0][0], weight[0][1], weight[1][0], weight[1][1]);
  }

  /// This warp's eight columns of the values of each tile, ready to be multiplied: two steps of 16
  /// keys each in either half.
  using Values = uint32_t[kChunkTiles][2][4];
  __device__ void load_values(Values& values) const {
    if (warp >= kHeadDim / 8) return;
    unsigned char* const none = nullptr;
    const int64_t offsets[2] = {
        reinterpret_cast<int64_t>(key_in_tile<kHeadDim>(none, box_shift, lane, 8 * warp)),
        reinterpret_cast<int64_t>(key_in_tile<kHeadDim>(none, box_shift, 32 + lane, 8 * warp))};
#pragma unroll
    for (int i = 0; i < kChunkTiles; ++i) {
      if (i >= tiles) break;
      const Ring::Place place = value_place(i);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        load_matrices_transposed(values[i][half], reinterpret_cast<const __nv_bfloat16*>(
                                                      w.ring.at(place) + offsets[half]));
    }
  }

  /// Eight columns of the chunk's output, by the warps that have some. Where the row has no other
  /// chunk the output is merged: merging it into nothing would change nothing.
  __device__ void weigh_values(const Steps& steps, const Values& values) const {
    if (warp >= kHeadDim / 8) return;
    uint32_t weights[2][2][4];  // of this tile and the next
    const __nv_bfloat16* p = &w.shared.attention.p[lane % 8][lane / 8 * 8];
    const auto load = [&](int i) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        load_matrices(weights[i % 2][half], p + i * kTileKeys + 32 * half);
    };
    load(0);
    float out[4] = {}, sum = 0.0f;
    const auto& part = w.shared.attention.sum;
#pragma unroll
    for (int i = 0; i < kChunkTiles; ++i) {
      if (i >= tiles) break;
      sum = __fmaf_rn(sum, steps.factor[i],
                      tile_sum(part[4 * i][lane], part[4 * i + 1][lane], part[4 * i + 2][lane],
                               part[4 * i + 3][lane]));
      if (i + 1 < kChunkTiles) load(i + 1);
#pragma unroll
      for (int e = 0; e < 2; ++e) out[e] = __fmul_rn(out[e], steps.factor[i]);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint32_t(&two)[4] = weights[i % 2][step / 2], (&v)[4] = values[i][step / 2];
        const uint32_t a[4] = {two[step % 2 * 2], 0, two[step % 2 * 2 + 1], 0};
        mma_m16n8k16(out, a, v[step % 2 * 2], v[step % 2 * 2 + 1]);
      }
    }
    sum = quad_sum(sum);
    if (lane / 4 >= w.a.group) return;
    const int column = 8 * warp + lane % 4 * 2, head = unit.kv_head * w.a.group + lane / 4;
    if (unit.chunks == 1) {
      send(w.a.words + w.a.heads_at + ((unit.row * w.a.heads + head) * kHeadDim + column) / 2,
           tagged(pack_bf16(finish(out[0], sum), finish(out[1], sum)), w.epoch));
      return;
    }
    const int64_t slot =
        (int64_t{unit.row} * w.a.heads + head) * w.a.max_chunks + unit.chunk - unit.first_chunk;
    if (column == 0)
      send(w.a.words + w.a.partial_sum_at + slot * 2,
           tagged(__float_as_uint(steps.base[kChunkTiles - 1]), w.epoch),
           tagged(__float_as_uint(sum), w.epoch));
    send(w.a.words + w.a.partial_at + slot * kHeadDim + column,
         tagged(__float_as_uint(out[0]), w.epoch), tagged(__float_as_uint(out[1]), w.epoch));
  }

  __device__ __forceinline__ void run() const {
    prepare();
    // One warp for each stage: whoever passes the barrier may read them all.
    if (warp < 2 * tiles) w.ring.wait_full(w.ring.place(warp));
    w.together();
    float scores[2][4] = {};
    score(scores);
    w.together();
    const Steps now = steps();
    weigh(scores, now);
    Values values = {};
    load_values(values);
    w.together();
    if (thread < tiles) w.ring.release(key_place(thread), kWarps);
    weigh_values(now, values);
    __syncwarp();
    if (lane < tiles) w.ring.release(value_place(lane), 1);
  }
};

/// Merges the chunks of the heads of one KV head in order: a thread has one element of a head.
template <int kHeadDim>
__device__ __forceinline__ void merge_chunks(Worker<kHeadDim>& w, const Unit& unit) {
  constexpr int kAtOnce = 4;
  const Arguments& a = w.a;
  const auto number = [](uint64_t word) { return __uint_as_float(static_cast<uint32_t>(word)); };
  for (int i = this_thread(); i < a.group * kHeadDim; i += kThreads) {
    const int head = unit.kv_head * a.group + i / kHeadDim, c = i % kHeadDim;
    const int64_t slot = (int64_t{unit.row} * a.heads + head) * a.max_chunks;
    const uint64_t *values = a.words + a.partial_at + slot * kHeadDim + c,
                   *sums = a.words + a.partial_sum_at + slot * 2;
    float out = 0.0f, base = kMinusInfinity, sum = 0.0f;
    for (int first = 0; first < unit.chunks; first += kAtOnce) {
      // Past the last chunk: one without a visible key, which changes nothing.
      uint64_t value[kAtOnce] = {};
      WordPair total[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) total[j] = {__float_as_uint(kMinusInfinity), 0};
      uint32_t missing = (1u << min(kAtOnce, unit.chunks - first)) - 1;
      while (missing) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (missing >> j & 1) {
            value[j] = read_word(values + (first + j) * kHeadDim);
            total[j].read(sums + (first + j) * 2);
          }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (has(value[j], w.epoch) && total[j].there(w.epoch)) missing &= ~(1u << j);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const Merge merge(base, sum, number(total[j].first), number(total[j].second), a.scale_log2);
        out = merge(out, number(value[j]));
        base = merge.base;
        sum = merge.sum;
      }
    }
    const float mine = finish(out, sum), other = __shfl_down_sync(kFullMask, mine, 1);
    if (c % 2 == 0)
      send(a.words + a.heads_at + ((int64_t{unit.row} * a.heads + head) * kHeadDim + c) / 2,
           tagged(pack_bf16(mine, other), w.epoch));
  }
}

/// The block's units, then the merges of those rows and heads whose first chunk it had: a block
/// waits for others only after it has given all that it owes.
template <int kHeadDim>
__device__ __forceinline__ void attend(Worker<kHeadDim>& w) {
  const int count = w.shared.units.count;
  Unit unit = w.shared.units.first;
  const auto find = [&](int i) {
    if (i > 0) unit.find(w.a, w.shared.context, w.layer, first_unit() + i * gridDim.x);
  };
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    find(i);
    const UnitWorker<kHeadDim> worker{w, unit};
    worker.run();
    w.ring.advance(2 * unit.tiles());
  }
  if (count > 1) unit = w.shared.units.first;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    find(i);
    if (unit.chunks > 1 && unit.chunk == unit.first_chunk) merge_chunks(w, unit);
  }
}

}  // namespace nanovllm::decoder
