#include "ops/cuda/gemm/choose_quantised.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "ops/cuda/gemm/gemm_kernels.h"
#include "ops/cuda/quantised/fp8_kernels.h"

namespace nanovllm {
// -- packed --

namespace {

/// The workload of the 8B in int4 takes 15.15 s with 256 or 512, 20.2 with 64 (an H100).
constexpr int64_t kMostPackedRows = 256;

/// The cut that takes the fewest cycles: for 64 columns of k, those of the instructions that the
/// busiest quarter of an SM issues, of the tensor cores, and of one warp alone. Cycles are
/// estimates from a micro-benchmark on an H100; whole products were not compared cut by cut.
PackedPlan plan_packed(const GemmProblem& p, int num_sms) {
  constexpr int64_t kWarp4 = 60, kWarp8 = 70,  // of instructions, of eight rows: 4 bits, 8 bits
      kAlone = 150, kTileCycles = 40;
  const bool gated = p.end == GemmEnd::gate;
  const int64_t issue = p.weight.bits() == 4 ? kWarp4 : kWarp8,
                row_blocks = ceil_div(p.rows, kMostPackedTile),
                tensor = 4 * std::max<int64_t>(13, ceil_div(p.rows, row_blocks) / 2);
  PackedPlan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int units = gated ? 2 : 1; units <= 2; ++units)
    for (int warps = 1; warps <= 4 * kMostPackedGroups; ++warps) {
      const PackedPlan plan{warps, units, static_cast<int>(row_blocks)};
      const int64_t tile = int64_t{kPackedRows} * (gated ? warps : warps * units),
                    waves = ceil_div(row_blocks * ceil_div(p.outputs(), tile), num_sms),
                    cost =
                        waves *
                        (std::max({plan.groups() * units * issue, plan.groups() * tensor, kAlone}) +
                         kTileCycles);
      if (cost < least) least = cost, best = plan;
    }
  return best;
}

}  // namespace

Why try_packed(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (p.rows > kMostPackedRows) return "many rows";
  if (p.y != DType::bf16) return "results in f32";
  if (!p.is_even) return "scales or zero points that registers do not unpack";
  if (p.outputs() % kPackedRows != 0) return "columns not in eights";
  choice.packed = plan_packed(p, sms_of(gpu));
  return kServes;
}

// -- mma --

namespace {

/// For more rows of a plain weight cuBLASLt's tiles and a kernel for the gate are as fast.
constexpr int64_t kMostPlainMmaRows = 64;

/// Cycles of 128 columns of k: of warps that have a quarter of an SM each, and of each more in a
/// quarter. Measured with code for sm_80 on an H100, at 1 to 256 rows; 4 or 8 warps of 8 and 16
/// rows of a weight take 410 or 549 and 470 or 735 for int4 and one row. Plain weights' were
/// measured at 1 to 64 rows of two gate_ups, of 1,024 and 4,096 columns: the cuts chosen are within
/// 5 % of the best.
struct ChunkCycles {
  int64_t alone, more;
  ChunkCycles(WeightFormat weight, int units, int eights)
      : alone(270 + 90 * units + (25 + 25 * units) * eights),
        more(75 + 75 * units + (units == 1 ? 10 : 42) * eights) {
    if (weight.numbers == WeightFormat::bf16)
      alone = 300 + 80 * eights, more = 100 + 20 * eights;
    else if (weight.bits() == 8)
      alone += 50 + 25 * units, more += 55 * units - 10;
  }
  int64_t of(int warps) const { return alone + (ceil_div(warps, 4) - 1) * more; }
};

/// The cut that takes the fewest cycles.
MmaPlan plan_mma(const GemmProblem& p, const GemmGpu& gpu) {
  const bool gated = p.end == GemmEnd::gate, is_packed = p.weight.is_quantised();
  const int64_t tile_cycles = is_packed ? 1000 : 0;
  const int record = mma_record_bytes(p.weight, p.k);
  MmaPlan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int eights : kPackedEights)
    for (int units = gated || eights > kMostEightsOfOne ? 2 : 1; units <= 2; ++units)
      for (int warps = 1; warps <= kMostPackedWarps; ++warps) {
        if (MmaRings(warps, units, eights, p.rows, record, gpu.shared_bytes).stages == 0) break;
        const int64_t row_blocks = ceil_div(p.rows, int64_t{8} * eights),
                      tile = int64_t{kPackedRows} * warps * (gated ? 1 : units),
                      waves = ceil_div(row_blocks * ceil_div(p.outputs(), tile), gpu.num_sms),
                      cost = waves * (p.k / kPackedColumns *
                                          ChunkCycles(p.weight, units, eights).of(warps) +
                                      tile_cycles);
        if (cost < least) least = cost, best = {warps, units, eights, static_cast<int>(row_blocks)};
      }
  return best;
}

}  // namespace

Why try_mma(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (gpu.has_wgmma) return "wgmma is there";
  const bool is_packed = p.weight.is_quantised();
  if (p.rows > (is_packed ? kMostPackedRows : kMostPlainMmaRows)) return "many rows";
  if (p.y != DType::bf16) return "results in f32";
  if (!p.is_even) return "scales or zero points that registers do not unpack";
  if (p.outputs() % kPackedRows != 0) return "columns not in eights";
  if (p.k % kPackedColumns != 0) return "k not in 128s";
  choice.mma = plan_mma(p, gpu);
  return choice.mma.warps == 0 ? "no room for its rings" : kServes;
}

// -- fp8 --

namespace {

/// The cut that asks least of the busiest SM: rows of w and of x that it reads for each block of k,
/// and the time in which it reads none, counted in rows; but no less than memory takes for the
/// weight. Measured on an H100 at k = 4096, 1 to 256 rows: 58 ns a row.
Fp8Plan plan_fp8(const GemmProblem& p, const GemmGpu& gpu) {
  constexpr int64_t kTile = 8, kFewestSharedRows = 257;
  constexpr double kRowsOfMemory = 3.6;  // that an SM reads while its share of one comes
  const int num_sms = sms_of(gpu);
  const int64_t parts = p.end == GemmEnd::gate ? 2 : 1,
                memory = static_cast<int64_t>(kRowsOfMemory * static_cast<double>(p.n) /
                                              static_cast<double>(gpu.num_sms));
  Fp8Plan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < static_cast<int>(std::size(kFp8Tiles)); ++i) {
    const Fp8Tile& t = kFp8Tiles[i];
    const int64_t row_blocks = ceil_div(p.rows, int64_t{t.rows}),
                  block_rows = copied_fp8_rows(t, p.rows, row_blocks);
    if (t.cluster > 1 && p.rows < kFewestSharedRows) continue;
    if (t.has_rows_first() ? !p.is_even : p.is_even && row_blocks > 1) continue;
    for (const int height : kFp8Heights) {
      if (!t.takes(height)) continue;
      const int64_t columns = ceil_div(p.outputs(), height / parts),
                    items = ceil_div(columns, int64_t{t.cluster}) * row_blocks,
                    waves = ceil_div(items, int64_t{num_sms / t.cluster}),
                    cost = std::max(waves * (height + block_rows + kTile), memory);
      if (cost < least || (cost == least && t.cluster > 1))  // which asks less of the L2 cache
        least = cost, best = {i, height, static_cast<int>(row_blocks), static_cast<int>(items)};
    }
  }
  return best;
}

}  // namespace

Why try_fp8(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (p.end == GemmEnd::gate && (!p.is_aligned || p.y != DType::bf16))
    return "y is not whole pieces";
  if (p.end == GemmEnd::gate && p.n % (kFp8Aligned * kFp8Unit * 2) != 0)
    return "columns not in 32s";
  choice.fp8 = plan_fp8(p, gpu);
  return kServes;
}

std::string describe(const Fp8Plan& plan, bool integers) {
  const Fp8Tile& t = integers ? kInt8Tiles[plan.tile] : kFp8Tiles[plan.tile];
  return fmt::format("{} rows of the weight by {} rows, {} blocks of rows", plan.height, t.rows,
                     plan.row_blocks);
}

}  // namespace nanovllm
