// Quantises rows (quantise_rows.cuh) and multiplies them (gemm_fp8.cuh).
#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/quantised/fp8_maps.cuh"
#include "ops/cuda/quantised/quantise_rows.cuh"

namespace nanovllm {
namespace {

/// The bytes that a ring takes of an SM's shared memory: less than half, so that the next product's
/// weight can come in while this one ends; nearly all for a weight of which that would be a small
/// part.
constexpr int64_t kHalfRing = 96 * 1024, kWholeRing = 200 * 1024;

}  // namespace

CudaBackend::QuantisedOperand CudaBackend::quantise_rows(Tensor x, const Weight& w,
                                                         const ExpertPlan* places) {
  const int64_t count = places ? places->pairs : x.shape[0];
  const QuantisedOperand room = quantised_room(count, w);
  const auto fixed = input_scales_.find(w.data.data);
  const RowsToQuantise rows{device_ptr<bf16>(x),
                            x.stride[0],
                            rows_in(room.numbers, room.scales, count, w.k()),
                            static_cast<int>(count),
                            fixed == input_scales_.end() ? 0.0f : fixed->second,
                            wide_rows({x}),
                            places ? places->token_of : nullptr,
                            places ? places->per_token : 1};
  const dim3 grid{grid_size(ceil_div(w.k(), int64_t{kWarp} * 8)),
                  grid_size(ceil_div(count, kRowsTogether))};
  if (w.format.rows == WeightFormat::Rows::token)
    launch_early(quantise_tokens_kernel, {grid_size(count)}, kTokenThreads, 0, rows);
  else if (w.format.rows == WeightFormat::Rows::group)
    launch_early(quantise_groups_kernel<false>, grid, kRowsTogether * kWarp, 0, rows);
  else
    launch_early(quantise_groups_kernel<true>, grid, kRowsTogether * kWarp, 0, rows);
  return room;
}

CudaBackend::QuantisedOperand CudaBackend::take_operand(Tensor x, const Weight& w) {
  const QuantisedOperand made = std::exchange(micro_batch_->operand, {});
  if (!made.x) return quantise_rows(x, w);
  check(made.x == x.data && made.reader == w.data.data, ErrorKind::engine,
        "gemm: the operation before has quantised rows for another product than that of {}",
        x.describe());
  return made;
}

void CudaBackend::gemm_fp8(Tensor y, Tensor x, const Weight& w, bool gated, const Fp8Plan& plan) {
  const QuantisedOperand operand = take_operand(x, w);
  const int64_t room = rows_with_room(x.shape[0]);
  const auto go = [&]<int kTile, bool kGated, bool kBlocks>() {
    constexpr Fp8Tile t = kFp8Tiles[kTile];
    constexpr Fp8Tile tile{t.rows, t.depth, t.columns, t.cluster, kGated, kBlocks};
    Fp8Shape shape{};
    shape.rows = static_cast<int>(x.shape[0]);
    shape.columns = static_cast<int>(y.shape[1]);
    shape.copied_rows = static_cast<int>(room);
    shape.stride = y.stride[0];
    shape.height = plan.height;
    shape.row_blocks = plan.row_blocks;
    shape.block_rows = static_cast<int>(copied_fp8_rows(tile, x.shape[0], plan.row_blocks));
    shape.rows_together = std::min(8, plan.row_blocks);  // so that they stay in the L2 cache
    shape.items = plan.items;
    shape.blocks = static_cast<int>(x.shape[1] / kFp8Block);
    shape.steps = static_cast<int>(ceil_div(shape.blocks, tile.depth));
    shape.stage_bytes = tile.stage_bytes(plan.height, shape.block_rows);
    shape.is_f32 = y.dtype == DType::f32;
    shape.is_whole = !shape.is_f32 && wide_rows({y});
    const int sms = divides_sms() ? other_sms_ : num_sms_,
              blocks = std::min(shape.items, sms / tile.cluster) * tile.cluster;
    const int64_t all = ceil_div(shape.items * tile.cluster, blocks) * shape.steps,
                  ring = all * shape.stage_bytes > kWholeRing ? kWholeRing : kHalfRing;
    shape.stages = fp8_stages(tile, shape.stage_bytes, std::min(ring / shape.stage_bytes, all),
                              max_shared_bytes_);
    const auto* const w_scales =
        reinterpret_cast<const float*>(w.data.data + Fp8Layout(w.format, w.n(), w.k()).scales());
    launch_clusters(gemm_fp8_kernel<t.rows, t.depth, t.columns, t.cluster, kGated, kBlocks, false>,
                    {grid_size(blocks)}, tile.cluster, tile.threads(),
                    static_cast<size_t>(tile.shared_bytes(shape.stage_bytes, shape.stages)),
                    can_launch_early_, static_cast<void*>(y.data),
                    fp8_maps<tile>(encode_map_, w, shape, operand.numbers, operand.scales),
                    Fp8RowScales{w_scales, reinterpret_cast<const float*>(operand.scales)}, shape);
  };
  with_index<static_cast<int>(std::size(kFp8Tiles))>(plan.tile, [&]<int i>() {
    with_fp8_kind(w, gated, [&]<bool kGated, bool kBlocks>() {
      go.template operator()<i, kGated, kBlocks>();
    });
  });
}

}  // namespace nanovllm
