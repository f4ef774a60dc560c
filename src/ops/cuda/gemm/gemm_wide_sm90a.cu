// Chooses and launches a kernel of gemm_wide.cuh.
#include <algorithm>
#include <limits>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/gemm/gemm_wide.cuh"

namespace nanovllm {
namespace {

/// Other numbers of rows are gemm_mid.cuh's. Measured on an H200.
constexpr int64_t kFewestRows = 129, kMostRows = 256;
constexpr bool takes_rows(int64_t rows, bool gated) {
  return (kFewestRows <= rows && rows <= kMostRows) || (gated && 65 <= rows && rows <= 112);
}
constexpr int64_t kMostRowsAtOnce = 192;  // of gemm_mid.cuh's tiles of two parts
constexpr int kRingBytes = 224 * 1024;    // of an SM's shared memory

/// A kernel, and the stages of rows in its ring; 0: as many as of weights. Measured on an H200.
struct WideKernel {
  WideTile tile;
  int row_stages = 0;
};
constexpr WideKernel kKernels[] = {
    {{80, 1, 2}, 4},     {{96, 1, 2}, 4},     {{112, 1, 2}, 4},    {{128, 1, 2}, 4},
    {{80, 3, 1, true}},  {{96, 3, 1, true}},  {{112, 3, 1, true}}, {{128, 3, 1, true}},
    {{144, 3, 1, true}}, {{160, 3, 1, true}}, {{176, 3, 1, true}}, {{192, 3, 1, true}},
    {{208, 3, 1, true}}, {{224, 3, 1, true}}, {{240, 3, 1, true}}, {{256, 3, 1, true}},
};

/// How a product is cut.
struct WidePlan {
  int kernel = -1, row_blocks = 0;
};

/// The cut with the fewest rows in vain whose tiles are all under way at once, and keep nine of ten
/// SMs busy. No more than two blocks read a weight of two parts, each of which is as much, and one
/// where gemm_mid.cuh has tiles for all rows.
WidePlan plan_of(int64_t rows, int64_t outputs, bool gated, int num_sms) {
  WidePlan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < static_cast<int>(std::size(kKernels)); ++i) {
    const WideTile& t = kKernels[i].tile;
    const int64_t row_blocks = ceil_div(rows, int64_t{t.rows}),
                  blocks = row_blocks * ceil_div(outputs, int64_t{t.outputs()});
    if (t.gated != gated || blocks > num_sms || 10 * blocks < 9 * num_sms) continue;
    if (gated && row_blocks > (rows <= kMostRowsAtOnce ? 1 : 2)) continue;
    if (row_blocks * t.rows < least)
      least = row_blocks * t.rows, best = {i, static_cast<int>(row_blocks)};
  }
  return best;
}

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

bool CudaBackend::gemm_wide(Tensor y, Tensor x, Tensor w, bool gated, const SentParts* sent) {
  const int64_t m = x.shape[0], k = x.shape[1], outputs = y.shape[1];
  if (!is_hopper_ || runs_lanes_ || x.dtype != DType::bf16 || y.dtype != DType::bf16 ||
      !takes_rows(m, gated) || w.numel() * 2 <= kLargeWeight || k % kSliceWidth != 0 ||
      outputs % kWideUnit != 0 || !wide_rows({y, x, w}))
    return false;
  const WidePlan plan = plan_of(m, outputs, gated, num_sms_);
  with_index<std::size(kKernels)>(plan.kernel, [&]<int i>() {
    constexpr WideTile tile = kKernels[i].tile;
    constexpr int kRowStages = kKernels[i].row_stages
                                   ? kKernels[i].row_stages
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
    const auto go = [&]<class Y>(const Y& out) {
      launch_early(
          gemm_wide_kernel<tile.rows, tile.groups, tile.depth, tile.gated, Y>, grid, tile.threads(),
          tile.shared_bytes(shape.stages, shape.row_stages), out,
          weight_map(encode_map_, w, gated ? 2 : 1, tile.outputs() / kWideUnit, tile.depth),
          gemm_map(encode_map_, x, rows), shape);
    };
    if constexpr (!tile.gated)
      if (sent) return go(*sent);
    go(device_ptr<bf16>(y));
  });
  return plan.kernel >= 0;
}

}  // namespace nanovllm
