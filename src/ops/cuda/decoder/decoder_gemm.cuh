// The products of the decoder layers' kernel: a block's tiles, and where their outputs go.
#pragma once

#include "ops/cuda/decoder/decoder_fp8.cuh"
#include "ops/cuda/decoder/decoder_int4.cuh"
#include "ops/cuda/decoder/decoder_ranks.cuh"
#include "ops/cuda/gemm/gated.cuh"

namespace nanovllm::decoder {

/// The first of the two rows of which a lane has outputs; from it to the second.
template <int kHeadDim>
__device__ __forceinline__ int row_of(const Worker<kHeadDim>& w, int product, int lane) {
  return w.has_pairs(w.a.cuts[product]) ? lane % 4 : lane % 4 * 2;
}
template <int kHeadDim>
__device__ __forceinline__ int row_apart(const Worker<kHeadDim>& w, int product) {
  return w.has_pairs(w.a.cuts[product]) ? 4 : 1;
}

/// Where two outputs of a tile go to, those of one row and those of the next: found before they are
/// there.
struct Outlet {
  int column;       // the first one's
  uint64_t* words;  // of the exchange, for the first row
  uint32_t biases;  // of both
  /// Bits: whether the first row's are needed; the next row's; whether there are biases; whether
  /// the words go to all blocks, and not elsewhere.
  uint32_t is;
  static constexpr uint32_t kBiased = 4, kPlain = 8;

  /// Of a lane: columns 16 warp + lane / 4 and the next, or those 8 further on, of two rows; of
  /// gate_up, and of a tile in which a warp has eight columns, 8 warp + lane / 4 and the next, of
  /// one.
  template <int kHeadDim>
  __device__ void find(const Worker<kHeadDim>& w, int product, int tile, int warp, int lane,
                       bool narrow = false) {
    const Arguments& a = w.a;
    const MatrixCut& cut = a.cuts[product];
    const int odd = lane / 4 % 2, even_column = lane / 8 * 2;
    // emit_gated(), emit_halves()
    const bool gated = narrow || product == kGateUp || is_in_halves(w, product);
    const int at = gated ? warp * 8 + even_column : warp * 16 + odd * 8 + even_column,
              apart = row_apart(w, product),
              row = row_of(w, product, lane) + (gated && odd ? apart : 0);
    column = tile * cut.columns_of_tile + at;
    words = a.words + cut.words + (int64_t{row} * cut.columns + column) / 2;
    const bool present = at < cut.columns_of_tile && column < cut.columns,
               ends = product == kDown && w.layer + 1 == a.layers,
               sums = !w.one_rank && a.world > 1 && (product == kOut || product == kDown);
    is = present ? (row < w.rows() ? 1 : 0) | (row + apart < w.rows() ? 2 : 0) : 0;
    if (!ends && !sums) is |= kPlain;
    biases = 0;
    if (const __nv_bfloat16* bias = w.of_layer(cut.bias); !w.alone && bias && product != kGateUp) {
      is |= kBiased;
      if (present) biases = *reinterpret_cast<const uint32_t*>(bias + column);
    }
    find_now(column);
    find_now(words);
    find_now(biases);
    find_now(is);
  }
};

/// A pair of outputs of a row to where they go, if that is not to all blocks.
template <int kHeadDim>
__device__ __forceinline__ void send_elsewhere(const Worker<kHeadDim>& w, int product, int row,
                                               const Outlet& outlet, uint64_t* words,
                                               uint32_t pair) {
  if (w.one_rank || (product == kDown && w.layer + 1 == w.a.layers))
    *reinterpret_cast<uint32_t*>(w.a.x + row * w.a.x_stride + outlet.column) = pair;
  else
    send_to_ranks(w.a, product, words - (w.a.words + w.a.cuts[product].words), pair, w.epoch);
}

/// Outputs of a tile from registers. A lane has column lane / 4 of its warp's sixteen, and the one
/// 8 further on; of these two lanes four apart exchange one, so that each has two in a row.
template <int kHeadDim>
__device__ __forceinline__ void emit(const Worker<kHeadDim>& w, int product, int lane,
                                     const Outlet& outlet, const Sums& c) {
  const bool odd = lane / 4 % 2;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (e >= w.rows()) break;
    const float other = __shfl_xor_sync(kFullMask, odd ? c[0][e] : c[0][2 + e], 4);
    uint32_t pair = pack_bf16(odd ? other : c[0][e], odd ? c[0][2 + e] : other);
    if (!w.alone && outlet.is & Outlet::kBiased) {
      const float2 values = unpack(pair), biases = unpack(outlet.biases);
      pair = pack_bf16(values.x + biases.x, values.y + biases.y);
    }
    if (!(outlet.is >> e & 1)) continue;
    uint64_t* const words =
        e == 0 ? outlet.words
               : outlet.words + row_apart(w, product) * w.a.cuts[product].columns / 2;
    // A mixture's down has an end of its own.
    if ((w.one_rank && w.mixture) || outlet.is & Outlet::kPlain)
      w.send_all(words, pair);
    else
      send_elsewhere(w, product, row_of(w, product, lane) + e * row_apart(w, product), outlet,
                     words, pair);
  }
}

/// Gate and up of a tile become one, and leave. A lane has column lane / 4 of its warp's eight,
/// gate and up, of two rows: of two lanes four apart one has both columns of the first row then,
/// the other those of the second.
template <int kHeadDim>
__device__ __forceinline__ void emit_gated(const Worker<kHeadDim>& w, int tile, int warp, int lane,
                                           const Outlet& outlet, const Sums& c) {
  const MatrixCut& cut = w.a.cuts[kGateUp];
  const bool odd = lane / 4 % 2;
  float2 gate = unpack(pack_bf16(c[0][0], c[0][1])), up = unpack(pack_bf16(c[0][2], c[0][3]));
  if (const __nv_bfloat16* bias = w.of_layer(cut.bias); !w.alone && bias) {
    const int column = min(tile * cut.columns_of_tile + warp * 8 + lane / 4, cut.columns - 1);
    const float of_gate = to_float(bias[column]), of_up = to_float(bias[cut.columns + column]);
    gate = unpack(pack_bf16(gate.x + of_gate, gate.y + of_gate));
    up = unpack(pack_bf16(up.x + of_up, up.y + of_up));
  }
  const float first = silu_times_straight(gate.x, up.x);
  float second = 0.0f;
  if (w.rows() > 1) second = silu_times_straight(gate.y, up.y);
  const float other = __shfl_xor_sync(kFullMask, odd ? first : second, 4);
  const uint32_t pair = pack_bf16(odd ? other : first, odd ? second : other);
  if (outlet.is & 1) w.send_all(outlet.words, pair);
}

/// Outputs of a tile in halves, or of one in which a warp has eight columns. A lane has column lane
/// / 4 of its warp's eight, of two rows, as emit_gated() has.
template <int kHeadDim>
__device__ __forceinline__ void emit_halves(const Worker<kHeadDim>& w, int product, int lane,
                                            const Outlet& outlet, float first, float second) {
  const bool odd = lane / 4 % 2;
  const float other = __shfl_xor_sync(kFullMask, odd ? first : second, 4);
  const uint32_t pair = pack_bf16(odd ? other : first, odd ? second : other);
  if (!(outlet.is & 1)) return;
  if (outlet.is & Outlet::kPlain)
    w.send_all(outlet.words, pair);
  else
    send_elsewhere(w, product, row_of(w, product, lane) + odd * row_apart(w, product), outlet,
                   outlet.words, pair);
}

/// The same of the sums of both halves, of columns in turns: a lane has the first half of a row and
/// the second.
template <int kHeadDim, int kSums>
__device__ __forceinline__ void add_halves(const Worker<kHeadDim>& w, int product, int lane,
                                           const Outlet& outlet, const float (&sums)[kSums][4]) {
  const auto sum = [&](int i) {
    const uint32_t pair = pack_bf16(sums[i][0], sums[i][3]);
    return low_of(pair) + high_of(pair);
  };
  emit_halves(w, product, lane, outlet, sum(0), kSums > 1 ? sum(kSums - 1) : 0.0f);
}

/// Of a BesideWorker.
template <int kHeadDim, int kSums>
__device__ __forceinline__ void emit_beside(const Worker<kHeadDim>& w, int product, int tile,
                                            int warp, int lane, const Outlet& outlet,
                                            const float (&sums)[kSums][4]) {
  if (is_in_halves(w, product)) return add_halves(w, product, lane, outlet, sums);
  const auto go = [&](const Sums& c) {
    if (product == kGateUp)
      emit_gated(w, tile, warp, lane, outlet, c);
    else
      emit(w, product, lane, outlet, c);
  };
  if constexpr (kSums == 1)
    go(sums);
  else
    go({{sums[0][0], sums[1][0], sums[0][2], sums[1][2]}});
}

/// Outputs of a mixture's router: eight logits of one row, as they are.
template <int kHeadDim>
__device__ __forceinline__ void send_logits(const Worker<kHeadDim>& w, int tile, int warp, int lane,
                                            float logit) {
  if (warp == 0 && lane % 4 == 0)
    w.send_all(w.a.words + w.a.mixture.logits_at + tile * 8 + lane / 4, __float_as_uint(logit));
}

/// project() of a warp that does not multiply, or of a block without a tile: it only keeps count.
template <class Worker>
__device__ __forceinline__ void pass(Worker& w, int product, int warp, bool absent) {
  const MatrixCut& cut = w.a.cuts[product];
  if (!absent) w.ring.advance(cut.stages * (w.lean ? 1 : tiles_of_block(cut.tiles)));
  if (product == kGateUp && warp >= kMultiplying) gather_early(w);
  // The router's is gate_up's, too; qkv's is left alone until after attention. Of int4 weights the
  // first warps may come here while more than a warpgroup still multiplies the product before: they
  // must not come twice to the barrier at which those are awaited.
  if (Worker::kIsInt4 && absent && product != kRouter)
    w.together();
  else if (product != kRouter && (product != kQkv || absent))
    w.await_operand();
}

/// The block's tiles of one product, of an operand that other warps are still writing. The first
/// warps multiply; the others only keep count, and wait until the operand has been read: they are
/// ready for the next one while the first still send.
template <class Worker>
__device__ __forceinline__ void project(Worker& w, int product) {
  const int thread = this_thread();
  // Known to be the same in all lanes: addresses of weights are made once for a warp.
  const int warp = __shfl_sync(kFullMask, thread / kWarp, 0), lane = thread % kWarp;
  const int tiles = w.a.cuts[product].tiles;
  const bool absent = blockIdx.x >= tiles;
  if (warp >= w.multiplying(product) || absent) return pass(w, product, warp, absent);
  // Of E4M3 weights, the scales of a tile, asked for long before they are needed; of many short
  // tiles, while the one before is multiplied.
  const auto scales_of = [&](int tile) -> float2 {
    if constexpr (Worker::kIsFp8)
      if (!Worker::kHasExperts || (tile < tiles && product != kRouter))
        return weight_scales(w, w.a.cuts[product], product, tile, warp, lane,
                             Worker::kHasTokens ? 0 : lane);
    return {};
  };
  float2 scales{};
  if constexpr (Worker::kIsFp8)
    if (Worker::kHasExperts) {
      if (product == kGateUp) wait_barrier(&w.shared.chosen_all, w.layer & 1);
      scales = scales_of(blockIdx.x);
    }
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const MatrixCut& cut = w.a.cuts[product];
    Outlet outlet;
    if constexpr (!Worker::kIsInt4) outlet.find(w, product, tile, warp, lane);
    const Ring ring = w.ring;
    w.ring.advance(cut.stages);
    float sums[Worker::kSums][4] = {};
    const bool gathered = product == kOut || product == kDown;
    const auto multiply_plain = [&] {
      multiply(w, ring, cut, lane,
               w.lean && gathered             ? Waits::parts
               : w.lean || tile == blockIdx.x ? Waits::all
                                              : Waits::no,
               sums);
    };
    if constexpr (Worker::kIsFp8) {
      const float2 of_tile = Worker::kHasExperts ? scales : scales_of(tile);
      if (Worker::kHasExperts) scales = scales_of(tile + gridDim.x);
      if (Worker::kHasExperts && product == kRouter)
        multiply_held(w, ring, cut, lane, Waits::all, sums);
      else
        multiply_fp8(w, ring, cut, product, tile, warp, lane, of_tile, sums);
    } else if constexpr (Worker::kIsInt4) {
      if (Worker::kHasExperts && product == kRouter)
        multiply_held(w, ring, cut, lane, Waits::all, sums);
      else
        multiply_int4(w, ring, cut, product == kGateUp, warp, lane, tile == blockIdx.x, sums);
      outlet.find(w, product, tile, warp, lane, is_narrow(cut, product == kGateUp));
    } else {
      multiply_plain();
    }
    if (product == kRouter) {
      send_logits(w, tile, warp, lane, sums[0][0]);
      continue;
    }
    if ((w.lean || tile + gridDim.x >= tiles) && (!Worker::kIsInt4 || warp < kMultiplying))
      w.leave_operand();
    if constexpr (Worker::kIsBeside) {
      emit_beside(w, product, tile, warp, lane, outlet, sums);
    } else if (Worker::kIsInt4 && is_in_halves(w, product)) {
      add_halves(w, product, lane, outlet, sums);
    } else if (Worker::kIsInt4 && is_narrow(cut, product == kGateUp)) {
      emit_halves(w, product, lane, outlet, sums[0][0], sums[0][1]);
    } else {
      const Sums& c = first_of(sums);
      if (product == kGateUp)
        emit_gated(w, tile, warp, lane, outlet, c);
      else
        emit(w, product, lane, outlet, c);
    }
    if (w.lean) return;
  }
  // Warps that multiply besides are among the others again: attend() waits for qkv's.
  if (Worker::kIsInt4 && warp >= kMultiplying && product != kQkv) w.await_operand();
}

}  // namespace nanovllm::decoder
