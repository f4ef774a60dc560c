// How the decoder layers' kernel names weights, to the copy engine and to itself.
#pragma once

#include <algorithm>
#include <numeric>

#include "ops/backend.h"
#include "ops/cuda/decoder/decoder_cut.cuh"
#include "ops/cuda/ptx/tensor_map.h"
#include "ops/cuda/quantised/fp8_kernels.h"

namespace nanovllm::decoder {

/// Whether a mixture has sizes that the kernel takes. It takes one token's.
inline bool takes_experts(const Arguments& a, const DecoderStack& stack) {
  const DecoderWeights& w = stack.layers.front();
  const int64_t experts = w.router.n(), per_token = stack.experts_per_token, hidden = w.down.n(),
                n = w.down.k();
  return a.rows == 1 && a.world == 1 && experts % kWarp == 0 && experts <= kMostExperts &&
         (per_token == kExpertsAtOnce || per_token == kMostChosen) && hidden % kAtomDepth == 0 &&
         n % (kExpertAtoms * kAtomDepth) == 0 && !w.gate_up.data.packed && !w.down.data.packed &&
         !w.gate_up_bias.defined() && !w.down_bias.defined();
}

/// A matrix of `halves` (gate and up) of n rows, each of `row` bytes, in boxes that are what a
/// stage holds of a tile: eight rows of each half in turns, so that gate and up of an output come
/// to one thread. The last axis counts `atoms`, of this matrix and, layer after layer, of the
/// others.
inline bool encode_weights(EncodeMap encoder, CUtensorMap& map, void* data, const MatrixCut& cut,
                           int64_t halves, int64_t n, int64_t row, int64_t atoms) {
  return encode_map<5>(encoder, map, data, {kAtomDepth, 8, halves, n / 8, atoms},
                       {row, n * row, 8 * row, kAtomRow},
                       {kAtomDepth, 8, halves, cut.columns_of_tile / 8, cut.stage_atoms},
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B) == CUDA_SUCCESS;
}

/// The formats that the kernel takes, of weights [n, k].
inline WeightFormat format_of(WeightFormat::Rows rows, int64_t k) {
  if (rows == WeightFormat::Rows::plain) return WeightFormat::bf16;
  return {WeightFormat::e4m3, rows == WeightFormat::Rows::group ? kRowGroup : k, rows};
}

/// Of E4M3 weights.
inline void place_scales(Arguments& a, Product product, const Weight& w) {
  const Fp8Layout layout(w.format, w.n(), w.k());
  a.scales[product] = reinterpret_cast<const float*>(w.data.data + layout.scales());
  a.scale_stride[product] = layout.blocks ? static_cast<int>(layout.units()) : 0;
}

/// Experts and layers lie on one axis, in steps that divide the strides of both and `unit`, of so
/// many bytes.
struct ExpertAxis {
  int64_t stride, size;
  int steps[2];  // to the next expert, the next layer

  ExpertAxis(const Tensor& w, int64_t layers, int64_t layer_stride, int64_t unit) {
    const int64_t of_expert = w.stride[0] * static_cast<int64_t>(sizeof(bf16));
    stride = std::gcd(std::gcd(of_expert, layer_stride), unit);
    size = ((w.shape[0] - 1) * of_expert + (layers - 1) * layer_stride) / stride + 1;
    steps[0] = static_cast<int>(of_expert / stride);
    steps[1] = static_cast<int>(layer_stride / stride);
  }
  bool fits() const { return stride % 16 == 0 && size <= INT32_MAX; }
};

/// The part of the arguments that the experts' weights give, `layer_stride` bytes from a layer's to
/// the next one's; false where the kernel does not fit them.
inline bool describe_experts(Arguments& a, EncodeMap encoder, const DecoderStack& stack,
                             int64_t layer_stride) {
  if (!takes_experts(a, stack)) return false;
  const DecoderWeights& w = stack.layers.front();
  const int64_t layers = static_cast<int64_t>(stack.layers.size()),
                per_token = stack.experts_per_token, h = w.gate_up.k(), n = w.down.k();
  Mixture& m = a.mixture;
  m.experts = static_cast<int>(w.router.n());
  m.per_token = static_cast<int>(per_token);
  m.normalises = stack.normalises_experts;
  m.tiles = static_cast<int>(n / kGateUpColumns);
  m.most_underway = kExpertsUnderway;
  const ExpertAxis gate_up(w.gate_up.data, layers, layer_stride, kAtomRow),
      down(w.down.data, layers, layer_stride, 0);
  std::copy_n(gate_up.steps, 2, m.gate_up_steps);
  std::copy_n(down.steps, 2, m.down_steps);
  a.cuts[kGateUp] = cut_gate_up(per_token, n, h);
  a.cuts[kDown] = cut_down(per_token, h, n);
  return gate_up.fits() && gate_up.stride == kAtomRow && down.fits() &&
         encode_weights(encoder, a.maps[kGateUp], w.gate_up.data.data, a.cuts[kGateUp], 2, n, h * 2,
                        gate_up.size - 1 + a.cuts[kGateUp].atoms) &&
         encode_map<5>(encoder, a.maps[kDown], w.down.data.data, {64, 8, n / 64, h / 8, down.size},
                       {n * 2, kAtomRow, 8 * n * 2, down.stride},
                       {64, 8, kExpertAtoms, kExpertColumns / 8, 1},
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B) == CUDA_SUCCESS;
}

}  // namespace nanovllm::decoder
