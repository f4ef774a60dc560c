// Chooses and launches a kernel of gemm_skinny.cuh.
#include <algorithm>
#include <limits>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/gemm/gemm_skinny.cuh"
#include "ops/cuda/gemm/gemm_tiles.cuh"

namespace nanovllm {
namespace {

/// How a product is cut; `columns` 0: cuBLASLt serves it better.
struct SkinnyPlan {
  int columns = 0, block_rows = 0;
};

constexpr int kTileColumns[] = {8, 16, 24, 32, 48, 64};
/// Slices in a stage, as measured: enough that a wait pays, few enough that the first comes soon.
constexpr int depth_of(int columns) { return columns == 8 ? 8 : columns < 48 ? 4 : 2; }

/// Measured on an H200: for more rows than these, each block reads so much of x besides its weight
/// that cuBLASLt's larger tiles win, for weights that take long soonest.
int64_t most_rows(int64_t weight_bytes, bool gated) {
  constexpr int64_t kLarge = int64_t{128} << 20;
  return weight_bytes <= kLarge || gated ? 64 : 32;
}

/// The cut that asks least of the busiest SM: rows of w and of x that it reads, and what an item
/// costs in itself. At most one block on an SM: two would share its tensor cores' time and end
/// later.
SkinnyPlan plan_of(int64_t m, int64_t outputs, bool gated, int num_sms) {
  constexpr int64_t kItem = 16;
  SkinnyPlan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int columns : kTileColumns)
    for (int block_rows : {8, 16, 32, 64}) {
      if (gated && columns % 16 != 0) continue;  // half a tile is whole groups of 8
      if (block_rows < 64 && block_rows < m && (m <= 16 || block_rows < 16)) continue;
      block_rows = copied_rows(block_rows, m);
      const int64_t items =
          ceil_div(m, block_rows) * ceil_div(outputs, gated ? columns / 2 : columns);
      const int64_t cost = ceil_div(items, num_sms) * (columns + block_rows + kItem);
      if (cost < least) least = cost, best = {columns, block_rows};
    }
  return best;
}

template <class F>
void with_columns(int columns, F&& f) {
  switch (columns) {
    case 8:
      return f.template operator()<8>();
    case 16:
      return f.template operator()<16>();
    case 24:
      return f.template operator()<24>();
    case 32:
      return f.template operator()<32>();
    case 48:
      return f.template operator()<48>();
    default:
      return f.template operator()<64>();
  }
}

/// What a ring takes of an SM's shared memory: less than half, so that the next product's weight
/// can come in while this one ends; nearly all for a weight of which that would be a small part.
constexpr int64_t kHalfRing = 96 * 1024, kWholeRing = 200 * 1024;

}  // namespace

CUtensorMap gemm_map(EncodeMap encode, const Tensor& t, MapBox b,
                     CUtensorMapL2promotion promotion) {
  const int64_t rows = t.shape[0] / b.parts, stride = t.stride[0] * 2;
  return tensor_map<4>(encode, t, {kSliceWidth, rows, b.parts, t.shape[1] / kSliceWidth},
                       {stride, stride * rows, kSliceRowBytes},
                       {kSliceWidth, b.rows / b.parts_of_box, b.parts_of_box, b.slices}, promotion);
}

bool CudaBackend::gemm_skinny(Tensor y, Tensor x, Tensor w, bool gated) {
  if (!is_hopper_ || x.dtype != DType::bf16 || x.shape[1] % kSliceWidth != 0 ||
      !wide_rows({y, x, w}))
    return false;
  if (x.shape[0] > most_rows(w.shape[0] * x.shape[1] * 2, gated)) return false;
  const SkinnyPlan plan = plan_of(x.shape[0], y.shape[1], gated, num_sms_);
  dispatch_float(y.dtype, [&]<class Y>() {
    with_columns(plan.columns, [&]<int kColumns>() {
      constexpr int kDepth = depth_of(kColumns);
      constexpr bool kGates = kColumns >= 16 && std::is_same_v<Y, bf16>;
      const int outputs = gated ? kColumns / 2 : kColumns;
      SkinnyShape shape{};
      shape.rows = static_cast<int>(y.shape[0]);
      shape.columns = static_cast<int>(y.shape[1]);
      shape.stride = y.stride[0];
      shape.block_rows = plan.block_rows;
      shape.row_blocks = static_cast<int>(ceil_div(y.shape[0], plan.block_rows));
      shape.items = shape.row_blocks * static_cast<int>(ceil_div(y.shape[1], outputs));
      shape.steps = static_cast<int>(ceil_div(x.shape[1], kDepth * kSliceWidth));
      const int64_t bytes = ceil_div(shape.items, num_sms_) * kColumns * x.shape[1] * 2,
                    stage = skinny_stage_bytes(kColumns, plan.block_rows, kDepth);
      shape.stages = static_cast<int>(
          std::clamp<int64_t>(std::min((bytes > kWholeRing ? kWholeRing : kHalfRing) / stage,
                                       ceil_div(shape.items, num_sms_) * shape.steps),
                              2, kMostStages));
      // One block for every SM, even where there is no work for the last: they lie apart then, and
      // so do those of the product behind this one, which come while these end.
      const dim3 grid{grid_size(num_sms_)};
      const auto shared =
          static_cast<size_t>(skinny_shared_bytes(kColumns, plan.block_rows, kDepth, shape.stages));
      // Measured: weights of so few rows stream up to 2 % faster so.
      const auto promotion =
          y.shape[0] <= 8 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
      const auto go = [&](auto kernel) {
        launch_early(
            kernel, grid, kSkinnyThreads, shared, device_ptr<Y>(y),
            gemm_map(encode_map_, w,
                     {.parts = gated ? 2 : 1,
                      .rows = kColumns,
                      .parts_of_box = gated ? 2 : 1,
                      .slices = kDepth},
                     promotion),
            gemm_map(encode_map_, x, {.parts = 1, .rows = plan.block_rows, .slices = kDepth}),
            shape);
      };
      if constexpr (kGates) {
        if (gated) return go(gemm_skinny_kernel<kColumns, kDepth, true, DeviceType<Y>>);
      }
      go(gemm_skinny_kernel<kColumns, kDepth, false, DeviceType<Y>>);
    });
  });
  return true;
}

}  // namespace nanovllm
