#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "ops/cuda/gemm/choose_kernels.h"
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
      kAlone = 150, kInTurns = 90, kTileCycles = 40;
  const bool gated = p.end == GemmEnd::gate;
  const int cluster = p.weight.in_halves ? 2 : 1;  // blocks that share a tile (half_sums.cuh)
  const int64_t issue = p.weight.bits() == 4 ? kWarp4 : kWarp8, at_once = num_sms / cluster,
                row_blocks = ceil_div(p.rows, kMostPackedTile),
                tensor = 4 * std::max<int64_t>(13, ceil_div(p.rows, row_blocks) / 2);
  PackedPlan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int units = gated ? 2 : 1; units <= 2; ++units)
    for (int warps = 1; warps <= 4 * kMostPackedGroups; ++warps) {
      const PackedPlan plan{warps, units, static_cast<int>(row_blocks)};
      const int64_t tile = int64_t{kPackedRows} * (gated ? warps : warps * units),
                    waves = ceil_div(row_blocks * ceil_div(p.outputs(), tile), at_once),
                    alone = takes_turns(p.weight, p.chain(), plan.groups(), p.rows, waves)
                                ? kInTurns
                                : kAlone,
                    cost =
                        waves *
                        (std::max({plan.groups() * units * issue, plan.groups() * tensor, alone}) +
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

/// A tile's part of its SM's shared memory for each block of k, in rows of 128 bytes: those that
/// are copied there, and those that wgmma reads, of both operands for each group.
int64_t shared_rows(const Fp8Tile& t, int64_t height, int64_t block_rows) {
  constexpr int64_t kBesides = 32;
  const int64_t read =
      t.has_rows_first() ? t.groups() * (kFp8Height + t.columns) : kFp8Height + t.rows + t.rows / 2;
  return height + block_rows + read + kBesides;
}

/// The cut whose last SM ends first: a tile takes its rows of shared memory, and tiles that run
/// side by side no less than memory takes for their rows of the weight, which blocks of rows share
/// nearly. At 0.81 ns a row that is 10 % off (root mean square) for 306 times of the 8B's products
/// at 32 to 512 rows, in six tiles, on an H100; what it took was within 0.4 us of the best of them.
/// A tile more to an SM takes a microsecond besides, which hid in products of many k: gate_up of
/// the 1.7B, the 4B and a rank of the 8B on an H200.
Fp8Plan plan_fp8(const GemmProblem& p, const GemmGpu& gpu) {
  constexpr int64_t kRow = 1000, kRowOfMemory = 58, kRowInPairs = 40, kPercentOfSharing = 3;
  constexpr int64_t kNextTile = 1000 * kRow, kExchange = 1200 * kRow;
  constexpr int64_t kFewestSharedRows = 257, kFewestFirstRows = 17;
  const int num_sms = sms_of(gpu);
  const int64_t parts = p.end == GemmEnd::gate ? 2 : 1;
  Fp8Plan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < static_cast<int>(std::size(kFp8Tiles)); ++i) {
    const Fp8Tile& t = kFp8Tiles[i];
    const int64_t row_blocks = ceil_div(p.rows, int64_t{t.rows}),
                  block_rows = copied_fp8_rows(t, p.rows, row_blocks);
    if (t.cluster > 1 && p.rows < kFewestSharedRows) continue;
    if (t.in_pairs && (!p.weight.in_halves || p.y == DType::f32)) continue;
    if (t.has_rows_first() ? !p.is_even || p.rows < kFewestFirstRows : p.is_even && row_blocks > 1)
      continue;
    if (parts == 2 && !t.can_be_gated()) continue;
    for (const int height : kFp8Heights) {
      if (!t.takes(height)) continue;
      const int64_t columns = ceil_div(p.outputs(), height / parts),
                    items = ceil_div(columns, int64_t{t.cluster}) * row_blocks,
                    at_once = num_sms / t.cluster_size(),
                    of_tile = kRow * shared_rows(t, height, block_rows) / (t.in_pairs ? 2 : 1),
                    of_memory = (t.in_pairs && row_blocks == 1 ? kRowInPairs : kRowOfMemory) *
                                t.cluster * height * (100 + kPercentOfSharing * (row_blocks - 1)) /
                                (100 * row_blocks);
      const auto wave = [&](int64_t some) {
        return some == 0 ? 0 : std::max(of_tile, some * of_memory);
      };
      const int64_t cost = items / at_once * wave(at_once) + wave(items % at_once) +
                           ((items - 1) / at_once * kNextTile +
                            (t.in_pairs ? ceil_div(items, at_once) * kExchange : 0)) *
                               kFp8Block / p.k;
      if (cost < least - least / 64)  // what comes first has been measured longer
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

Why try_fp8_to_send(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (p.rows < kFewestSentRows) return "few rows";
  if (!p.is_even) return "scales within a group of rows";
  return try_fp8(p, gpu, choice);
}

std::string describe(const Fp8Plan& plan, bool integers) {
  const Fp8Tile& t = integers ? kInt8Tiles[plan.tile] : kFp8Tiles[plan.tile];
  return fmt::format("{} rows of the weight by {} rows, {} blocks of rows{}", plan.height, t.rows,
                     plan.row_blocks, t.in_pairs ? ", a half of k each" : "");
}

}  // namespace nanovllm
