// The matrix products of the decoder layers' kernel. One warpgroup makes a tile of outputs of all
// rows of the step: one chain of wgmma k16 over k in order, which gives the bits of
// gemm_in_order.cu (wgmma.cuh). Weights are the 64 rows of A, the rows of the step the 8 columns of
// B: a chain's step then takes 19 cycles however many outputs the tile has (as B's columns, 48 of
// them took 30). The chain's latency is what a product costs; so a run of it is straight code, and
// what can be done before the operand is there or after the outputs are gone is done then: a lone
// warp takes five cycles for each instruction, and tens for a branch.
#pragma once

#include "ops/cuda/decoder_layers.cuh"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/gemm_wgmma.cuh"

namespace nanovllm::decoder {

/// Of the warp that brings weights, one thread: a tile's, from row `row` of a matrix on. `calm`:
/// its stages of which `most` are on their way at once; of the others, `later`.
__device__ inline void bring_tile(Ring& ring, const CUtensorMap* map, const MatrixCut& cut, int row,
                                  int matrix, int calm, int most, int later) {
  for (int atom = 0; atom < cut.atoms; atom += cut.stage_atoms, --calm) {
    const Ring::Place place = ring.claim(calm > 0 ? most : later);
    arrive_expecting(&ring.full[place.stage], cut.groups * cut.stage_atoms * kAtomBytes);
    copy_box_once(ring.at(place), map, &ring.full[place.stage], 0, row, 0, atom, matrix);
  }
}

/// Of a lane: of the outputs 16 warp + lane / 4 and 8 further on, of the rows lane % 4 * 2 and the
/// next.
using Sums = float[1][4];

/// Names the operand from `address` on: eight rows, of which those behind the step's are whatever
/// lies there. The next 16 elements of k are 2 a.rows further on.
__device__ __forceinline__ uint32_t describe_operand(const Arguments& a, uint32_t address) {
  return static_cast<uint32_t>(a.rows) << 16 | address >> 4;
}

/// Down's first atoms of activations: by the warps that do not multiply, while gate_up goes on. The
/// first lane of each asks rarely, since memory is busy.
template <int kHeadDim>
__device__ __forceinline__ void gather_early(const Worker<kHeadDim>& w) {
  constexpr int kAsksEvery = 1000;  // ns
  const MatrixCut& cut = w.a.cuts[kDown];
  const int total = cut.early_atoms * (kAtomDepth / 4), lane = threadIdx.x % kWarp;
  if (total == 0 || blockIdx.x >= cut.tiles) return;
#pragma unroll 1
  for (int i = this_thread() - kMultiplying * kWarp; i < total; i += kGathering) {
    const uint64_t* from = inbox(w.a, w.a.cuts[kGateUp].words + i * 2);
    WordPair pair{};
    if (lane == 0)
      for (pair.read(from); !pair.there(w.epoch); pair.read(from)) __nanosleep(kAsksEvery);
    __syncwarp();
    while (!pair.there(w.epoch)) pair.read(from);
    (&reinterpret_cast<uint2&>(w.operand_at(cut, 0, i / 2 * 8)))[i % 2] =
        uint2{static_cast<uint32_t>(pair.first), static_cast<uint32_t>(pair.second)};
  }
  fence_shared_for_async();
  __syncwarp();
  if (lane == 0) arrive(&w.shared.early);
}

/// Where a product is: in its operand, and in the ring (atoms of the stage ring.next).
struct Progress {
  Ring ring;
  uint32_t x;
  int inside;
};

/// The stage of an atom, counted as the atom is from a stage's start on.
__device__ __forceinline__ int stage_of(const MatrixCut& cut, int atom) {
  return atom * cut.inverse >> kInverseBits;
}

/// c += weights x operand^T, of some atoms: straight code that waits for nothing. A lane each waits
/// for an atom before. At its end the chain is waited for, since around a loop whose products are
/// still under way the compiler waits for each of them. `waits`: for the operand; all that can be
/// is done before.
template <int kHeadDim, int kAtoms>
__device__ __forceinline__ void multiply_atoms(const Worker<kHeadDim>& w, const MatrixCut& cut,
                                               Progress& p, int lane, bool waits, bool last,
                                               Sums& c) {
  const int at = p.inside + min(lane, kAtoms - 1), stage = stage_of(cut, at),
            in_stage = at - stage * cut.atoms_that_fit;
  const Ring::Place place = p.ring.place(stage);
  p.ring.wait_full(place);
  __syncwarp();
  const uint32_t address = shared_address(p.ring.at(place)) + in_stage * cut.groups * kAtomBytes;
  uint32_t atoms[kAtoms];
#pragma unroll
  for (int i = 0; i < kAtoms; ++i) atoms[i] = __shfl_sync(kFullMask, address, i);
  if (waits) wait_barrier(&w.shared.ready, w.projected & 1);
  __syncwarp();
  const uint32_t step_of_x = 2 * w.a.rows;
  uint32_t x = __shfl_sync(kFullMask, p.x, 0);  // known to be the same in all lanes
  p.x += 4 * kAtoms * step_of_x;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kAtoms; ++i)
#pragma unroll
    for (int step = 0; step < 4; ++step, x += step_of_x)
      product<8>(c[0], tile_at(atoms[i]) + 2 * step, x);
  wgmma_commit();
  wgmma_wait<0>();
  const bool ends = in_stage + 1 == cut.atoms_that_fit || (last && lane == kAtoms - 1);
  if (lane < kAtoms && ends) p.ring.release(place, kWarps / kMultiplying);
  p.inside += kAtoms;
  const int passed = stage_of(cut, p.inside);
  p.ring.advance(passed);
  p.inside -= passed * cut.atoms_that_fit;
}

/// c = weights x operand^T of a tile, by the first four warps. All products of all tiles share this
/// code: what is run once a layer is not in the instruction cache.
template <int kHeadDim>
__device__ __forceinline__ void multiply(const Worker<kHeadDim>& w, const Ring& ring,
                                         const MatrixCut& cut, int lane, bool waits, Sums& c) {
  Progress p{ring, describe_operand(w.a, shared_address(w.operand) + cut.operand_at), 0};
  const int waits_at = waits ? cut.atoms - cut.early_atoms : -1;
  if (waits && cut.early_atoms > 0) wait_barrier(&w.shared.early, w.layer & 1);
#pragma unroll 1
  for (int left = cut.atoms; left > 0;) {
    if (left >= 16 && !cut.streams && cut.atoms - left >= cut.fine_atoms) {
      multiply_atoms<kHeadDim, 16>(w, cut, p, lane, left == waits_at, left == 16, c);
      left -= 16;
    } else if (left >= 4) {
      multiply_atoms<kHeadDim, 4>(w, cut, p, lane, left == waits_at, left == 4, c);
      left -= 4;
    } else {
      multiply_atoms<kHeadDim, 1>(w, cut, p, lane, left == waits_at, left == 1, c);
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

/// Where two outputs of a tile, of one row, go to: found before they are there.
struct Outlet {
  int at, column;   // the first one's place in the tile, in the row
  uint64_t* words;  // of the exchange
  const __nv_bfloat16* bias;

  /// Columns `at` and `at` + 1 of row `row`.
  template <int kHeadDim>
  __device__ void find(const Worker<kHeadDim>& w, const MatrixCut& cut, int tile, int row,
                       int at_column) {
    at = at_column;
    column = tile * cut.columns_of_tile + at;
    words = w.a.words + cut.words + (int64_t{row} * cut.columns + column) / 2;
    bias = w.of_layer(cut.bias);
    asm volatile("" : "+r"(at), "+r"(column), "+l"(words), "+l"(bias));
  }
};

/// Outputs of a tile from registers. A lane has column lane / 4 of its warp's sixteen, and the one
/// 8 further on; of these two lanes four apart exchange one, so that each has two in a row.
template <int kHeadDim>
__device__ __forceinline__ void emit(const Worker<kHeadDim>& w, int product, int lane,
                                     const Outlet& outlet, const Sums& c) {
  const MatrixCut& cut = w.a.cuts[product];
  const bool odd = lane / 4 % 2,
             present = outlet.at < cut.columns_of_tile && outlet.column < cut.columns;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (e >= w.a.rows) break;
    const int row = lane % 4 * 2 + e;
    const float other = __shfl_xor_sync(kFullMask, odd ? c[0][e] : c[0][2 + e], 4);
    if (!present || row >= w.a.rows) continue;
    const uint32_t pair =
        pack_bf16(with_bias(odd ? other : c[0][e], outlet.bias, outlet.column),
                  with_bias(odd ? c[0][2 + e] : other, outlet.bias, outlet.column + 1));
    uint64_t* const words = outlet.words + e * (cut.columns / 2);
    if (product == kDown && w.layer + 1 == w.a.layers)
      *reinterpret_cast<uint32_t*>(w.a.x + row * w.a.x_stride + outlet.column) = pair;
    else if (w.a.world > 1 && product != kQkv)
      send_to_ranks(w.a, product, words - (w.a.words + cut.words), pair, w.epoch);
    else
      w.send_all(words, pair);
  }
}

/// Of gate and up of a tile, which pass through shared memory: a thread then has both of two
/// outputs of a row.
template <int kHeadDim>
__device__ __forceinline__ void emit_gated(const Worker<kHeadDim>& w, int thread, int tile,
                                           int parity, Outlet& outlet, const Sums& c) {
  const MatrixCut& cut = w.a.cuts[kGateUp];
  const int lane = thread % kWarp, warp = thread / kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = lane % 4 * 2 + e;
      if (2 * warp + half < cut.groups && row < w.a.rows)
        w.shared.of_row[row].sums[parity][warp * 16 + half * 8 + lane / 4] = c[0][2 * half + e];
    }
  w.multiplied();
  const int pairs = cut.columns_of_tile / 2, total = w.a.rows * pairs;
#pragma unroll 1
  for (int i = thread; i < total; i += kMultiplying * kWarp) {
    if (i != thread) outlet.find(w, cut, tile, i / pairs, i % pairs * 2);
    if (outlet.column >= cut.columns) continue;
    const float* const gate = &w.shared.of_row[i / pairs].sums[parity][outlet.at];
    float value[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float up =
          with_bias(gate[cut.columns_of_tile + e], outlet.bias, cut.columns + outlet.column + e);
      value[e] = silu_times_straight(with_bias(gate[e], outlet.bias, outlet.column + e), up);
    }
    w.send_all(outlet.words, pack_bf16(value[0], value[1]));
  }
}

/// Outputs of a mixture's router: eight logits of one row, as they are.
template <int kHeadDim>
__device__ __forceinline__ void send_logits(const Worker<kHeadDim>& w, int tile, int warp, int lane,
                                            const Sums& c) {
  if (warp == 0 && lane % 4 == 0)
    w.send_all(w.a.words + w.a.mixture.logits_at + tile * 8 + lane / 4, __float_as_uint(c[0][0]));
}

/// The block's tiles of one product, of an operand that other warps are still writing. The first
/// warps multiply; the others only keep count, and wait until the operand has been read: they are
/// ready for the next one while the first still send.
template <int kHeadDim>
__device__ __forceinline__ void project(Worker<kHeadDim>& w, int product) {
  const int thread = this_thread();
  // Known to be the same in all lanes: addresses of weights are made once for a warp.
  const int warp = __shfl_sync(kFullMask, thread / kWarp, 0), lane = thread % kWarp;
  const int tiles = w.a.cuts[product].tiles;
  const bool absent = blockIdx.x >= tiles;
  __syncwarp();
  if (lane == 0 && !absent) arrive(&w.shared.ready);  // the warp's part of the operand is written
  if (warp >= kMultiplying || absent) {
    if (!absent)
      w.ring.advance(w.a.cuts[product].stages * ((tiles - blockIdx.x - 1) / gridDim.x + 1));
    if (product == kGateUp && warp >= kMultiplying) gather_early(w);
    if (product != kRouter) w.await_operand();  // the router's is gate_up's, too
    return;
  }
  int parity = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
    const MatrixCut& cut = w.a.cuts[product];
    Outlet outlet;
    if (product == kGateUp)
      outlet.find(w, cut, tile, thread / (cut.columns_of_tile / 2),
                  thread % (cut.columns_of_tile / 2) * 2);
    else
      outlet.find(w, cut, tile, lane % 4 * 2, warp * 16 + lane / 4 % 2 * 8 + lane / 8 * 2);
    const Ring ring = w.ring;
    w.ring.advance(cut.stages);
    Sums c = {};
    multiply(w, ring, cut, lane, tile == blockIdx.x, c);
    if (product == kRouter) {
      send_logits(w, tile, warp, lane, c);
      continue;
    }
    if (tile + gridDim.x >= tiles) w.leave_operand();
    if (product == kGateUp)
      emit_gated(w, thread, tile, parity, outlet, c);
    else
      emit(w, anew(product), lane, outlet, c);
  }
  w.projected ^= 1;
}

}  // namespace nanovllm::decoder
