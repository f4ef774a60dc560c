// Launches gemm_w8a8.cuh for experts whose weights are numbers of 8 bits, and whose rows are
// quantised, on GPUs without wgmma.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/ptx/gemm_cluster.cuh"
#include "ops/cuda/quantised/gemm_w8a8.cuh"

namespace nanovllm {
namespace {

/// Of kW8a8Tiles, by the rows of a tile of the plan.
constexpr int kExpertTiles[] = {0, 1, 2, 5, 6};

}  // namespace

void CudaBackend::multiply_w8a8_experts(Tensor y, const QuantisedOperand& x, const Weight& w,
                                        const ExpertPlan& plan, int tile_tokens) {
  const auto* const data = reinterpret_cast<const uint8_t*>(w.data.data);
  const w8a8::Scales by = w8a8::scales_of(w, x.scales);
  w8a8::Shape shape = w8a8::shape_of(y, w, plan.pairs, y.shape[1] != w.n());
  shape.is_whole = true;
  shape.plan = plan;
  shape.expert_bytes = w.data.stride[0] * static_cast<int64_t>(sizeof(bf16));
  with_w8a8_kind(w.format, [&]<WeightFormat::Numbers kNumbers, bool kBlocks>() {
    with_index<static_cast<int>(std::size(kExpertTiles))>(
        std::countr_zero(static_cast<unsigned>(tile_tokens) / 8), [&]<int i>() {
          constexpr int kTile = kExpertTiles[i];
          constexpr W8a8Tile tile = kW8a8Tiles[kTile];
          static_assert(tile.rows == 8 << i && tile.takes_e4m3());
          shape.stages = w8a8_stages(tile, max_shared_bytes_);
          shape.column_tiles = ceil_div(shape.columns, tile.columns / (shape.gated ? 2 : 1));
          const auto bytes = static_cast<size_t>(shape.stages * tile.stage_bytes());
          const auto blocks_per_sm = static_cast<int64_t>(max_shared_bytes_ / bytes);
          launch_early(w8a8::gemm_w8a8_kernel<kTile, kNumbers, kBlocks, true>,
                       {grid_size(std::min<int64_t>(plan.most_tiles() * shape.column_tiles,
                                                    blocks_per_sm * num_sms_))},
                       tile.threads(), bytes, static_cast<void*>(y.data), data,
                       reinterpret_cast<const uint8_t*>(x.numbers), by, shape);
        });
  });
}

}  // namespace nanovllm
