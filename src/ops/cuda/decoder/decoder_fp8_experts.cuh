// Down of a mixture's experts of E4M3 weights, with scales of blocks: the numbers of their
// activations, and behind them their scales, [expert][block]; and the products of both.
#pragma once

#include "ops/cuda/decoder/decoder_attention.cuh"
#include "ops/cuda/decoder/decoder_cut.cuh"

namespace nanovllm::decoder {

#if __CUDA_ARCH__ >= 900

/// Waits for the next stages, a lane for each; leaves where they are.
template <int kStages>
__device__ __forceinline__ RingCursor await_stages(const Ring& ring, int lane,
                                                   uint32_t (&stages)[kStages]) {
  const RingCursor place = ring.place(min(lane, kStages - 1));
  ring.wait_full(place);
  __syncwarp();
  const uint32_t address = shared_address(ring.at(place));
#pragma unroll
  for (int i = 0; i < kStages; ++i) stages[i] = __shfl_sync(kFullMask, address, i);
  return place;
}
/// tile_at(), but that the groups of rows are not side by side.
__device__ __forceinline__ uint64_t expert_tile_at(uint32_t address) {
  constexpr uint64_t kOther =
      uint64_t{1} << 62 | uint64_t{kExpertAtoms * kAtomBytes >> 4} << 32 | uint64_t{1} << 16;
  return kOther | address >> 4;
}

template <int kHeadDim>
__device__ __forceinline__ uint32_t expert_scale_at(const Worker<kHeadDim>& w, int expert,
                                                    int block) {
  const int blocks = w.a.cuts[kDown].atoms;
  return shared_address(w.operand) + kMostChosen * blocks * kBlock +
         (expert * blocks + block) * static_cast<int>(sizeof(float));
}

/// gather_activations() of numbers: a warp takes a block of 128 of an expert's at a time.
template <int kHeadDim>
__device__ __forceinline__ void gather_numbers(const Worker<kHeadDim>& w) {
  const int thread = this_thread() - kMultiplying * kWarp, lane = thread & (kWarp - 1),
            blocks = w.a.cuts[kDown].atoms;
  if (thread < 0) return;
  for_sent_blocks(
      inbox(w.a, w.a.cuts[kGateUp].words), w.a.mixture.per_token * blocks, thread / kWarp,
      kGathering / kWarp, w.epoch, true, [&](int i, uint32_t low, uint32_t high) {
        const int expert = i / blocks, block = i % blocks;
        const float scale =
            row_scale(most_of_lanes<kWarp>(nanovllm::most_of(most_of(low), most_of(high))));
        const int column = block * kBlock + lane * 4;
        store_shared(
            shared_address(w.operand) + (column / 16 * kMostChosen + expert) * 16 + column % 16,
            quantise_four(low, high, Divisor(scale)));
        if (lane == 0) store_shared(expert_scale_at(w, expert, block), __float_as_uint(scale));
      });
  fence_shared_for_async();
}

/// Of a tile of an expert, the scales of its first and its next eight columns for block `lane`.
template <int kHeadDim>
__device__ __forceinline__ float2 down_scales(const Worker<kHeadDim>& w, int tile, int expert,
                                              int lane) {
  constexpr int kElementsOfFloat = sizeof(float) / sizeof(__nv_bfloat16);
  static_assert(kExpertColumns == 16);
  if (expert >= w.a.mixture.per_token || lane >= w.a.cuts[kDown].atoms) return {};
  const float* scales = w.a.scales[kDown] + w.layer * (w.a.layer_stride / kElementsOfFloat) +
                        w.shared.chosen[expert] * w.a.mixture.down_scales + tile * 2 +
                        lane * w.a.scale_stride[kDown];
  return {__ldg(scales), __ldg(scales + 1)};
}

/// sum += p(b) * (scale of the activations * scale of w) for the blocks b of some stages, the first
/// of which is `block`. `odd`: of two experts the lane has the second one's.
template <int kStages, int kHeadDim>
__device__ __forceinline__ void multiply_blocks(const Worker<kHeadDim>& w, Ring& ring, int block,
                                                int lane, bool odd, float2 scales,
                                                float (&sum)[2]) {
  constexpr int kBlocks = kStages * kExpertAtoms;
  constexpr uint32_t kStepOfX = 2 * kMostChosen;
  uint32_t stages[kStages];
  const RingCursor place = await_stages(ring, lane, stages);
  uint32_t x = __shfl_sync(kFullMask, describe_heads(w.operand) + block * 4 * kStepOfX, 0);
  Sums part[kBlocks];
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i, x += 4 * kStepOfX) {
    const uint64_t atom =
        expert_tile_at(stages[i / kExpertAtoms]) + i % kExpertAtoms * (kAtomBytes >> 4);
    byte_product<8, false>(part[i][0], atom, x);
#pragma unroll
    for (int step = 1; step < 4; ++step)
      byte_product<8, true>(part[i][0], atom + 2 * step, x + step * kStepOfX);
    wgmma_commit();
  }
  const auto add = [&]<int i>() {
    const float first = __shfl_sync(kFullMask, scales.x, block + i),
                next = __shfl_sync(kFullMask, scales.y, block + i);
    wgmma_wait<kBlocks - 1 - i>();
    pin(part[i]);
    const float(&p)[4] = part[i][0];
    sum[0] = fmaf(odd ? p[1] : p[0], first, sum[0]);
    sum[1] = fmaf(odd ? p[3] : p[2], next, sum[1]);
  };
  [&]<int... i>(std::integer_sequence<int, i...>) { (add.template operator()<i>(), ...); }
  (std::make_integer_sequence<int, kBlocks>());
  if (lane < kStages) ring.release(place, kWarps / kMultiplying);
  ring.advance(kStages);
}

/// multiply_experts() of E4M3 numbers. `scales`: down_scales().
template <int kHeadDim>
__device__ __forceinline__ void multiply_fp8_experts(const Worker<kHeadDim>& w, Ring& ring,
                                                     int first, int warp, int lane, float2 scales,
                                                     float (*sums)[64]) {
  constexpr int kAtOnce = 3;
  const int expert = first + warp, blocks = w.a.cuts[kDown].atoms;
  const float own = load_scale(expert_scale_at(w, expert, min(lane, blocks - 1)));
  scales = {own * scales.x, own * scales.y};
  float sum[2] = {};
#pragma unroll 1
  for (int block = 0; block < blocks;) {
    if (blocks - block >= kAtOnce * kExpertAtoms) {
      multiply_blocks<kAtOnce>(w, ring, block, lane, expert % 2, scales, sum);
      block += kAtOnce * kExpertAtoms;
    } else {
      multiply_blocks<1>(w, ring, block, lane, expert % 2, scales, sum);
      block += kExpertAtoms;
    }
  }
  if (lane % 4 != expert / 2) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) sums[expert][half * 8 + lane / 4] = sum[half];
}

#endif

}  // namespace nanovllm::decoder
