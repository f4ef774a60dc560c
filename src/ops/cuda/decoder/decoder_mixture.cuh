// Mixtures of experts in the decoder layers' kernel, of one token. Every block chooses the experts
// for itself, so that one exchange, of the router's logits, is all that a mixture costs beside a
// dense MLP: the warp that brings weights does, and tells the others through shared memory.
//
//   router         a product like the others, but its outputs stay in f32
//   choice         of all blocks; the arithmetic of moe_router.cu; of most experts it was guessed
//                  before attention (decoder_foresight.cuh)
//   gate_up        a product whose tiles lie in the chosen experts, one expert after the other
//   down, sum      a tile is 16 columns of four experts at once: each expert's activations are one
//                  column of wgmma's B, and of the outputs those count whose row and column are of
//                  one expert. So a block has all of a column's experts, and adds them. Of int4
//                  weights each warp multiplies one expert's by all activations, with mma.sync.
#pragma once

#include "ops/cuda/decoder/decoder_experts.cuh"
#include "ops/cuda/decoder/decoder_foresight.cuh"
#include "ops/cuda/decoder/decoder_fp8_experts.cuh"
#include "ops/cuda/decoder/decoder_gemm.cuh"

namespace nanovllm::decoder {

#if __CUDA_ARCH__ >= 900

/// Whether this block has a part in the experts' products.
__device__ inline bool has_experts(const Arguments& a) {
  return blockIdx.x < max(a.cuts[kGateUp].tiles, a.cuts[kDown].tiles);
}

/// Of the warp that brings weights: those that a layer reads after the router's. Those of the guess
/// come nearer before.
template <bool kInt4, int kHeadDim>
__device__ __forceinline__ void bring_experts(Ring& ring, const Arguments& a,
                                              Shared<kHeadDim>& shared, int layer, uint32_t epoch) {
  if (!has_experts(a)) return;
  const int lane = threadIdx.x % kWarp;
  int expert = 0;
#pragma unroll 1
  for (bool guess = true;; guess = false) {
    LaneLogits logits{};
    logits.receive(a, guess ? a.mixture.foreseen_at : a.mixture.logits_at, epoch, guess);
    expert = logits.choose(a.mixture.experts, a.mixture.per_token);
    if (!guess) break;
    bring_ahead(ExpertStages<kInt4>(a, expert, layer), shared.routed, layer & 1);
  }
  if (lane < a.mixture.per_token) shared.chosen[lane] = expert;
  __syncwarp();
  if (lane == 0) arrive(&shared.chosen_all);
#pragma unroll 1
  for (ExpertStages<kInt4> stages(a, expert, layer); !stages.at_end(); stages.next()) {
    const RingCursor place = ring.claim(kExpertsUnderway);
    if (lane == 0) arrive_expecting(&ring.full[place.stage], stages.bytes());
    __syncwarp();
    stages.copy(ring.at(place), &ring.full[place.stage]);
    __syncwarp();
  }
}

// -- The choice's weights --

/// The state of a mixture where attention has its part of shared memory.
struct MixtureShared {
  float sums[2][kMostChosen][64];  // of a tile of down, [expert][column], and of the next one
};
template <int kHeadDim>
__device__ __forceinline__ MixtureShared& of_mixture(const Worker<kHeadDim>& w) {
  static_assert(sizeof(MixtureShared) <= sizeof w.shared.attention);
  return reinterpret_cast<MixtureShared&>(w.shared.attention);
}

/// The weights of the chosen experts, by one warp.
template <int kHeadDim>
__device__ __forceinline__ void weigh_chosen(const Worker<kHeadDim>& w) {
  const Mixture& m = w.a.mixture;
  const int lane = this_thread() % kWarp;
  LaneLogits logits{};
  logits.receive(w.a, m.logits_at, w.epoch, false);
  float top = kMinusInfinity, total = 0.0f, sum = 0.0f;
  logits.for_each(m.experts, [&](int, float logit) { top = logit > top ? logit : top; });
  top = warp_max(top);
  logits.for_each(m.experts, [&](int, float logit) { total += expf(logit - top); });
  total = warp_sum(total);
  wait_barrier(&w.shared.chosen_all, w.layer & 1);
  const int expert = w.shared.chosen[lane % m.per_token];
  float mine = expf(comparable(logits.of(expert)) - top) / total;
#pragma unroll 1
  for (int i = 0; i < m.per_token; ++i) sum += __shfl_sync(kFullMask, mine, i);
  if (lane < m.per_token) w.shared.chosen_weights[lane] = m.normalises ? mine / sum : mine;
}

/// Weighs the chosen experts, behind the block's part of the router's product: by all threads.
template <int kHeadDim>
__device__ __forceinline__ void weigh(Worker<kHeadDim>& w) {
  if (!has_experts(w.a)) return;
  if (this_thread() == kThreads - 1) arrive(&w.shared.routed);
  w.together();  // gate_up's operand, which is the router's, is given once more
  if (this_thread() / kWarp == kWarps - 1) weigh_chosen(w);
}

// -- Down, and the sum over the experts --

/// Row `row` (of the token's experts) of the operand of down, eight elements from `column` on.
template <int kHeadDim>
__device__ inline Packed& activations_at(const Worker<kHeadDim>& w, int row, int column) {
  return *reinterpret_cast<Packed*>(w.operand + (column / 8 * kMostChosen + row) * sizeof(Packed));
}

/// The operand is the activations of all experts: by the warps that do not multiply.
template <int kHeadDim>
__device__ __forceinline__ void gather_activations(const Worker<kHeadDim>& w) {
  constexpr int kAtOnce = 4;
  const int thread = this_thread() - kMultiplying * kWarp;
  if (thread < 0) return;
  const int of_row = w.a.cuts[kDown].atoms * kAtomDepth / 4, total = w.a.mixture.per_token * of_row;
  for (int first = thread; first < total; first += kAtOnce * kGathering) {
    WordPair pair[kAtOnce] = {};
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (first + j * kGathering < total) missing |= 1u << j;
    const uint64_t* from = inbox(w.a, w.a.cuts[kGateUp].words + first * 2);
    receive_all(pair, missing, w.epoch, [&](int j) { return from + j * kGathering * 2; });
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kGathering, row = i / of_row, c = i % of_row * 4;
      if (missing >> j & 1)
        (&reinterpret_cast<uint2&>(activations_at(w, row, c)))[c / 4 % 2] = {
            static_cast<uint32_t>(pair[j].first), static_cast<uint32_t>(pair[j].second)};
    }
  }
  fence_shared_for_async();
}

/// c += weights x activations^T, of some stages. Waits and ends as multiply_atoms() does.
template <int kHeadDim, int kStages>
__device__ __forceinline__ void multiply_stages(Ring& ring, uint32_t& at_x, int lane, Sums& c) {
  uint32_t stages[kStages];
  const RingCursor place = await_stages(ring, lane, stages);
  const uint32_t x = __shfl_sync(kFullMask, at_x, 0);  // known to be the same in all lanes
  at_x += kStages * kExpertAtoms * 8 * kMostChosen;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kStages; ++i)
#pragma unroll
    for (int step = 0; step < 4 * kExpertAtoms; ++step)
      product<8>(c[0], expert_tile_at(stages[i]) + step / 4 * (kAtomBytes >> 4) + step % 4 * 2,
                 x + (i * 4 * kExpertAtoms + step) * 2 * kMostChosen);
  wgmma_commit();
  wgmma_wait<0>();
  if (lane < kStages) ring.release(place, kWarps / kMultiplying);
  ring.advance(kStages);
}

/// Four experts' outputs of a tile, into `sums` [expert][column].
template <int kHeadDim>
__device__ __forceinline__ void multiply_experts(const Worker<kHeadDim>& w, Ring& ring, int stages,
                                                 int first, int warp, int lane, float (*sums)[64]) {
  constexpr int kAtOnce = 3;
  Sums c = {};
  uint32_t x = describe_heads(w.operand);
#pragma unroll 1
  for (int left = stages; left > 0;) {
    if (left >= kAtOnce) {
      multiply_stages<kHeadDim, kAtOnce>(ring, x, lane, c);
      left -= kAtOnce;
    } else {
      multiply_stages<kHeadDim, 1>(ring, x, lane, c);
      --left;
    }
  }
  pin(c);
  put_expert(sums, first + warp, lane, c);
}

/// A tile's outputs: the sums over the experts in their order, two columns a thread.
template <int kHeadDim>
__device__ __forceinline__ void emit_sums(const Worker<kHeadDim>& w, int tile, int thread,
                                          const float (*sums)[64]) {
  if (thread >= kExpertColumns / 2) return;
  float sum[2] = {};
#pragma unroll
  for (int i = 0; i < kMostChosen; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (i < w.a.mixture.per_token)
        sum[e] = __fmaf_rn(w.shared.chosen_weights[i],
                           to_float(__float2bfloat16_rn(sums[i][2 * thread + e])), sum[e]);
  const int column = tile * kExpertColumns + 2 * thread;
  const uint32_t pair = pack_bf16(sum[0], sum[1]);
  if (w.layer + 1 == w.a.layers)
    *reinterpret_cast<uint32_t*>(w.a.x + column) = pair;
  else if (!w.one_rank && w.a.world > 1)
    send_to_ranks(w.a, kDown, column / 2, pair, w.epoch);
  else
    w.send_all(w.a.words + w.a.cuts[kDown].words + column / 2, pair);
}

/// Down of the block's tiles, as project() does the others.
template <class Worker>
__device__ __forceinline__ void project_experts(Worker& w) {
  const MatrixCut& cut = w.a.cuts[kDown];
  const int thread = this_thread(), tiles = cut.tiles;
  const int warp = __shfl_sync(kFullMask, thread / kWarp, 0), lane = thread % kWarp;
  if (blockIdx.x >= tiles) return;
  if (warp >= kMultiplying) {
    w.give_operand();
    w.ring.advance(cut.stages * tiles_of_block(tiles));
    w.await_operand();
    return;
  }
  // Of E4M3 weights: asked for before they are needed, as they come from memory.
  const auto scales_of = [&](int tile, int first) -> float2 {
    if constexpr (Worker::kIsFp8)
      if (tile < tiles) return down_scales(w, tile, first + warp, lane);
    return {};
  };
  if constexpr (Worker::kIsFp8) wait_barrier(&w.shared.chosen_all, w.layer & 1);
  float2 scales = scales_of(blockIdx.x, 0), next = scales_of(blockIdx.x, kExpertsAtOnce);
  w.take_operand();
  int parity = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
#pragma unroll 1
    for (int first = 0; first < w.a.mixture.per_token; first += kExpertsAtOnce) {
      if constexpr (Worker::kIsFp8) {
        multiply_fp8_experts(w, w.ring, first, warp, lane, first == 0 ? scales : next,
                             of_mixture(w).sums[parity]);
      } else if constexpr (Worker::kIsInt4) {
        const Ring ring = w.ring;
        w.ring.advance(cut.stages / (w.a.mixture.per_token / kExpertsAtOnce));
        multiply_int4_experts(w, ring, cut, first, warp, lane, of_mixture(w).sums[parity]);
      } else {
        multiply_experts(w, w.ring, cut.atoms / kExpertAtoms, first, warp, lane,
                         of_mixture(w).sums[parity]);
      }
    }
    scales = scales_of(tile + gridDim.x, 0);
    next = scales_of(tile + gridDim.x, kExpertsAtOnce);
    if (tile + gridDim.x >= tiles) w.leave_operand();
    w.multiplied();
    emit_sums(w, tile, thread, of_mixture(w).sums[parity]);
  }
}

#endif

}  // namespace nanovllm::decoder
