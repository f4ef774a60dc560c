// Launches gemm_fp8.cuh for experts whose weights are numbers of 8 bits, and whose rows are
// quantised: it multiplies tiles of places.
#include <algorithm>
#include <limits>

#include "ops/cuda/quantised/fp8_maps.cuh"

namespace nanovllm {
namespace {

/// Of the shared memory of an SM, which has one block.
constexpr int64_t kRing = 200 * 1024;

/// The rows of w of a tile that ask least of the busiest SM (choose_quantised.cpp).
int best_height(const Fp8Tile& tile, int64_t columns, int64_t tiles, int num_sms) {
  constexpr int64_t kTile = 40;
  int best = tile.most_columns();
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int height : kFp8Heights) {
    if (!tile.takes(height)) continue;
    const int64_t items = tiles * ceil_div(columns, height / tile.parts()),
                  cost = ceil_div(items, num_sms) * (height + tile.rows + kTile);
    if (cost < least) least = cost, best = height;
  }
  return best;
}

}  // namespace

void CudaBackend::multiply_fp8_experts(Tensor y, const QuantisedOperand& x, const Weight& w,
                                       const ExpertPlan& plan, int tile_tokens) {
  const bool is_gated = y.shape[1] != w.n();
  const int64_t k = w.k(), room = rows_with_room(plan.pairs);
  const auto go = [&]<Fp8Tile tile>() {
    Fp8Shape shape{};
    shape.rows = plan.pairs;
    shape.columns = static_cast<int>(y.shape[1]);
    shape.copied_rows = static_cast<int>(room);
    shape.stride = y.stride[0];
    const int sms = divides_sms() ? other_sms_ : num_sms_;
    const int64_t tiles = std::min<int64_t>(plan.most_tiles(), plan.experts);  // those that count
    shape.height = best_height(tile, y.shape[1], tiles, sms);
    shape.block_rows = tile.rows;
    shape.items = static_cast<int>(ceil_div(y.shape[1], shape.height / tile.parts()));
    shape.blocks = static_cast<int>(k / kFp8Block);
    shape.steps = static_cast<int>(ceil_div(shape.blocks, tile.depth));
    shape.stage_bytes = tile.stage_bytes(shape.height, shape.block_rows);
    shape.is_whole = true;
    shape.plan = plan;
    shape.expert_blocks = w.data.stride[0] * static_cast<int64_t>(sizeof(bf16)) / kFp8Block;
    shape.stages = fp8_stages(tile, shape, kRing / shape.stage_bytes, max_shared_bytes_);
    const auto* const w_scales =
        reinterpret_cast<const float*>(w.data.data + Fp8Layout(w.format, w.n(), k).scales());
    launch_early(
        gemm_fp8_kernel<tile.rows, tile.depth, tile.columns, 1, tile.gated, tile.blocks, true,
                        tile.integers>,
        {grid_size(std::min<int64_t>(plan.most_tiles() * shape.items, sms))}, tile.threads(),
        static_cast<size_t>(tile.shared_bytes(shape.height, shape.block_rows, shape.stages)),
        static_cast<void*>(y.data), fp8_maps<tile>(encode_map_, w, shape, x.numbers, x.scales),
        Fp8RowScales{w_scales, reinterpret_cast<const float*>(x.scales)}, shape);
  };
  const auto* const own =
      std::find_if(std::begin(kFp8ExpertTiles), std::end(kFp8ExpertTiles),
                   [&](const Fp8Tile& tile) { return tile.rows == tile_tokens; });
  with_index<static_cast<int>(std::size(kFp8ExpertTiles))>(
      static_cast<int>(own - std::begin(kFp8ExpertTiles)), [&]<int i>() {
        constexpr Fp8Tile t = kFp8ExpertTiles[i];
        if (w.format.numbers == WeightFormat::int8)
          return is_gated ? go.template operator()<t.of_integers(true, true)>()
                          : go.template operator()<t.of_integers(false, true)>();
        with_fp8_kind(w, is_gated, [&]<bool kGated, bool kBlocks>() {
          go.template operator()<Fp8Tile{t.rows, t.depth, t.columns, 1, kGated, kBlocks, true}>();
        });
      });
}

}  // namespace nanovllm
