// The decoder layers' kernel (decoder_layers_sm90a.cu says how it works), for the files that have
// it for one kind of weights each.
#pragma once

#include <cooperative_groups.h>

#include "ops/cuda/decoder/decoder_attend.cuh"
#include "ops/cuda/decoder/decoder_gemm.cuh"
#include "ops/cuda/decoder/decoder_norms.cuh"
#include "ops/cuda/decoder/decoder_steps.cuh"

namespace nanovllm::decoder {

template <bool kMixture, class C, class Worker>
__device__ __forceinline__ void run_layers(Worker& w) {
  const Arguments& a = w.a;
  const auto has = [&](int product) { return blockIdx.x < a.cuts[product].tiles; };
  // A block without a part in the products of the stream need not follow it.
  const bool follows = has(kQkv) || has(kGateUp) || blockIdx.x == 0;
#pragma unroll 1
  for (; w.layer < a.layers; ++w.layer, ++w.epoch)
#pragma unroll 1
    for (int step = 0; step < kProducts + kMixture; ++step) {
      // A mixture's router comes before gate_up, and has its operand.
      const int product = !kMixture || step < kGateUp ? step : step == kGateUp ? kRouter : step - 1;
      const MatrixCut& cut = a.cuts[product];
      if (kMixture && product == kOut) foresee(w);
      if (product == kOut) attend<C>(w);
      if (product == kQkv && (w.layer == 0 || a.window[w.layer] != a.window[w.layer - 1])) {
        w.together();
        if (this_thread() < OwnUnits::kFound)
          w.shared.units.find(a, w.shared.context, w.layer, this_thread());
        w.together();
      }
      // Found early: this lies between an operand and its product.
      int gives = has(product) && this_thread() >= w.multiplying(product) * kWarp;
      find_now(gives);
      if (product == kQkv || product == (kMixture ? kRouter : kGateUp)) {
        const bool first = product == kQkv && w.layer == 0;
        const int before = first ? -1 : product == kQkv ? kDown : kOut;
        w.norms_apart = has(product) && w.rows() * a.norm_threads <= kGathering;
        const int first_warp = w.single        ? kWarps - kNormThreads / kWarp
                               : w.norms_apart ? kMultiplying
                                               : 0;
        if (follows && this_thread() >= first_warp * kWarp)
          add_and_normalise(w, before, product == kQkv ? w.epoch - 1 : w.epoch,
                            w.of_layer(a.norms[product > kQkv]));
      } else if (kMixture && product == kDown) {
        if constexpr (Worker::kIsFp8) {
          if (has(product)) gather_numbers(w);
        } else if (has(product)) {
          gather_activations(w);
        }
        project_experts(w);
        continue;
      } else if (has(product) && !(kMixture && product == kGateUp)) {
        gather(w, cut, product == kOut ? a.heads_at : a.cuts[kGateUp].words, product == kOut);
      }
      if (gives && !(w.lean && (product == kOut || product == kDown))) w.give_operand();
      if (kMixture && product == kQkv) give_stream(w);
      project(w, product);
      if (kMixture && product == kRouter) weigh(w);
    }
}

/// Behind the last epoch they start again; then nothing may be left of the old ones.
__device__ inline void renew(const Arguments& a, uint32_t epoch) {
  if (epoch > a.last_epoch) {
    cooperative_groups::this_grid().sync();
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < a.total_words;
         i += int64_t{gridDim.x} * blockDim.x)
      a.words[i] = 0;
    // Before any rank's next step: a step ends with a sum over all ranks.
    if (a.world > 1)
      for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < a.total_part_words;
           i += int64_t{gridDim.x} * blockDim.x)
        a.parts[a.rank][i] = 0;
    epoch = 0;
  }
  if (threadIdx.x == 0) a.epochs[blockIdx.x] = epoch;
}

/// How weights' numbers are scaled: E4M3 of blocks or rows; int8 of rows; int4 of groups, of a
/// CoarseUnpack or not.
enum class Scales { none, blocks, rows, rows_of_integers, coarse_groups, groups };

/// How o and down are multiplied in halves of k. `beside_many`: more than four rows; `beside_high`:
/// E4M3 blocks, in tiles of many rows of w.
enum class Halves { none, in_turn, beside, beside_many, beside_high };

/// C: of the cache's elements. `kOneRank`: there are no other ranks and, if it is no mixture, the
/// step has_single_row().
template <int kHeadDim, class C, bool kMixture, bool kLean, Scales kScales = Scales::none,
          Halves kHalves = Halves::none, bool kOneRank = kMixture || kLean>
__global__ void __launch_bounds__(kLaunched, 1)
    decoder_layers_kernel(const __grid_constant__ Arguments a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) unsigned char memory[];
  // The stages come first: wgmma reads up to seven groups of rows behind a tile.
  static_assert(sizeof(Shared<kHeadDim>::attention) >= 7 * kAtomBytes);
  unsigned char* stages = memory;
  unsigned char* operand = memory + a.operand_place;
  auto& shared = *reinterpret_cast<Shared<kHeadDim>*>(memory + a.shared_place);
  auto* residual = reinterpret_cast<__nv_bfloat16*>(memory + a.residual_place);
  Ring ring{{stages, kStageBytes, shared.full, shared.empty}, a.stages, {}};
  const uint32_t epoch = a.epochs[blockIdx.x];
  if (threadIdx.x < a.stages) {
    init_barrier(&shared.full[threadIdx.x], 1);
    init_barrier(&shared.empty[threadIdx.x], kWarps);
    if (threadIdx.x == 0) init_barrier(&shared.early, kGathering / kWarp);
    fence_new_barriers();
  }
  if (kMixture && threadIdx.x == 0) {
    init_barrier(&shared.routed, 1);
    init_barrier(&shared.chosen_all, 1);
    fence_new_barriers();
  }
  if (threadIdx.x < a.rows * kWarps / 4)
    shared.of_row[threadIdx.x / (kWarps / 4)].squares[threadIdx.x % (kWarps / 4)] = float4{};
  if (threadIdx.x < a.rows) {
    shared.context[threadIdx.x] = a.context_lens[threadIdx.x];
    shared.slot[threadIdx.x] = a.slots[threadIdx.x];
  }
  for (int i = threadIdx.x; i < a.rows * 2 * a.half_rotary; i += blockDim.x) {
    const int row = i / (2 * a.half_rotary), c = i % (2 * a.half_rotary);
    shared.of_row[row].cos_sin[c] = a.cos_sin[a.positions[row] * a.cos_sin_stride + c];
  }
  __syncthreads();
  constexpr bool kInt4 = kScales >= Scales::coarse_groups, kSingle = kInt4 && !kMixture && kOneRank;
  if (threadIdx.x >= kThreads) {
    bring_all<kHeadDim, kMixture, C, kInt4>(ring, a, shared, epoch + 1);
  } else {
    using PlainWorker = std::conditional_t<kHalves >= Halves::beside,
                                           BesideWorker<kHeadDim, kHalves == Halves::beside_many>,
                                           Worker<kHeadDim>>;
    using Quantised = std::conditional_t<
        kInt4, Int4Worker<kHeadDim, kScales == Scales::coarse_groups, kMixture, kSingle>,
        Fp8Worker<kHeadDim, kScales >= Scales::rows, kMixture, kScales == Scales::rows_of_integers,
                  (kHalves >= Halves::beside), kHalves == Halves::beside_high>>;
    std::conditional_t<kScales == Scales::none, PlainWorker, Quantised> worker{a, shared, operand,
                                                                               residual, ring};
    worker.epoch = epoch + 1;
    worker.lean = kLean;
    worker.alone = kMixture || kOneRank;
    worker.single = kSingle;
    worker.one_rank = kOneRank;
    worker.mixture = kMixture;
    worker.halves = kHalves == Halves::in_turn;
    worker.beside = kHalves >= Halves::beside;
    worker.int4 = kInt4;
    worker.many = kHalves == Halves::beside_many;
    run_layers<kMixture, C>(worker);
    if (blockIdx.x == 0)
      for (int i = threadIdx.x * 8; i < a.rows * a.hidden; i += kThreads * 8)
        *reinterpret_cast<uint4*>(a.residual + i / a.hidden * a.residual_stride + i % a.hidden) =
            *reinterpret_cast<const uint4*>(residual + i);
  }
  renew(a, epoch + a.layers);
#endif
}

}  // namespace nanovllm::decoder
