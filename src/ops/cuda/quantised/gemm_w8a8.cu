// Launches gemm_w8a8.cuh with rows that are quantised.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/ptx/gemm_cluster.cuh"
#include "ops/cuda/quantised/gemm_w8a8.cuh"

namespace nanovllm {

void CudaBackend::gemm_w8a8(Tensor y, Tensor x, const Weight& w, bool gated, const W8a8Plan& plan) {
  const QuantisedOperand rows = take_operand(x, w);
  const auto* const data = reinterpret_cast<const uint8_t*>(w.data.data);
  const w8a8::Scales by = w8a8::scales_of(w, rows.scales);
  w8a8::Shape shape = w8a8::shape_of(y, w, x.shape[0], gated);
  shape.row_tiles = plan.row_tiles;
  shape.column_tiles = plan.column_tiles;
  shape.items = plan.row_tiles * plan.column_tiles;
  shape.is_f32 = y.dtype == DType::f32;
  shape.is_whole = !shape.is_f32 && wide_rows({y});
  with_w8a8_kind(w.format, [&]<WeightFormat::Numbers kNumbers, bool kBlocks>() {
    with_index<static_cast<int>(std::size(kW8a8Tiles))>(plan.tile, [&]<int kTile>() {
      constexpr W8a8Tile tile = kW8a8Tiles[kTile];
      if constexpr (kNumbers == WeightFormat::int8 || tile.takes_e4m3()) {
        shape.stages = w8a8_stages(tile, max_shared_bytes_);
        // No SM has room for more blocks than its share: one may not get two while another is idle.
        const int sms = divides_sms() ? other_sms_ : num_sms_;
        const auto share = static_cast<size_t>(ceil_div(shape.items, sms)),
                   bytes = std::max(static_cast<size_t>(shape.stages * tile.stage_bytes()),
                                    max_shared_bytes_ / (share + 1));
        launch_early(w8a8::gemm_w8a8_kernel<kTile, kNumbers, kBlocks>,
                     grid_size(divides_sms()
                                   ? std::min<int64_t>(shape.items, max_shared_bytes_ / bytes * sms)
                                   : shape.items),
                     tile.threads(), bytes, static_cast<void*>(y.data), data,
                     reinterpret_cast<const uint8_t*>(rows.numbers), by, shape);
      }
    });
  });
}

}  // namespace nanovllm
