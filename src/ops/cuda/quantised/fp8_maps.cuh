// How the kernel of gemm_fp8.cuh is launched: its stages, its kinds, and how the copy engine sees
// its operands.
#pragma once

#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/ptx/tensor_map.h"
#include "ops/cuda/quantised/gemm_fp8.cuh"

namespace nanovllm {

template <size_t kAxes>
CUtensorMap fp8_map(EncodeMap encode, CUtensorMapDataType type, const std::byte* data,
                    const std::array<int64_t, kAxes>& shape,
                    const std::array<int64_t, kAxes - 1>& strides,
                    const std::array<int64_t, kAxes>& box) {
  CUtensorMap map{};
  const CUresult status =
      encode_map(encode, map, const_cast<std::byte*>(data), shape, strides, box,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, type,
                 type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? CU_TENSOR_MAP_SWIZZLE_128B
                                                       : CU_TENSOR_MAP_SWIZZLE_NONE);
  check(status == CUDA_SUCCESS, ErrorKind::engine, "CUDA: no tensor map of E4M3 rows (error {})",
        static_cast<int>(status));
  return map;
}

/// The operands' maps; `numbers`, `scales`: of the rows of x.
template <Fp8Tile tile>
Fp8Maps fp8_maps(EncodeMap encode, const Weight& w, const Fp8Shape& shape, const std::byte* numbers,
                 const std::byte* scales) {
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8, kFloats = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  constexpr int64_t kParts = tile.parts();
  const Fp8Layout layout(w.format, w.n(), w.k());
  const int64_t k = w.k(), units = w.n() / kFp8Unit / kParts, blocks = k / kFp8Block;
  const std::byte* data = w.data.data;
  Fp8Maps maps{};
  maps.w = fp8_map<5>(
      encode, kBytes, data,
      {kFp8Block, kFp8Unit, kParts, units, blocks + (w.count() - 1) * shape.expert_blocks},
      {k, k * kFp8Unit * units, k * kFp8Unit, kFp8Block},
      {kFp8Block, kFp8Unit, kParts, shape.height / kFp8Unit / kParts, tile.depth});
  maps.x = fp8_map<4>(encode, kBytes, numbers, {kFp8Block, shape.copied_rows, 1, blocks},
                      {k, k * shape.copied_rows, kFp8Block},
                      {kFp8Block, shape.block_rows / tile.cluster, 1, tile.depth});
  if constexpr (tile.blocks) {
    maps.w_scales =
        fp8_map<4>(encode, kFloats, data + layout.scales(),
                   {kParts == 1 ? layout.units() : units, kParts, blocks, w.count()},
                   {(kParts == 1 ? layout.units() : units) * 4, layout.units() * 4,
                    w.is_stack() ? shape.expert_blocks * kFp8Block : layout.units() * blocks * 4},
                   {tile.weight_scales() / kParts, kParts, tile.depth, 1});
    maps.x_scales = fp8_map<2>(encode, kFloats, scales, {shape.copied_rows, blocks},
                               {int64_t{shape.copied_rows} * 4}, {tile.row_scales(), tile.depth});
  }
  return maps;
}

/// Of `wanted` stages those that fit into a block's shared memory, two at least.
inline int fp8_stages(const Fp8Tile& tile, const Fp8Shape& shape, int64_t wanted,
                      size_t shared_bytes) {
  int stages = static_cast<int>(std::clamp<int64_t>(wanted, 2, kMostStages));
  while (stages > 2 &&
         tile.shared_bytes(shape.height, shape.block_rows, stages) > static_cast<int>(shared_bytes))
    --stages;
  return stages;
}

/// The bytes that a ring takes of an SM's shared memory: less than half, so that the next product's
/// weight can come in while this one ends; nearly all for a weight of which that would be a small
/// part.
constexpr int64_t kHalfRing = 96 * 1024, kWholeRing = 200 * 1024;

template <auto tile>
void CudaBackend::launch_fp8(Tensor y, Tensor x, const Weight& w, const Fp8Plan& plan,
                             const QuantisedOperand& operand, const SentParts* sent) {
  Fp8Shape shape{};
  shape.rows = static_cast<int>(x.shape[0]);
  shape.columns = static_cast<int>(y.shape[1]);
  shape.copied_rows = static_cast<int>(rows_with_room(x.shape[0]));
  shape.stride = y.stride[0];
  shape.height = plan.height;
  shape.row_blocks = plan.row_blocks;
  shape.block_rows = static_cast<int>(copied_fp8_rows(tile, x.shape[0], plan.row_blocks));
  shape.rows_together = std::min(8, plan.row_blocks);  // so that they stay in the L2 cache
  shape.items = plan.items;
  shape.halves = w.format.in_halves && !tile.in_pairs ? 2 : 1;
  shape.blocks = static_cast<int>(x.shape[1] / kFp8Block) / (w.format.in_halves ? 2 : 1);
  shape.steps = static_cast<int>(ceil_div(shape.blocks, tile.depth));
  shape.stage_bytes = tile.stage_bytes(plan.height, shape.block_rows);
  shape.is_f32 = y.dtype == DType::f32;
  shape.is_whole = !shape.is_f32 && wide_rows({y});
  if (sent) shape.sent = *sent;
  const int sms = divides_sms() ? other_sms_ : num_sms_,
            blocks = std::min(shape.items, sms / tile.cluster_size()) * tile.cluster_size();
  const int64_t all = ceil_div(shape.items * tile.cluster_size(), blocks) * shape.halves *
                      shape.steps,
                ring = all * shape.stage_bytes > kWholeRing ? kWholeRing : kHalfRing;
  shape.stages =
      fp8_stages(tile, shape, std::min(ring / shape.stage_bytes, all), max_shared_bytes_);
  const auto* const w_scales =
      reinterpret_cast<const float*>(w.data.data + Fp8Layout(w.format, w.n(), w.k()).scales());
  launch_clusters(
      gemm_fp8_kernel<tile.rows, tile.depth, tile.columns, tile.cluster, tile.gated, tile.blocks,
                      false, tile.integers, tile.in_pairs>,
      {grid_size(blocks)}, tile.cluster_size(), tile.threads(),
      static_cast<size_t>(tile.shared_bytes(shape.height, shape.block_rows, shape.stages)),
      can_launch_early_, static_cast<void*>(y.data),
      fp8_maps<tile>(encode_map_, w, shape, operand.numbers, operand.scales),
      Fp8RowScales{w_scales, reinterpret_cast<const float*>(operand.scales)}, shape);
}

/// Calls body.template operator()<gated, scales in blocks>().
template <class Body>
void with_fp8_kind(const Weight& w, bool gated, Body&& body) {
  const bool blocks = w.format.rows == WeightFormat::Rows::group;
  if (gated && blocks) return body.template operator()<true, true>();
  if (gated) return body.template operator()<true, false>();
  if (blocks) return body.template operator()<false, true>();
  body.template operator()<false, false>();
}

}  // namespace nanovllm
