// How the decoder layers' kernel names weights and caches, to the copy engine and to itself.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>

#include "ops/backend.h"
#include "ops/cuda/decoder/decoder_cut.cuh"
#include "ops/cuda/ptx/tensor_map.h"
#include "ops/cuda/quantised/fp8_kernels.h"

namespace nanovllm::decoder {

/// The formats that the kernel takes, of weights [n, k] beside one of format `like`.
inline WeightFormat format_of(const WeightFormat& like, int64_t k) {
  if (!like.quantises_rows()) return WeightFormat::bf16;
  return {like.numbers, like.rows == WeightFormat::Rows::group ? kRowGroup : k, like.rows};
}

/// Of 8-bit weights.
inline void place_scales(Arguments& a, Product product, const Weight& w) {
  const Fp8Layout layout(w.format, w.n(), w.k());
  a.scales[product] = reinterpret_cast<const float*>(w.data.data + layout.scales());
  a.scale_stride[product] = layout.blocks ? static_cast<int>(layout.units()) : 0;
}

/// Whether a mixture has sizes that the kernel takes. It takes one token's. With E4M3 weights that
/// have scales of rows wgmma would wait for registers.
inline bool takes_experts(const Arguments& a, const DecoderStack& stack) {
  const auto takes = [&](const Weight& weight) {
    return weight.format == format_of(stack.layers.front().qkv.format, weight.k()) &&
           (weight.data.packed > 0) == weight.format.is_quantised();
  };
  const DecoderWeights& w = stack.layers.front();
  const int64_t experts = w.router.n(), per_token = stack.experts_per_token, hidden = w.down.n(),
                n = w.down.k(), columns = n * w.down.format.bits() / 16;  // as of bf16
  return w.qkv.format.rows != WeightFormat::Rows::token && a.rows == 1 &&
         (a.world == 1 || !w.qkv.format.quantises_rows()) && experts % kWarp == 0 &&
         experts <= kMostExperts && (per_token == kExpertsAtOnce || per_token == kMostChosen) &&
         hidden % kAtomDepth == 0 &&
         (a.is_int4 || (columns % (kExpertAtoms * kAtomDepth) == 0 &&
                        columns <= kWarp * kAtomDepth && takes(w.gate_up) && takes(w.down))) &&
         !w.qkv_bias.defined() && !w.o_bias.defined() && !w.gate_up_bias.defined() &&
         !w.down_bias.defined() && hidden <= 8 * a.norm_threads &&
         (!w.down.format.is_quantised() || hidden % (kRun * kAtomDepth) == 0);
}

/// A matrix of `halves` (gate and up) of n rows, each of `row` bytes, in boxes that are what a
/// stage holds of a tile: eight rows of each half in turns, so that gate and up of an output come
/// to one thread. The last axis counts `atoms`, of this matrix and, layer after layer, of the
/// others.
inline bool encode_weights(EncodeMap encoder, CUtensorMap& map, void* data, const MatrixCut& cut,
                           int64_t halves, int64_t n, int64_t row, int64_t atoms,
                           int64_t to_second) {
  return encode_map<5>(encoder, map, data, {kAtomDepth, 8, halves, n / 8, atoms},
                       {row, to_second, 8 * row, kAtomRow},
                       {kAtomDepth, 8, halves, cut.columns_of_tile / 8, cut.stage_atoms},
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B) == CUDA_SUCCESS;
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

/// The facts of a mixture beside its experts' weights.
inline void describe_mixture(Mixture& m, const DecoderStack& stack) {
  const DecoderWeights& w = stack.layers.front();
  m.experts = static_cast<int>(w.router.n());
  m.per_token = static_cast<int>(stack.experts_per_token);
  m.normalises = stack.normalises_experts;
  m.router = device_ptr<bf16>(w.router.data);
}

/// The part of the arguments that the experts' weights give, `layer_stride` bytes from a layer's to
/// the next one's; false where the kernel does not fit them.
inline bool describe_experts(Arguments& a, EncodeMap encoder, const DecoderStack& stack,
                             int64_t layer_stride) {
  if (!takes_experts(a, stack)) return false;
  const DecoderWeights& w = stack.layers.front();
  const int64_t layers = static_cast<int64_t>(stack.layers.size()),
                per_token = stack.experts_per_token, h = w.gate_up.k(), n = w.down.k();
  Mixture& m = a.mixture;
  describe_mixture(m, stack);
  const bool fp8 = w.down.format.is_quantised();
  const int64_t row_in = h * w.gate_up.format.bits() / 8, row = n * w.down.format.bits() / 8;
  const ExpertAxis gate_up(w.gate_up.data, layers, layer_stride, kAtomRow),
      down(w.down.data, layers, layer_stride, 0);
  std::copy_n(gate_up.steps, 2, m.gate_up_steps);
  std::copy_n(down.steps, 2, m.down_steps);
  // E4M3 numbers are copied and cut as half as many of bf16.
  constexpr auto kElement = static_cast<int64_t>(sizeof(bf16));
  a.cuts[kGateUp] = cut_gate_up(per_token, n, row_in / kElement, fp8);
  m.tiles = static_cast<int>(n / a.cuts[kGateUp].columns_of_tile);
  a.cuts[kDown] = cut_down(per_token, h, row / kElement);
  if (fp8) {
    place_scales(a, kGateUp, w.gate_up);
    place_scales(a, kDown, w.down);
    m.gate_up_scales = w.gate_up.data.stride[0] * kElement / static_cast<int64_t>(sizeof(float));
    m.down_scales = w.down.data.stride[0] * kElement / static_cast<int64_t>(sizeof(float));
    const MatrixCut& qkv = a.cuts[kQkv];
    a.cuts[kRouter].operand_at = static_cast<int>(
        Layout::round_up(int64_t{qkv.atoms} * kAtomRow + bytes_of_scales(a, qkv.atoms)));
  }
  return gate_up.fits() && gate_up.stride == kAtomRow && down.fits() &&
         encode_weights(encoder, a.maps[kGateUp], w.gate_up.data.data, a.cuts[kGateUp], 2, n,
                        row_in, gate_up.size - 1 + a.cuts[kGateUp].atoms, n * row_in) &&
         encode_map<5>(
             encoder, a.maps[kDown], w.down.data.data, {64, 8, row / kAtomRow, h / 8, down.size},
             {row, kAtomRow, 8 * row, down.stride}, {64, 8, kExpertAtoms, kExpertColumns / 8, 1},
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B) == CUDA_SUCCESS;
}

/// The part of the arguments that the caches give; false where the kernel does not fit them.
inline bool describe_caches(Arguments& a, EncodeMap encoder, std::span<const KvCache> caches) {
  const Tensor& k = caches[0].k;
  const int64_t blocks = k.shape[0], heads = k.shape[1], block_size = k.shape[2], d = k.shape[3];
  const Tensor dense = kv_pages(nullptr, k.dtype, {blocks, heads, block_size, d}, k.device);
  const auto is_dense = [&](const Tensor& t) {
    return t.shape == dense.shape && t.stride == dense.stride && t.dtype == dense.dtype;
  };
  int64_t strides[2] = {0, 0};
  for (size_t i = 0; i < caches.size(); ++i) {
    if (!is_dense(caches[i].k) || !is_dense(caches[i].v)) return false;
    if (i == 0) continue;
    const int64_t here[2] = {caches[i].k.data - caches[i - 1].k.data,
                             caches[i].v.data - caches[i - 1].v.data};
    for (int j = 0; j < 2; ++j) {
      if (here[j] <= 0 || here[j] % 16 != 0 || (i > 1 && here[j] != strides[j])) return false;
      strides[j] = here[j];
    }
  }
  a.k_cache = reinterpret_cast<__nv_bfloat16*>(k.data);
  a.v_cache = reinterpret_cast<__nv_bfloat16*>(caches[0].v.data);
  a.has_e4m3_cache = k.dtype == DType::e4m3;
  const auto bytes = static_cast<int64_t>(size_of(k.dtype));  // of an element
  a.k_layer_stride = strides[0] / bytes;
  a.v_layer_stride = strides[1] / bytes;
  a.block_shift = std::countr_zero(static_cast<uint64_t>(block_size));
  if (caches[0].k_scales.defined()) {
    a.k_scales = caches[0].k_scales.ptr<float>();
    a.v_scales = caches[0].v_scales.ptr<float>();
    const auto stride = [&](size_t i) { return caches[i].k_scales.ptr<float>() - a.k_scales; };
    if (caches.size() > 1) a.scales_layer_stride = static_cast<int>(stride(1));
    for (size_t i = 0; i < caches.size(); ++i) {
      const auto at = static_cast<int64_t>(i) * a.scales_layer_stride;
      if (stride(i) != at || caches[i].v_scales.ptr<float>() != a.v_scales + at) return false;
    }
  }
  const auto map = [&](CUtensorMap& to, const Tensor& cache, int64_t stride) {
    const int64_t half = a.has_e4m3_cache ? d : 64;  // elements; a box has 128 bytes of each row
    return encode_map<5>(
               encoder, to, cache.data,
               {half, block_size, d / half, blocks * heads, static_cast<int64_t>(caches.size())},
               {d * bytes, half * bytes, cache.stride[1] * bytes, std::max<int64_t>(stride, 16)},
               {128 / bytes, std::min<int64_t>(block_size, kTileKeys), 1, 1, 1},
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               a.has_e4m3_cache ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) == CUDA_SUCCESS;
  };
  return std::has_single_bit(static_cast<uint64_t>(block_size)) && block_size >= 8 &&
         block_size <= 256 && map(a.k, k, strides[0]) && map(a.v, caches[0].v, strides[1]);
}

}  // namespace nanovllm::decoder
