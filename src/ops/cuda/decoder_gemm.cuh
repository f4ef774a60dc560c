// The matrix products of the decoder layers' kernel. One warpgroup makes a tile of outputs of all
// rows of the step: one chain of wgmma k16 over k in order, which gives the bits of
// gemm_in_order.cu (wgmma.cuh). The rows of the step are rows of A; the others of its 64 are
// whatever lies in shared memory: nobody looks at their products. The chain's latency is what a
// product costs; so the code between two of its steps should be additions to addresses that the
// compiler knows to be the same in all lanes.
#pragma once

#include "ops/cuda/decoder_layers.cuh"
#include "ops/cuda/wgmma.cuh"

namespace nanovllm::decoder {

/// Of a lane: of 8 outputs each.
constexpr int kMostGroups = 6;
using Sums = float[kMostGroups][4];

/// Names weights in a stage; the next 16 elements of k are 2 further on.
__device__ inline uint64_t describe(uint32_t address) {
  return uint64_t{0x40000040} << 32 | 1u << 16 | address >> 4;
}

/// Names the operand from `address` on: a row of it is the first of eight rows of A, the other
/// seven being whatever lies behind it, 16 bytes further on each. The next 16 elements of k are 2
/// further on.
__device__ __forceinline__ uint64_t describe_operand(const Arguments& a, uint32_t address) {
  const uint32_t pitch = a.rows > 1 ? a.operand_pitch / 8 : 0;
  return uint64_t{pitch} << 32 | 1u << 16 | address >> 4;
}

/// c = operand x weights^T of a tile, through the stages from ring.next on, by the first four
/// warps. A run of stages is straight code that waits for nothing: its stages are waited for
/// before, by a lane each. At its end the chain is waited for, since around a loop whose products
/// are still under way the compiler waits for each of them.
template <int kHeadDim, int kGroups>
__device__ __forceinline__ void multiply(Worker<kHeadDim>& w, Ring ring, const MatrixCut& cut,
                                         int lane, Sums& c) {
  constexpr int kAtoms = atoms_of_stage(kGroups), kStages = most_run_stages(kGroups);
  static_assert(kAtoms * kGroups * kAtomBytes <= kStageBytes);
  uint32_t x_at = shared_address(w.operand);
  const int run = cut.run_stages;
  const auto weights_of = [&](int stage) {
    return describe(__shfl_sync(kFullMask, shared_address(ring.at(ring.place(stage))), 0));
  };
  for (int left = cut.atoms, stages = cut.stages; left > 0; left -= run * kAtoms, stages -= run) {
    const int mine = min(run, stages);
    if (lane < mine) ring.wait_full(ring.place(lane));
    __syncwarp();
    uint64_t next = weights_of(0);
    const uint64_t x = describe_operand(w.a, __shfl_sync(kFullMask, x_at, 0));
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage == mine) break;
      const uint64_t weights = next;
      if (stage + 1 < kStages) next = weights_of(stage + 1);
#pragma unroll
      for (int i = 0; i < kAtoms; ++i) {
        if (left == stage * kAtoms + i) break;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
          wgmma_rows_k16<kGroups>(c, x + 8 * (stage * kAtoms + i) + 2 * step,
                                  weights + i * kGroups * (kAtomBytes / 16) + 2 * step);
        wgmma_commit();
      }
    }
    wgmma_wait<0>();
    if (lane < mine) ring.release(ring.place(lane), kWarps / kMultiplying);
    ring.advance(mine);
    x_at += run * kAtoms * kAtomDepth * 2;
  }
  pin(c);
}

__device__ inline float with_bias(float value, const __nv_bfloat16* bias, int column) {
  const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
  if (!bias) return to_float(rounded);
  return to_float(__float2bfloat16_rn(to_float(rounded) + to_float(bias[column])));
}

/// A tile's outputs, from `column` on, to the other blocks, or, of the last product, into x. A warp
/// has two rows; the first four lanes have the sums, from which four lanes each take eight outputs.
template <int kHeadDim, int kGroups, bool kGated>
__device__ __forceinline__ void emit(const Worker<kHeadDim>& w, const MatrixCut& cut, int thread,
                                     int column, const Sums& c) {
  constexpr int kOutputs = kGated ? kGroups / 2 : kGroups;
  const int lane = thread % kWarp, group = lane / 4;
  const int first = column + group * 8 + lane % 4 * 2;
  const __nv_bfloat16* bias = w.of_layer(cut.bias);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread / kWarp * 2 + half;
    if (row >= w.a.rows) break;
    float value[2] = {}, factor[2] = {};
#pragma unroll
    for (int j = 0; j < kOutputs; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const auto take = [&](float from, float& to) {
          const float there = __shfl_sync(kFullMask, from, lane % 4);
          if (group == j) to = there;
        };
        take(c[j][2 * half + e], value[e]);
        if constexpr (kGated) take(c[j + kOutputs][2 * half + e], factor[e]);
      }
    if (group >= kOutputs || first >= cut.columns) continue;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      value[e] = with_bias(value[e], bias, first + e);
      if constexpr (kGated)  // elementwise.cu's silu_and_mul
        value[e] = value[e] / (1.0f + expf(-value[e])) *
                   with_bias(factor[e], bias, cut.columns + first + e);
    }
    const uint32_t pair = pack_bf16(value[0], value[1]);
    if (&cut == &w.a.cuts[kDown] && w.layer + 1 == w.a.layers)
      *reinterpret_cast<uint32_t*>(w.a.x + row * w.a.x_stride + first) = pair;
    else if (const int product = static_cast<int>(&cut - w.a.cuts);
             w.a.world > 1 && (product == kOut || product == kDown))
      send_to_ranks(w.a, product, (int64_t{row} * cut.columns + first) / 2, pair, w.epoch);
    else
      send(w.a.words + cut.words + (int64_t{row} * cut.columns + first) / 2, tagged(pair, w.epoch));
  }
}

/// One tile; `last`: of the block's.
template <int kHeadDim, int kGroups, bool kGated>
__device__ __forceinline__ void project_tile(Worker<kHeadDim>& w, const Ring& ring, int product,
                                             int tile, int thread, Sums& c, bool last) {
  multiply<kHeadDim, kGroups>(w, ring, w.a.cuts[product], thread % kWarp, c);
  if (last) w.leave_operand();
  const MatrixCut& cut = w.a.cuts[anew(product)];
  emit<kHeadDim, kGroups, kGated>(w, cut, thread, tile * cut.columns_of_tile, c);
}

/// The block's tiles of one product. Warps without a part in it only keep count, and wait until the
/// operand has been read: they are ready for the next one while the others still send.
template <int kHeadDim>
__device__ __forceinline__ void project(Worker<kHeadDim>& w, int product) {
  const int thread = this_thread();
  // Known to be the same in all lanes: addresses of weights are made once for a warp.
  const int warp = __shfl_sync(kFullMask, thread / kWarp, 0);
  const int groups = w.a.cuts[product].groups;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < w.a.cuts[product].tiles; tile += gridDim.x) {
    const Ring ring = w.ring;
    w.ring.advance(w.a.cuts[product].stages);
    if (warp >= kMultiplying) continue;
    const bool last = tile + gridDim.x >= w.a.cuts[product].tiles;
    Sums c = {};
    if (product == kGateUp) {
      if (groups == 2)
        project_tile<kHeadDim, 2, true>(w, ring, product, tile, thread, c, last);
      else if (groups == 4)
        project_tile<kHeadDim, 4, true>(w, ring, product, tile, thread, c, last);
      else
        project_tile<kHeadDim, 6, true>(w, ring, product, tile, thread, c, last);
    } else {
      if (groups == 1)
        project_tile<kHeadDim, 1, false>(w, ring, product, tile, thread, c, last);
      else if (groups == 2)
        project_tile<kHeadDim, 2, false>(w, ring, product, tile, thread, c, last);
      else if (groups == 4)
        project_tile<kHeadDim, 4, false>(w, ring, product, tile, thread, c, last);
      else
        project_tile<kHeadDim, 6, false>(w, ring, product, tile, thread, c, last);
    }
  }
  if (blockIdx.x >= w.a.cuts[product].tiles) return;
  if (warp >= kMultiplying)
    w.await_operand();
  else
    w.multiplied();
}

}  // namespace nanovllm::decoder
