// Launches a kernel of gemm_skinny.cuh.
#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/gemm/choose_kernels.h"
#include "ops/cuda/gemm/gemm_skinny.cuh"

namespace nanovllm {
namespace {

/// Slices in a stage, as measured: enough that a wait pays, few enough that the first comes soon.
constexpr int depth_of(int columns) { return columns == 8 ? 8 : columns < 48 ? 4 : 2; }

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

/// The bytes that a ring takes of an SM's shared memory: less than half, so that the next product's
/// weight can come in while this one ends; nearly all for a weight of which that would be a small
/// part, or which takes long.
constexpr int64_t kHalfRing = 96 * 1024, kWholeRing = 200 * 1024;

/// Of weights, before a ring is full: an SM's share of an H200's bandwidth. Measured from so many
/// rows on.
constexpr int kPaceCycles = 800, kPacedBytes = 16 * 1024;
constexpr int64_t kFewestPacedRows = 9;

/// Whether a weight streams for long: a large one, or a long chain's.
bool is_long(const Weight& w) {
  constexpr int64_t kLongChain = 4096;  // k
  return w.k() >= kLongChain || w.n() * w.k() * 2 > kLargeWeight;
}

/// gemm_map() in boxes of so many rows, of both halves of k.
CUtensorMap gemm_map_of_halves(EncodeMap encode, const Tensor& t, int rows, int slices,
                               CUtensorMapL2promotion promotion) {
  const int64_t half = t.shape[1] / 2;
  return tensor_map<4>(encode, t, {kSliceWidth, t.shape[0], 2, half / kSliceWidth},
                       {t.stride[0] * 2, half * 2, kSliceRowBytes}, {kSliceWidth, rows, 2, slices},
                       promotion);
}

}  // namespace

CUtensorMap gemm_map(EncodeMap encode, const Tensor& t, MapBox b,
                     CUtensorMapL2promotion promotion) {
  const int64_t rows = t.shape[0] / b.parts, stride = t.stride[0] * 2;
  return tensor_map<4>(encode, t, {kSliceWidth, rows, b.parts, t.shape[1] / kSliceWidth},
                       {stride, stride * rows, kSliceRowBytes},
                       {kSliceWidth, b.rows / b.parts_of_box, b.parts_of_box, b.slices}, promotion);
}

void CudaBackend::gemm_skinny(Tensor y, Tensor x, const Weight& w, bool gated,
                              const SkinnyPlan& plan) {
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
      shape.stages = static_cast<int>(std::clamp<int64_t>(
          std::min((bytes > kWholeRing || is_long(w) ? kWholeRing : kHalfRing) / stage,
                   ceil_div(shape.items, num_sms_) * shape.steps),
          2, kMostStages));
      shape.pace = y.shape[0] < kFewestPacedRows
                       ? 0
                       : kPaceCycles * kColumns * kDepth * kSliceRowBytes / kPacedBytes;
      // One block for every SM, even where there is no work for the last: they lie apart then, and
      // so do those of the product behind this one, which come while these end.
      const dim3 grid{grid_size(num_sms_)};
      const auto shared =
          static_cast<size_t>(skinny_shared_bytes(kColumns, plan.block_rows, kDepth, shape.stages));
      // Measured: weights of so few rows stream up to 2 % faster so.
      const auto promotion =
          y.shape[0] <= 8 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
      const unsigned threads = kSkinnyThreads + (is_long(w) ? kWarp : 0);
      const auto go = [&](auto kernel) {
        launch_early(
            kernel, grid, threads, shared, device_ptr<Y>(y),
            gemm_map(encode_map_, w.data,
                     {.parts = gated ? 2 : 1,
                      .rows = kColumns,
                      .parts_of_box = gated ? 2 : 1,
                      .slices = kDepth},
                     promotion),
            gemm_map(encode_map_, x, {.parts = 1, .rows = plan.block_rows, .slices = kDepth}),
            shape);
      };
      if constexpr (kGates) {
        if (gated) return go(gemm_skinny_kernel<kColumns, kDepth, true, false, DeviceType<Y>>);
      }
      if constexpr (std::is_same_v<Y, bf16>)
        if (w.format.in_halves)
          return launch_early(
              gemm_skinny_kernel<kColumns, kDepth / 2, false, true, DeviceType<Y>>, grid, threads,
              shared, device_ptr<Y>(y),
              gemm_map_of_halves(encode_map_, w.data, kColumns, kDepth / 2, promotion),
              gemm_map_of_halves(encode_map_, x, plan.block_rows, kDepth / 2,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
              shape);
      go(gemm_skinny_kernel<kColumns, kDepth, false, false, DeviceType<Y>>);
    });
  });
}

}  // namespace nanovllm
