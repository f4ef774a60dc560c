// Attention of the decoder layers' kernel: one unit is the query heads of one KV head of one row
// over one chunk of 256 keys. The arithmetic is that of attention.cuh's other kernels, spread over
// four warpgroups: each scores a tile of 64 keys for all heads of the group; later the first ones
// make 64 of the output's columns each. Keys, and columns of values, are rows of wgmma's A, heads
// the columns of its B.
#pragma once

#include "ops/cuda/decoder_merge.cuh"
#include "ops/cuda/gemm_wgmma.cuh"

namespace nanovllm::decoder {

/// Key `row` of a tile in shared memory, the 16 bytes from element `column` on: each half (64
/// elements) of the tile by itself, in the copy engine's 128-byte pattern.
__device__ inline __nv_bfloat16* key_in_tile(unsigned char* tile, uint32_t row, uint32_t column) {
  return reinterpret_cast<__nv_bfloat16*>(tile + (column / 64 * kTileKeys + row) * 128 +
                                          ((column % 64 / 8 ^ (row % 8)) * 16));
}

/// Names [8 columns][head][8] in shared memory: the next 16 columns are 16 further on.
__device__ inline uint32_t describe_heads(const void* p) {
  return 8u << 16 | shared_address(p) >> 4;
}

template <int kHeadDim>
struct UnitWorker {
  Worker<kHeadDim>& w;
  const Unit& unit;
  const int thread = this_thread(), lane = thread % kWarp, warp = thread / kWarp;
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
    if (lane * 8 < kHeadDim) values = Eight{}.receive(inbox(w.a, first + lane * 4), w.epoch);
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
    const float* table = w.shared.of_row[unit.row].cos_sin + (is_first ? lane : lane - lanes) * 8;
    HeadPart other;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      other.pair[i] = __shfl_sync(kFullMask, x.pair[i], is_first ? lane + lanes : lane - lanes);
    if (lane >= 2 * lanes) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 mine = unpack(x.pair[i]), partner = unpack(other.pair[i]);
      const auto turn = [&](float of_mine, float of_partner, float c, float s) {
        const Pair turned =
            rotate(is_first ? of_mine : of_partner, is_first ? of_partner : of_mine, c, s);
        return is_first ? turned.first : turned.second;
      };
      const float2 c = *reinterpret_cast<const float2*>(table + 2 * i),
                   s = *reinterpret_cast<const float2*>(table + half + 2 * i);
      x.pair[i] = pack_bf16(turn(mine.x, partner.x, c.x, s.x), turn(mine.y, partner.y, c.y, s.y));
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
      *reinterpret_cast<HeadPart*>(key_in_tile(w.ring.at(place), unit.position % kTileKeys, c)) = x;
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
        *reinterpret_cast<uint4*>(key_in_tile(w.ring.at(place), begin + i / (kHeadDim / 8),
                                              i % (kHeadDim / 8) * 8)) = uint4{};
    };
    if (has_new_key) clear(tiles - 1, unit.position % kTileKeys + 1, kTileKeys);
    clear(0, 0, unit.low - first_key);
    fence_shared_for_async();
  }

  /// The query heads are those warps' that did not multiply before, and go on; the next two have
  /// the new key and value, and the last one clears.
  __device__ void prepare() const {
    const Arguments& a = w.a;
    const int head = (warp + kWarps - kMultiplying) % kWarps;
    const int role = head - a.group;  // below 0: a query head; 0: the key; 1: the value
    if (role < 0 || (role < 2 && has_new_key)) {
      const __nv_bfloat16* norm = role < 1 ? w.of_layer(role < 0 ? a.q_norm : a.k_norm) : nullptr;
      HeadPart weight{};
      if (norm && lane * 8 < kHeadDim) weight = load_early(norm + lane * 8);
      HeadPart x = receive_head(role < 0 ? unit.kv_head * a.group + head
                                         : a.heads + role * a.kv_heads + unit.kv_head);
      if (norm) normalise_head(x, weight);
      if (role < 1) rotate_head(x);
      if (role >= 0)
        store_new(x,
                  role == 0 ? a.k_cache + w.layer * a.k_layer_stride
                            : a.v_cache + w.layer * a.v_layer_stride,
                  role == 0 ? key_place(tiles - 1) : value_place(tiles - 1));
      else if (lane * 8 < kHeadDim)
        w.shared.attention.q[lane][head] = x;
      fence_shared_for_async();
    } else if (head == kWarps - 1) {
      clear_values();
    }
  }

  /// Of this warp's 16 keys: scores[j][e] of row lane / 4 and key 8j + lane % 4 * 2 + e.
  __device__ void multiply_keys(float (&scores)[2][4]) const {
    const uint32_t tile = __shfl_sync(kFullMask, shared_address(w.ring.at(key_place(warp / 4))), 0);
    const uint64_t k = tile_at(tile);
    const uint32_t q = anew(describe_heads(&w.shared.attention.q));
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
        const int from = (lane % 4 * 2 + e) * 4 + lane / 8;
        const float even = __shfl_sync(kFullMask, c[0][2 * j], from),
                    odd = __shfl_sync(kFullMask, c[0][2 * j + 1], from);
        scores[j][e] = lane / 4 % 2 ? odd : even;
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
      w.shared.attention.p[2 * warp + j][lane / 4].pair[lane % 4] =
          pack_bf16(weight[j][0], weight[j][1]);
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
        sum = __fmaf_rn(sum, steps.factor[i],
                        tile_sum(part[4 * i][lane], part[4 * i + 1][lane], part[4 * i + 2][lane],
                                 part[4 * i + 3][lane]));
    return quad_sum(sum);
  }

  /// out += a tile of values x its weights. A: the values' transpose.
  __device__ static void multiply_tile(float (&out)[1][4], uint32_t values, uint32_t weights) {
    values = anew(values);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step)
      wgmma_columns_k16(out, uint64_t{0x40000040} << 32 | 1u << 16 | values + 128 * step,
                        weights + 16 * step);
  }

  /// The chunk's output, by the warpgroups that have columns of it: out[2 * h + e] is column
  /// lane / 4 + 8h of the warp's sixteen, of head lane % 4 * 2 + e.
  __device__ __forceinline__ void multiply_values(const Steps& steps, float (&out)[1][4]) const {
    const uint32_t first = __shfl_sync(kFullMask, w.ring.next.stage, 0) + tiles;
    const uint32_t p = anew(describe_heads(&w.shared.attention.p));
    uint32_t values[kChunkTiles];
    bool moves = false;
#pragma unroll
    for (int i = 0; i < kChunkTiles; ++i) {
      const uint32_t at = first + i, place = at < w.ring.stages ? at : at - w.ring.stages;
      values[i] = (shared_address(w.ring.data) / 16 + place * (kStageBytes / 16) +
                   warp / 4 * (kTileKeys * 128 / 16));
      moves |= i > 0 && i < tiles && steps.factor[i] != 1.0f;
    }
    moves = __any_sync(kFullMask, moves && lane / 4 < w.a.group);
    if (tiles == kChunkTiles && !moves) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kChunkTiles; ++i) multiply_tile(out, values[i], p + 64 * i);
      wgmma_commit();
      wgmma_wait<0>();
      pin(out);
    } else if (!moves) {
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) {
        const uint32_t at = first + i, place = at < w.ring.stages ? at : at - w.ring.stages;
        wgmma_fence();
        multiply_tile(out,
                      shared_address(w.ring.data) / 16 + place * (kStageBytes / 16) +
                          warp / 4 * (kTileKeys * 128 / 16),
                      p + 64 * i);
        wgmma_commit();
        wgmma_wait<0>();
        pin(out);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kChunkTiles; ++i) {
        if (i == tiles) break;
        if (i > 0) {  // before the first tile there is nothing to rescale
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float factor = __shfl_sync(kFullMask, steps.factor[i], (lane % 4 * 2 + e) * 4);
            out[0][e] = __fmul_rn(out[0][e], factor);
            out[0][2 + e] = __fmul_rn(out[0][2 + e], factor);
          }
        }
        pin(out);
        wgmma_fence();
        multiply_tile(out, values[i], p + 64 * i);
        wgmma_commit();
        wgmma_wait<0>();
        pin(out);
      }
    }
  }

  /// Of a head of the group, among the partial results.
  __device__ int64_t slot_of(int of_group) const {
    return (int64_t{unit.row} * w.a.heads + unit.kv_head * w.a.group + of_group) * w.a.max_chunks +
           unit.chunk - unit.first_chunk;
  }

  /// Sends the bases and sums of the chunk's rows: by a warp without columns of the output.
  __device__ void send_sums(const Steps& steps) const {
    const float sum = sum_weights(steps);
    if (lane % 4 == 0 && lane / 4 < w.a.group)
      send(w.a.words + w.a.partial_sum_at + slot_of(lane / 4) * 2,
           tagged(__float_as_uint(steps.base[kChunkTiles - 1]), w.epoch),
           tagged(__float_as_uint(sum), w.epoch));
  }

  /// Sends partial results or, where the row has no other chunk, merged ones: merging them into
  /// nothing would change nothing.
  __device__ void send_outputs(const Steps& steps, const float (&out)[1][4]) const {
    const int column = 16 * warp + lane / 4;
    const float sum = unit.chunks > 1 ? 0.0f : sum_weights(steps);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int of_group = lane % 4 * 2 + e;
      if (unit.chunks > 1) {
        uint64_t* to = w.a.words + w.a.partial_at + slot_of(of_group) * kHeadDim + column;
        if (of_group >= w.a.group) break;
        send(to, tagged(__float_as_uint(out[0][e]), w.epoch));
        send(to + 8, tagged(__float_as_uint(out[0][2 + e]), w.epoch));
        continue;
      }
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
    fence_shared_for_async();
    w.together();
    if (thread < tiles) w.ring.release(key_place(thread), kWarps);
    if (warp < kHeadDim / 16) {
      float out[1][4] = {};
      multiply_values(now, out);
      send_outputs(now, out);
    } else if (warp == kWarps - 1 && unit.chunks > 1) {
      send_sums(now);
    }
    __syncwarp();
    if (lane < tiles) w.ring.release(value_place(lane), 1);
  }
};

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
