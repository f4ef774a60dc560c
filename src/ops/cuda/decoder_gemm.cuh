// The matrix products of the decoder layers' kernel. A warp makes 8 outputs (and, where gated, the
// 8 that they are multiplied with) of all rows of the step: one chain of mma m16n8k16 over k in
// order, as in gemm_in_order.cu, which defines the bits. The rows of the step are the first of the
// 16 rows of A. The chain's latency, some 25 cycles a step, is what a product costs: operands are
// loaded two steps ahead.
#pragma once

#include "ops/cuda/decoder_layers.cuh"

namespace nanovllm::decoder {

/// The operands of two steps: half an atom. Rows 8 to 15 of A are the rows 0 to 7 again: nobody
/// looks at their products, and so ldmatrix gives A as mma wants it.
template <int kChains>
struct Fragments {
  uint32_t x[2][4], weights[kChains][4];

  /// `x_step`: from one step's x to the next's; `group_stride`: from one chain's weights to the
  /// next's; in bytes. The addresses are this lane's.
  __device__ void load(const unsigned char* from_x, int x_step, const unsigned char* from_weights,
                       int group_stride) {
    const auto read = [](uint32_t(&r)[4], const unsigned char* p) {
      load_matrices(r, reinterpret_cast<const __nv_bfloat16*>(p));
    };
    read(x[0], from_x);
#pragma unroll
    for (int j = 0; j < kChains; ++j) read(weights[j], from_weights + j * group_stride);
    read(x[1], from_x + x_step);
  }
  __device__ void multiply(float (&c)[kChains][4]) const {
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int j = 0; j < kChains; ++j)
        mma_m16n8k16(c[j], x[step], weights[j][2 * step], weights[j][2 * step + 1]);
  }
};

/// c = operand x weights^T for this warp's group(s) of a tile, through the ring's next stages.
/// kAtoms of them, which divide those of a stage and of the tile, make a straight run: one warp
/// alone has nothing to hide branches behind but the chain itself.
template <int kHeadDim, int kChains, int kAtoms>
__device__ void multiply(Worker<kHeadDim>& w, const MatrixCut& cut, int thread,
                         float (&c)[kChains][4]) {
  const int lane = thread % kWarp, warp = thread / kWarp, x_step = 32 * w.a.rows;
  const unsigned char* x = w.operand + (lane / 16 * w.a.rows + min(lane % 8, w.a.rows - 1)) * 16;
  const int atom_bytes = cut.groups * kAtomBytes, group_stride = atom_bytes / kChains;
  // The copy engine's pattern: a row's 16-byte unit u lies at u ^ row. The second half of an atom
  // is four units on.
  const int own = warp * kAtomBytes + lane % 8 * 128;
  const int units[2] = {(lane / 8 ^ lane % 8) * 16, (4 + lane / 8 ^ lane % 8) * 16};
  const int runs = cut.atoms / kAtoms, stage_runs = cut.stage_atoms / kAtoms;
  const uint32_t share = kWarps / cut.warps + (warp < kWarps % cut.warps);

  w.ring.wait_full(w.ring.next);
  const unsigned char* weights = w.ring.at(w.ring.next) + own;
  int left = stage_runs;  // of the stage, this run included
  Fragments<kChains> first, second;
  first.load(x, x_step, weights + units[0], group_stride);
#pragma unroll 1
  for (int run = 1; run <= runs; ++run) {
    const Ring::Place here = w.ring.next;
    const bool last = run == runs, ends = last || --left == 0;
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
      second.load(x + 2 * x_step, x_step, weights + units[1], group_stride);
      first.multiply(c);
      x += 4 * x_step;
      weights += atom_bytes;
      if (atom + 1 == kAtoms && ends) {
        w.ring.advance();
        if (!last) w.ring.wait_full(w.ring.next);
        weights = last ? weights - atom_bytes : w.ring.at(w.ring.next) + own;
        x = last ? x - 4 * x_step : x;  // something that is there
        left = stage_runs;
      }
      first.load(x, x_step, weights + units[0], group_stride);
      second.multiply(c);
    }
    // After mma has taken what ldmatrix brought.
    if (ends && lane == 0) w.ring.release(here, share);
  }
}

__device__ inline float with_bias(float value, const __nv_bfloat16* bias, int column) {
  const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
  if (!bias) return to_float(rounded);
  return to_float(__float2bfloat16_rn(to_float(rounded) + to_float(bias[column])));
}

/// This thread's two outputs, of `row` from `column` on, to the other blocks, or, of the last
/// product, into x.
template <int kHeadDim, int kChains>
__device__ void emit(const Worker<kHeadDim>& w, const MatrixCut& cut, int row, int column,
                     const float (&c)[kChains][4]) {
  if (row >= w.a.rows || column >= cut.columns) return;
  const __nv_bfloat16* bias = w.of_layer(cut.bias);
  float value[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    value[e] = with_bias(c[0][e], bias, column + e);
    if constexpr (kChains == 2)  // elementwise.cu's silu_and_mul
      value[e] =
          value[e] / (1.0f + expf(-value[e])) * with_bias(c[1][e], bias, cut.columns + column + e);
  }
  const uint32_t pair = pack_bf16(value[0], value[1]);
  if (&cut == &w.a.cuts[kDown] && w.layer + 1 == w.a.layers)
    *reinterpret_cast<uint32_t*>(w.a.x + row * w.a.x_stride + column) = pair;
  else
    send(w.a.words + cut.words + (int64_t{row} * cut.columns + column) / 2, tagged(pair, w.epoch));
}

/// The block's tiles of one product; kChains 2: gated. Warps without a group only keep count.
template <int kHeadDim, int kChains>
__device__ void project(Worker<kHeadDim>& w, int product) {
  const int thread = this_thread(), warp = thread / kWarp;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < w.a.cuts[product].tiles; tile += gridDim.x) {
    if (warp < w.a.cuts[product].warps) {
      float c[kChains][4] = {};
      const MatrixCut& mine = w.a.cuts[product];
      if (kChains == 1 && mine.run_atoms == 8)
        multiply<kHeadDim, kChains, kChains == 1 ? 8 : 1>(w, mine, thread, c);
      else if (mine.run_atoms == 4)
        multiply<kHeadDim, kChains, 4>(w, mine, thread, c);
      else if (mine.run_atoms == 2)
        multiply<kHeadDim, kChains, 2>(w, mine, thread, c);
      else
        multiply<kHeadDim, kChains, 1>(w, mine, thread, c);
      const MatrixCut& cut = w.a.cuts[anew(product)];
      emit<kHeadDim, kChains>(w, cut, thread % kWarp / 4,
                              (tile * cut.warps + warp) * 8 + thread % 4 * 2, c);
    } else {
      w.ring.advance(w.a.cuts[product].stages);
    }
  }
  w.together();  // the operand has been read
}

}  // namespace nanovllm::decoder
