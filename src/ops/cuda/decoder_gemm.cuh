// The matrix products of the decoder layers' kernel. One warpgroup makes a tile of outputs of all
// rows of the step: one chain of wgmma k16 over k in order, which gives the bits of
// gemm_in_order.cu (wgmma.cuh). Weights are the 64 rows of A, the rows of the step the 8 columns of
// B: a chain's step then takes 19 cycles however many outputs the tile has (as B's columns, 48 of
// them took 30). The chain's latency is what a product costs; so a run of it is straight code, and
// what can be done before the operand is there or after the outputs are gone is done then: a lone
// warp takes five cycles for each instruction, and tens for a branch.
#pragma once

#include "ops/cuda/decoder_layers.cuh"
#include "ops/cuda/gemm_wgmma.cuh"

namespace nanovllm::decoder {

/// Of a lane: of the outputs 16 warp + lane / 4 and 8 further on, of the rows lane % 4 * 2 and the
/// next.
using Sums = float[1][4];

/// Names the operand from `address` on: eight rows, of which those behind the step's are whatever
/// lies there. The next 16 elements of k are 2 a.rows further on.
__device__ __forceinline__ uint64_t describe_operand(const Arguments& a, uint32_t address) {
  return static_cast<uint32_t>(a.rows) << 16 | address >> 4;
}

/// Where a product is: in its operand, and in the ring (atoms of the stage ring.next).
struct Progress {
  Ring ring;
  uint64_t x;
  int inside;
};

/// c += weights x operand^T, of some atoms: straight code that waits for nothing. A lane each waits
/// for an atom before. At its end the chain is waited for, since around a loop whose products are
/// still under way the compiler waits for each of them. `barriers`: of all warps, between the
/// operand and now; all that can be is done before.
template <int kHeadDim, int kAtoms>
__device__ __forceinline__ void multiply_atoms(const Worker<kHeadDim>& w, const MatrixCut& cut,
                                               Progress& p, int lane, int barriers, bool last,
                                               Sums& c) {
  const int at = p.inside + min(lane, kAtoms - 1), in_stage = at & (1 << cut.stage_shift) - 1;
  const Ring::Place place = p.ring.place(at >> cut.stage_shift);
  p.ring.wait_full(place);
  __syncwarp();
  const uint32_t address = shared_address(p.ring.at(place)) + in_stage * cut.groups * kAtomBytes;
  uint32_t atoms[kAtoms];
#pragma unroll
  for (int i = 0; i < kAtoms; ++i) atoms[i] = __shfl_sync(kFullMask, address, i);
#pragma unroll 1
  for (; barriers > 0; --barriers) w.together();
  const uint32_t step_of_x = 2 * w.a.rows;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kAtoms; ++i)
#pragma unroll
    for (int step = 0; step < 4; ++step, p.x += step_of_x)
      product<8>(c[0], tile_at(atoms[i]) + 2 * step, p.x);
  wgmma_commit();
  wgmma_wait<0>();
  const bool ends = in_stage + 1 == 1 << cut.stage_shift || (last && lane == kAtoms - 1);
  if (lane < kAtoms && ends) p.ring.release(place, kWarps / kMultiplying);
  p.inside += kAtoms;
  p.ring.advance(p.inside >> cut.stage_shift);
  p.inside &= (1 << cut.stage_shift) - 1;
}

/// c = weights x operand^T of a tile, by the first four warps. All products of all tiles share this
/// code: what is run once a layer is not in the instruction cache.
template <int kHeadDim>
__device__ __forceinline__ void multiply(const Worker<kHeadDim>& w, const Ring& ring,
                                         const MatrixCut& cut, int lane, int barriers, Sums& c) {
  Progress p{ring, describe_operand(w.a, shared_address(w.operand)), 0};
#pragma unroll 1
  for (int left = cut.atoms; left > 0; barriers = 0) {
    if (left >= 16 && !cut.streams) {
      multiply_atoms<kHeadDim, 16>(w, cut, p, lane, barriers, left == 16, c);
      left -= 16;
    } else if (left >= 4) {
      multiply_atoms<kHeadDim, 4>(w, cut, p, lane, barriers, left == 4, c);
      left -= 4;
    } else {
      multiply_atoms<kHeadDim, 1>(w, cut, p, lane, barriers, left == 1, c);
      --left;
    }
  }
  pin(c);
}

__device__ inline float with_bias(float value, const __nv_bfloat16* bias, int column) {
  const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
  if (!bias) return to_float(rounded);
  return to_float(__float2bfloat16_rn(to_float(rounded) + to_float(bias[column])));
}

/// Where two outputs of a tile, of one row, come from and go to: found before they are there.
template <int kHeadDim>
struct Outlet {
  int at, column;  // of the tile, of the row
  const float* sums;
  uint64_t* words;
  const __nv_bfloat16* bias;

  /// The pair `index` of all the tile's.
  __device__ void find(const Worker<kHeadDim>& w, const MatrixCut& cut, int tile, int parity,
                       int index) {
    const int pairs = cut.columns_of_tile / 2, row = index / pairs;
    at = index % pairs * 2;
    column = tile * cut.columns_of_tile + at;
    sums = &w.shared.sums[parity][row % kMaxRows][at];
    words = w.a.words + cut.words + (int64_t{row} * cut.columns + column) / 2;
    bias = w.of_layer(cut.bias);
    asm volatile("" : "+r"(at), "+r"(column), "+l"(sums), "+l"(words), "+l"(bias));
  }
};

/// A tile's outputs to the other blocks, or, of the last product, into x. They pass through shared
/// memory: a thread then has two outputs of a row, and gate and up of them.
template <int kHeadDim>
__device__ __forceinline__ void emit(const Worker<kHeadDim>& w, int product, int thread, int tile,
                                     int parity, Outlet<kHeadDim>& outlet, const Sums& c) {
  const MatrixCut& cut = w.a.cuts[product];
  const int lane = thread % kWarp, warp = thread / kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = lane % 4 * 2 + e;
      if (2 * warp + half < cut.groups && row < w.a.rows)
        w.shared.sums[parity][row][warp * 16 + half * 8 + lane / 4] = c[0][2 * half + e];
    }
  w.multiplied();
  const int total = w.a.rows * cut.columns_of_tile / 2;
#pragma unroll 1
  for (int i = thread; i < total; i += kMultiplying * kWarp) {
    if (i != thread) outlet.find(w, cut, tile, parity, i);
    if (outlet.column >= cut.columns) continue;
    float value[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      value[e] = with_bias(outlet.sums[e], outlet.bias, outlet.column + e);
      if (product == kGateUp)  // elementwise.cu's silu_and_mul
        value[e] = value[e] / (1.0f + expf(-value[e])) *
                   with_bias(outlet.sums[cut.columns_of_tile + e], outlet.bias,
                             cut.columns + outlet.column + e);
    }
    const uint32_t pair = pack_bf16(value[0], value[1]);
    if (product == kDown && w.layer + 1 == w.a.layers) {
      const int row = i / (cut.columns_of_tile / 2);
      *reinterpret_cast<uint32_t*>(w.a.x + row * w.a.x_stride + outlet.column) = pair;
    } else if (w.a.world > 1 && (product == kOut || product == kDown)) {
      send_to_ranks(w.a, product, outlet.words - (w.a.words + cut.words), pair, w.epoch);
    } else {
      w.send_all(outlet.words, pair);
    }
  }
}

/// The block's tiles of one product, of an operand that other warps are still writing. The first
/// warps multiply; the others only keep count, and wait until the operand has been read: they are
/// ready for the next one while the first still send. `barriers`: of all warps, that the first have
/// to pass until the operand is there.
template <int kHeadDim>
__device__ __forceinline__ void project(Worker<kHeadDim>& w, int product, int barriers) {
  const int thread = this_thread();
  // Known to be the same in all lanes: addresses of weights are made once for a warp.
  const int warp = __shfl_sync(kFullMask, thread / kWarp, 0), lane = thread % kWarp;
  const int tiles = w.a.cuts[product].tiles;
  if (warp >= kMultiplying || blockIdx.x >= tiles) {
    w.together();
    if (blockIdx.x >= tiles) return;
    w.ring.advance(w.a.cuts[product].stages * ((tiles - blockIdx.x - 1) / gridDim.x + 1));
    w.await_operand();
    return;
  }
  int parity = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
    const MatrixCut& cut = w.a.cuts[product];
    Outlet<kHeadDim> outlet;
    outlet.find(w, cut, tile, parity, thread);
    const Ring ring = w.ring;
    w.ring.advance(cut.stages);
    Sums c = {};
    multiply(w, ring, cut, lane, tile == blockIdx.x ? barriers : 0, c);
    if (tile + gridDim.x >= tiles) w.leave_operand();
    emit(w, anew(product), thread, tile, parity, outlet, c);
  }
}

}  // namespace nanovllm::decoder
