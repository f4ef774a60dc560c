// Launches a kernel of gemm_wide.cuh.
#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/gemm/gemm_wide.cuh"

namespace nanovllm {
namespace {

constexpr int kRingBytes = 224 * 1024;  // of an SM's shared memory

/// w as gemm_wide_kernel() takes it: [units, parts, 8, k], in slices of k.
CUtensorMap weight_map(EncodeMap encode, const Tensor& w, int64_t parts, int64_t units,
                       int64_t slices) {
  const int64_t stride = w.stride[0] * 2, rows = w.shape[0] / parts;
  return tensor_map<5>(encode, w,
                       {kSliceWidth, kWideUnit, parts, rows / kWideUnit, w.shape[1] / kSliceWidth},
                       {stride, stride * rows, stride * kWideUnit, kSliceRowBytes},
                       {kSliceWidth, kWideUnit, parts, units, slices});
}

}  // namespace

void CudaBackend::gemm_wide(Tensor y, Tensor x, const Weight& w, const WidePlan& plan,
                            const SentParts* sent) {
  const int64_t m = x.shape[0], k = x.shape[1], outputs = y.shape[1];
  with_index<std::size(kWideKernels)>(plan.kernel, [&]<int i>() {
    constexpr WideTile tile = kWideKernels[i].tile;
    constexpr int kRowStages = kWideKernels[i].row_stages
                                   ? kWideKernels[i].row_stages
                                   : kRingBytes / (tile.weight_bytes() + tile.row_bytes());
    WideShape shape{};
    shape.rows = static_cast<int>(m);
    shape.columns = static_cast<int>(outputs);
    shape.stride = y.stride[0];
    shape.row_blocks = plan.row_blocks;
    shape.block_rows = copied_rows(tile.rows, m);
    shape.blocks = plan.row_blocks * static_cast<int>(ceil_div(outputs, tile.outputs()));
    shape.steps = static_cast<int>(ceil_div(k, tile.depth * kSliceWidth));
    shape.row_stages = std::min(kRowStages, shape.steps);
    shape.stages = std::min({(kRingBytes - kRowStages * tile.row_bytes()) / tile.weight_bytes(),
                             kMostStages, shape.steps});
    const dim3 grid{grid_size(std::max(shape.blocks, num_sms_))};
    const MapBox rows{.parts = 1, .rows = shape.block_rows, .slices = tile.depth};
    const auto go = [&]<bool halves = false, class Y>(const Y& out) {
      launch_early(gemm_wide_kernel<tile.rows, tile.groups, tile.depth, tile.gated, halves, Y>,
                   grid, tile.threads(), tile.shared_bytes(shape.stages, shape.row_stages), out,
                   weight_map(encode_map_, w.data, tile.gated ? 2 : 1, tile.outputs() / kWideUnit,
                              tile.depth),
                   gemm_map(encode_map_, x, rows), shape);
    };
    if constexpr (!tile.gated) {
      if (sent) return go(*sent);
      if (w.format.in_halves) return go.template operator()<true>(device_ptr<bf16>(y));
    }
    go(device_ptr<bf16>(y));
  });
}

}  // namespace nanovllm
