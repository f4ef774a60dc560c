// Launches gemm_sample.cuh.
#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/sampling/gemm_sample.cuh"

namespace nanovllm {
namespace {

/// With so few rows memory is waited for: the head of Qwen3-0.6B at one row takes 71.3 us where the
/// L2 cache asks for lines of 128 bytes, and 74.9 with 256; at 32 rows 79.0 and 82.2.
constexpr int64_t kFewRows = 128;

}  // namespace

bool CudaBackend::gemm_scan(Tensor x, const Weight& weight, const RowRules& rules, RowScan& scan) {
  const Tensor& w = weight.data;
  const int64_t m = x.shape[0], vocab = weight.n();
  const GemmChoice choice =
      choose({GemmEnd::scan, weight.format, DType::f32, m, vocab, weight.k(), wide_rows({x, w})});
  if (choice.kernel != GemmKernel::sample) return false;
  const SamplePlan& plan = choice.sample;
  check(m <= kMostKnownRows, "gemm_scan of {} rows", m);
  const auto run = [&]<int kGroups>() {
    HeadShape shape{};
    shape.rows = static_cast<int>(m);
    shape.vocab = static_cast<int>(vocab);
    shape.row_blocks = plan.row_blocks;
    shape.tile_rows = plan.tile_rows;
    shape.tiles = static_cast<int>(ceil_div(vocab, int64_t{kHeadColumns}));
    shape.slices = std::min(shape.tiles, num_sms_ / shape.row_blocks);
    shape.steps = static_cast<int>(x.shape[1] / kSliceWidth);
    const HeadLayout layout{kGroups, shape.tile_rows};
    const int bytes = static_cast<int>(max_shared_bytes_) - layout.fixed_bytes();
    shape.stages = std::clamp(bytes / layout.stage_bytes(), 2, kMostStages);
    scan = {};
    scan.rows = shape.rows;
    scan.warps = shape.slices;
    scan.keys = reinterpret_cast<uint64_t(*)[2]>(scan_scratch_.get());
    launch_early(gemm_sample_kernel<kGroups>, grid_size(int64_t{shape.row_blocks} * shape.slices),
                 static_cast<unsigned>(layout.threads()),
                 static_cast<size_t>(layout.fixed_bytes() + shape.stages * layout.stage_bytes()),
                 gemm_map(encode_map_, w, {.parts = 1, .rows = kHeadColumns, .slices = 1},
                          m <= kFewRows ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                        : CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
                 gemm_map(encode_map_, x, {.parts = 1, .rows = layout.rows(), .slices = 1}), shape,
                 rules, scan,
                 reinterpret_cast<KnownRow*>(scan_scratch_.get() + kScanBytes - kKnownBytes));
  };
  if (plan.groups == 1)
    run.operator()<1>();
  else
    run.operator()<2>();
  return true;
}

}  // namespace nanovllm
