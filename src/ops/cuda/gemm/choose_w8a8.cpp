// The choice of tiles for integers on Hopper and of gemm_w8a8.cuh's, beside choose_quantised.cpp.
#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "ops/cuda/gemm/choose_kernels.h"
#include "ops/cuda/quantised/fp8_kernels.h"
#include "ops/cuda/quantised/w8a8_kernels.h"

namespace nanovllm {

// -- int8: gemm_fp8.cuh's tiles of integers --

namespace {

/// The cut that takes the busiest SM the least time, in rows of a weight that it multiplies with a
/// tile: for each tile some besides, for a lane's sums have a way to go; but no less than memory
/// takes for the weight, which comes at full speed to five of eight SMs. Measured on an H100 with
/// Qwen3-8B's weights, 1 to 16,384 rows.
Fp8Plan plan_int8(const GemmProblem& p, const GemmGpu& gpu) {
  constexpr int64_t kFewRows = 512,  // above, tiles of 256 columns gain an eighth: less is copied
      kFewestSharedRows = 4096, kMostSharedColumns = 8192;  // of a k: down loses 5 % by it
  const int64_t parts = p.end == GemmEnd::gate ? 2 : 1, sms = sms_of(gpu);
  Fp8Plan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < static_cast<int>(std::size(kInt8Tiles)); ++i) {
    const Fp8Tile& t = kInt8Tiles[i];
    const int64_t row_blocks = ceil_div(p.rows, int64_t{t.rows}),
                  besides = std::max<int64_t>(22, 5 * t.rows / 8 - 18);
    if (!t.has_rows_first() && row_blocks > 1) continue;
    if (t.cluster > 1 && (p.rows < kFewestSharedRows || p.k > kMostSharedColumns)) continue;
    for (const int height : kFp8Heights) {
      if (!t.takes(height)) continue;
      const int64_t columns = ceil_div(p.outputs(), height / parts),
                    items = ceil_div(columns, int64_t{t.cluster}) * row_blocks,
                    memory = 22 * p.n / (10 * std::min<int64_t>(gpu.num_sms, items * 8 / 5));
      if (height == 32 && 2 * items > sms) continue;  // slower than 48 rows at once
      int64_t cost = ceil_div(items, sms / t.cluster) * (height + besides);
      if (p.rows > kFewRows && t.columns < 256) cost += cost / 8;
      cost = std::max(cost, memory);
      if (cost < least || (cost == least && t.cluster > 1))
        least = cost, best = {i, height, static_cast<int>(row_blocks), static_cast<int>(items)};
    }
  }
  return best;
}

}  // namespace

Why try_int8(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (p.end == GemmEnd::gate && (!p.is_aligned || p.y != DType::bf16))
    return "y is not whole pieces";
  if (p.outputs() % kFp8Unit != 0) return "columns not in eights";
  choice.fp8 = plan_int8(p, gpu);
  return kServes;
}

Why try_int8_to_send(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  return p.rows < kFewestSentRows ? "few rows" : try_int8(p, gpu, choice);
}

// -- w8a8 --

namespace {

/// The cut that takes the busiest SM the fewest cycles for a block of k: those of copies, for which
/// 32 bytes come in each, or of the tensor cores, whichever are more, and those between.
/// Measured on an H100 with integers.
W8a8Plan plan_w8a8(const GemmProblem& p, const GemmGpu& gpu) {
  constexpr int64_t kBytesOfCycle = 32, kProductsOfCycle = 1640, kTile = 60, kStage = 300;
  const int64_t parts = p.end == GemmEnd::gate ? 2 : 1, sms = sms_of(gpu);
  W8a8Plan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < static_cast<int>(std::size(kW8a8Tiles)); ++i) {
    const W8a8Tile& t = kW8a8Tiles[i];
    if (w8a8_stages(t, gpu.shared_bytes) == 0) continue;
    if (p.weight.numbers == WeightFormat::e4m3 && !t.takes_e4m3()) continue;
    const int64_t rows = ceil_div(p.rows, int64_t{t.rows}),
                  columns = ceil_div(p.outputs(), t.columns / parts),
                  cost =
                      ceil_div(rows * columns, sms) *
                          (std::max(int64_t{t.block_bytes()} / kBytesOfCycle,
                                    int64_t{t.columns} * t.rows * kByteBlock / kProductsOfCycle) +
                           kTile) +
                      kStage / t.depth;
    if (cost <= least) least = cost, best = {i, static_cast<int>(rows), static_cast<int>(columns)};
  }
  return best;
}

}  // namespace

Why try_w8a8(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (p.weight.numbers == WeightFormat::e4m3) {
    if (gpu.has_wgmma) return "its sums are not fp8's";
    if (!gpu.has_e4m3) return "needs sm_89";
  }
  if (p.end == GemmEnd::gate && (!p.is_aligned || p.y != DType::bf16))
    return "y is not whole pieces";
  if (p.outputs() % kPackedRows != 0) return "columns not in eights";
  choice.w8a8 = plan_w8a8(p, gpu);
  return choice.w8a8.tile < 0 ? "no room for its ring" : kServes;
}

std::string describe(const W8a8Plan& plan) {
  const W8a8Tile& t = kW8a8Tiles[plan.tile];
  return fmt::format("{} rows of the weight by {} rows, {} blocks of rows", t.columns, t.rows,
                     plan.row_tiles);
}

}  // namespace nanovllm
