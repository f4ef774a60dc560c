// Chooses and launches a kernel of gemm_packed.cuh.
#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/quantised/gemm_packed.cuh"

namespace nanovllm {
namespace {

/// The bytes that a ring takes of an SM's shared memory: less than half, so that the next product's
/// weight can come in while this one ends; more for a weight of which that would be a small part.
constexpr int64_t kHalfRing = 96 * 1024, kWholeRing = 184 * 1024;
constexpr int kMostDeepRows = 64;  // of a tile whose stages have two chunks

/// f<rows>() of wgmma's for m rows of a tile.
template <class F>
void with_rows(int64_t m, F&& f) {
  if (m <= 8) return f.template operator()<8>();
  if (m <= 16) return f.template operator()<16>();
  if (m <= 32) return f.template operator()<32>();
  if (m <= 64) return f.template operator()<64>();
  f.template operator()<kMostPackedTile>();
}

/// f<numbers, depth>() of chunks in a stage: about 1 KB of each eight rows of w, if there is room.
template <class F>
void with_numbers(WeightFormat::Numbers numbers, bool two, F&& f) {
  if (numbers == WeightFormat::int4 && two) return f.template operator()<WeightFormat::int4, 2>();
  if (numbers == WeightFormat::int4) return f.template operator()<WeightFormat::int4, 1>();
  if (numbers == WeightFormat::int8) return f.template operator()<WeightFormat::int8, 1>();
  f.template operator()<WeightFormat::e4m3, 1>();
}

}  // namespace

void CudaBackend::gemm_packed(Tensor y, Tensor x, const Weight& w, bool gated,
                              const PackedPlan& plan) {
  const int64_t m = x.shape[0], outputs = y.shape[1];
  const PackedLayout layout(w.format, w.n(), w.k());
  const int num_sms = divides_sms() ? other_sms_ : num_sms_;
  const auto block_rows = static_cast<int>(ceil_div(m, plan.row_blocks * 8) * 8);
  const bool two = layout.columns % 2 == 0 && block_rows <= kMostDeepRows;
  with_numbers(w.format.numbers, two, [&]<WeightFormat::Numbers numbers, int depth>() {
    PackedShape shape{};
    shape.rows = static_cast<int>(m);
    shape.columns = static_cast<int>(outputs);
    shape.stride = y.stride[0];
    shape.block_rows = block_rows;
    shape.row_blocks = plan.row_blocks;
    shape.warps = plan.warps;
    shape.units = static_cast<int>(outputs / kPackedRows);
    shape.up = gated ? shape.units : 0;
    shape.items = plan.row_blocks * static_cast<int>(ceil_div(
                                        shape.units, gated ? plan.warps : plan.warps * plan.units));
    shape.record_bytes = layout.record_bytes;
    shape.groups = layout.groups;
    shape.depth = depth;
    shape.steps = layout.columns / depth;
    shape.x_bytes = depth * kPackedSlices * shape.block_rows * kSliceRowBytes;
    const int64_t bytes = shape.x_bytes + plan.warps * plan.units * depth * layout.record_bytes;
    shape.stage_bytes = static_cast<int>(ceil_div(bytes, 1024) * 1024);
    const int64_t all = ceil_div(shape.items, num_sms) * shape.steps,
                  ring = all * shape.stage_bytes > kWholeRing ? kWholeRing : kHalfRing;
    shape.stages = static_cast<int>(
        std::clamp<int64_t>(std::min(ring / shape.stage_bytes, all), 2, kMostStages));
    const CUtensorMap records =
        map_records(encode_map_, w, layout, gated ? 2 : 1,
                    gated ? plan.warps : plan.warps * plan.units, depth * layout.record_bytes);
    const CUtensorMap rows_of_x = gemm_map(
        encode_map_, x, {.parts = 1, .rows = shape.block_rows, .slices = depth * kPackedSlices});
    const auto* row_scales = reinterpret_cast<const uint32_t*>(w.data.data + layout.row_scales());
    with_rows(block_rows, [&]<int rows>() {
      const auto go = [&](auto kernel) {
        launch_early(kernel, grid_size(num_sms), plan.groups() * kGroupThreads + kWarp,
                     static_cast<size_t>(packed_shared_bytes(rows, shape.block_rows,
                                                             shape.stage_bytes, shape.stages)),
                     device_ptr<bf16>(y), records, rows_of_x, row_scales, shape);
      };
      if constexpr (depth == 1 || rows <= kMostDeepRows) {
        if (plan.units == 1)
          go(gemm_packed_kernel<numbers, rows, 1, depth>);
        else
          go(gemm_packed_kernel<numbers, rows, 2, depth>);
      }
    });
  });
}

}  // namespace nanovllm
