// Launches a kernel of gemm_mma.cuh.
#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/mma/gemm_mma.cuh"

namespace nanovllm {
namespace {

/// f<eights>() for a tile of so many eights of rows.
template <class F>
void with_eights(int eights, F&& f) {
  if (eights == 1) return f.template operator()<1>();
  if (eights == 2) return f.template operator()<2>();
  if (eights == 4) return f.template operator()<4>();
  f.template operator()<8>();
}

}  // namespace

void CudaBackend::gemm_mma(Tensor y, Tensor x, const Weight& w, bool gated, const MmaPlan& plan) {
  const int64_t m = x.shape[0], outputs = y.shape[1];
  const bool is_packed = w.format.is_quantised();
  const int record = mma_record_bytes(w.format, w.k());
  gemm_mma::Shape shape{};
  shape.rows = static_cast<int>(m);
  shape.x_stride = x.stride[0];
  shape.y_stride = y.stride[0];
  shape.row_blocks = plan.row_blocks;
  shape.block_rows = std::min(shape.rows, 8 * plan.eights);
  shape.warps = plan.warps;
  shape.copiers = plan.eights == 1 ? 1 : kMostPackedCopiers;
  shape.units = static_cast<int>(outputs / kPackedRows);
  shape.up = gated ? shape.units : 0;
  shape.items = plan.row_blocks *
                static_cast<int>(ceil_div(shape.units, plan.warps * (gated ? 1 : plan.units)));
  shape.record_bytes = record;
  shape.groups = is_packed ? packed_groups(w.format, w.k()) : 0;
  shape.w_stride = is_packed ? 0 : w.data.stride[0] * int64_t{sizeof(bf16)};
  shape.chunks = static_cast<int>(w.k() / kPackedColumns);
  shape.half = w.format.in_halves ? shape.chunks / 2 : 0;
  const MmaRings rings(plan.warps, plan.units, plan.eights, m, record, max_shared_bytes_);
  shape.panels = rings.panels;
  shape.panel_bytes = rings.panel_bytes;
  shape.rings = rings.first;
  shape.stages = rings.stages;
  // More than half of an SM's: two blocks may not land on one while another stays idle.
  const size_t shared = std::max(rings.bytes, max_shared_bytes_ / 2 + 2048);
  const auto* data = reinterpret_cast<const unsigned char*>(w.data.data);
  const auto* row_scales = reinterpret_cast<const uint32_t*>(
      is_packed ? data + PackedLayout(w.format, w.n(), w.k()).row_scales() : nullptr);
  const auto go = [&]<class Tile>() {
    launch_early(gemm_mma::gemm_mma_kernel<Tile>, grid_size(std::min(shape.items, num_sms_)),
                 static_cast<unsigned>(shape.warps + shape.copiers) * kWarp, shared,
                 device_ptr<bf16>(y), data, device_ptr<bf16>(x), row_scales, shape);
  };
  with_eights(plan.eights, [&]<int eights>() {
    if (!is_packed) return go.template operator()<PlainTile<eights>>();
    with_numbers(w.format, [&]<WeightFormat::Numbers numbers>() {
      const auto with_units = [&]<int units>() {
        if (shape.groups > 1)
          go.template operator()<PackedTile<numbers, units, eights, true>>();
        else
          go.template operator()<PackedTile<numbers, units, eights, false>>();
      };
      if constexpr (eights <= kMostEightsOfOne)
        if (plan.units == 1) return with_units.template operator()<1>();
      with_units.template operator()<2>();
    });
  });
}

}  // namespace nanovllm
