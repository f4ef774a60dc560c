// The choice of tiles for plain weights, beside choose.cpp.
#include <algorithm>
#include <limits>

#include "ops/cuda/gemm/choose_kernels.h"
#include "ops/cuda/gemm/gemm_kernels.h"

namespace nanovllm {

// Thresholds are measured on an H200; docs/performance/tried.md has what each kernel gained.

namespace {

// -- wide: other numbers of rows are mid's --

constexpr int64_t kFewestWideRows = 129;
constexpr int64_t kFewestGatedRows = 65, kMostGatedRows = 112;  // of gated products, besides
constexpr int64_t kMostRowsAtOnce = 192;                        // of mid's tiles of two parts

/// The cut with the fewest rows in vain whose tiles are all under way at once, and keep nine of ten
/// SMs busy. No more than two blocks read a weight of two parts, each of which is as much, and one
/// where mid has tiles for all rows.
WidePlan plan_wide(const GemmProblem& p, int num_sms) {
  const bool gated = p.end == GemmEnd::gate;
  WidePlan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < static_cast<int>(std::size(kWideKernels)); ++i) {
    const WideTile& t = kWideKernels[i].tile;
    const int64_t row_blocks = ceil_div(p.rows, int64_t{t.rows}),
                  blocks = row_blocks * ceil_div(p.outputs(), int64_t{t.outputs()});
    if (t.gated != gated || blocks > num_sms || 10 * blocks < 9 * num_sms) continue;
    if (gated && row_blocks > (p.rows <= kMostRowsAtOnce ? 1 : 2)) continue;
    if (row_blocks * t.rows < least)
      least = row_blocks * t.rows, best = {i, static_cast<int>(row_blocks)};
  }
  return best;
}

}  // namespace

Why try_wide(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  const bool few = p.rows < kFewestWideRows, may_be_few = p.end == GemmEnd::gate &&
                                                          p.rows >= kFewestGatedRows &&
                                                          p.rows <= kMostGatedRows;
  if (few && !may_be_few) return "few rows";
  if (p.rows > kMostRowsOfBlocks) return "many rows";
  if (gpu.divides_sms()) return "micro-batches share the GPU";
  if (p.y != DType::bf16) return "results in f32";
  if (p.weight_bytes() <= kLargeWeight) return "a small weight";
  if (p.outputs() % kWideUnit != 0) return "columns not in eights";
  choice.wide = plan_wide(p, gpu.num_sms);
  return choice.wide.kernel < 0 ? "no tile keeps nine of ten SMs busy at once" : kServes;
}

// -- large --

namespace {

/// With fewer, tiles of 256 rows leave too much undone: cuBLASLt is as fast at 512 rows of the
/// widest weights and faster below.
constexpr int64_t kFewestLargeRows = 768;

}  // namespace

Why try_large(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (p.rows < kFewestLargeRows) return "few rows";
  if (p.y != DType::bf16) return "results in f32";
  if (p.chain() < kLargeParts * kLargeDepth) return "a short k";
  if (p.outputs() % 8 != 0) return "columns not in eights";
  const int64_t columns = p.end == GemmEnd::gate ? kLargeColumns / 2 : kLargeColumns,
                row_pairs = ceil_div(p.rows, int64_t{kLargeRows * kLargeBlocks}),
                pairs = row_pairs * ceil_div(p.outputs(), columns),
                clusters = gpu.num_sms / kLargeBlocks;
  // The tiles keep the clusters busy to the end: 90 % of the time that the last of them takes.
  if (10 * pairs < 9 * ceil_div(pairs, clusters) * clusters) return "the last wave is not full";
  choice.large = {pairs, row_pairs};
  return kServes;
}

// -- skinny: its plan, which mid's choice looks at --

namespace {

/// For more rows than these, each block reads so much of x besides its weight that cuBLASLt's
/// larger tiles win, for weights that take long soonest.
constexpr int64_t kMostSkinnyRows = 64, kMostOfHugeWeight = 32;
constexpr int64_t kHugeWeight = int64_t{128} << 20;  // bytes

/// The cut that asks least of the busiest SM: rows of w and of x that it reads, and what an item
/// costs in itself. A large weight comes from memory, so that rows of x, which are nearer, count
/// half. At most one block on an SM: two would share its tensor cores' time and end later.
SkinnyPlan plan_skinny(const GemmProblem& p, int num_sms) {
  constexpr int64_t kItem = 16;
  const bool gated = p.end == GemmEnd::gate;
  const int64_t m = p.rows, rows_of_one = p.weight_bytes() > kLargeWeight ? 2 : 1;
  SkinnyPlan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const int columns : kSkinnyColumns)
    for (int block_rows : {8, 16, 32, 64}) {
      if (gated && columns % 16 != 0) continue;  // half a tile is whole groups of 8
      if (block_rows < 64 && block_rows < m && (m <= 16 || block_rows < 16)) continue;
      block_rows = copied_rows(block_rows, m);
      if (p.weight.in_halves && block_rows > kMostHalvedRows) continue;
      const int64_t items =
          ceil_div(m, block_rows) * ceil_div(p.outputs(), gated ? columns / 2 : columns);
      const int64_t cost = ceil_div(items, num_sms) * (columns + block_rows / rows_of_one + kItem);
      if (cost < least) least = cost, best = {columns, block_rows};
    }
  return best;
}

// -- mid --

/// Fewer rows are skinny's, whose smaller tiles give more SMs a part of a small weight; with a
/// large one, or where skinny tiles wait long for a chain, these win from 9 rows on; logits
/// from 33; a tiny one, whose tiles leave SMs to the product behind it, from 5.
constexpr int64_t kFewestMidRows = 33, kFewestOfLargeWeight = 9, kFewestLogitsRows = 33,
                  kFewestOfTinyWeight = 5, kFewestGatedMidRows = 65;
constexpr int64_t kTinyWeight = int64_t{4} << 20;  // bytes
constexpr int64_t kLongChain = 2048;               // k
constexpr int64_t kFewestLogits = 8192;            // columns in f32 that are logits

int64_t fewest_mid_rows(const GemmProblem& p, const GemmGpu& gpu) {
  if (gpu.divides_sms()) return 1;
  if (p.y == DType::f32) return kFewestLogitsRows;
  const int64_t bytes = p.weight_bytes();
  const bool waits = bytes > kLargeWeight || (p.k >= kLongChain && 2 * bytes > kLargeWeight);
  if (waits) return kFewestOfLargeWeight;
  if (p.end == GemmEnd::gate) return kFewestGatedMidRows;
  return bytes < kTinyWeight ? kFewestOfTinyWeight : kFewestMidRows;
}

/// The cut that takes the fewest cycles (gemm_mid.cuh).
MidPlan plan_mid(const GemmProblem& p, const GemmGpu& gpu) {
  constexpr int64_t kBlockCycles = 6000,  // that a block takes besides
      kAgainCycles = 10,                  // for each block that reads a large weight again
      kMemoryBytes = 20;                  // that an SM takes of memory in a cycle, at best
  const bool divided = gpu.divides_sms();
  const int64_t steps = p.k / 16, num_sms = divided ? gpu.own_sms : gpu.num_sms,
                again = p.weight_bytes() > kLargeWeight ? kAgainCycles : 0;
  MidPlan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < static_cast<int>(std::size(kMidKernels)); ++i) {
    const MidKernel& kernel = kMidKernels[i];
    const MidTile& t = kernel.tile;
    if (t.gated != (p.end == GemmEnd::gate) || kernel.out != p.y || kernel.in_pairs ||
        (kernel.for_many && !divided && p.rows <= kMostRowsOfBlocks))
      continue;
    if (p.end == GemmEnd::heads && !kernel.makes_heads()) continue;
    if (p.end == GemmEnd::send && !kernel.can_send()) continue;
    const int64_t tiles = t.groups * t.tiles, row_blocks = ceil_div(p.rows, kGroupRows * tiles),
                  tile_rows = ceil_div(p.rows, row_blocks * tiles * 8) * 8,
                  waves = ceil_div(row_blocks * ceil_div(p.outputs(), t.outputs()), num_sms),
                  c = t.columns, taken = c + tiles * tile_rows,
                  memory = p.rows <= kMostSkinnyRows && !divided ? 32 * c / kMemoryBytes : 0,
                  cycles = std::max({memory, taken / 2, (taken + tiles * (c + kGroupRows)) / 4,
                                     tiles * std::max(16 + c / 4, c / 2)}),
                  all = waves * ((cycles + row_blocks * again) * steps + kBlockCycles);
    if (all < least)
      least = all, best = {i, static_cast<int>(row_blocks), static_cast<int>(tile_rows)};
  }
  return best;
}

/// The narrowest tile of which a pair of blocks has half of k each, all at once; none where these
/// would leave a fifth of the SMs without work.
MidPlan plan_pairs(const GemmProblem& p, const GemmGpu& gpu) {
  const bool may = p.weight.in_halves && p.end == GemmEnd::store && p.y == DType::bf16 &&
                   p.rows <= kMostSkinnyRows && !gpu.divides_sms() &&
                   p.weight_bytes() > kLargeWeight;
  for (int i = 0; may && i < static_cast<int>(std::size(kMidKernels)); ++i) {
    const int64_t columns = kMidKernels[i].tile.columns,
                  blocks = kPair * ceil_div(p.outputs(), columns);
    if (!kMidKernels[i].in_pairs || blocks > gpu.num_sms) continue;
    if (10 * blocks < 8 * gpu.num_sms) break;
    return {i, 1, static_cast<int>(ceil_div(p.rows, int64_t{8}) * 8)};
  }
  return {};
}

/// Of a weight in halves, cuBLASLt makes two products, whose sum is a kernel more: an H100 takes 5
/// % longer for the 8B's prompts of 700 tokens than with whole ones, with mid's tiles as long.
bool is_for_large(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  return !p.weight.in_halves || try_large(p, gpu, choice) == kServes;
}

/// The busiest SM's load: its rows of a weight, and a quarter of x's rows.
int64_t load_of(int64_t tiles, int64_t columns, int64_t rows, int num_sms) {
  return ceil_div(tiles, int64_t{num_sms}) * (4 * columns + rows);
}

/// Whether skinny, whose tiles are smaller and whose blocks stay for several, leaves the busiest SM
/// less of a weight that memory or a long chain is waited for, or of a gated one as much where mid
/// would leave a tenth of the SMs without any.
bool is_shared_out_by_skinny(const GemmProblem& p, const GemmGpu& gpu, const MidPlan& plan) {
  const bool large = p.weight_bytes() > kLargeWeight, gated = p.end == GemmEnd::gate;
  if (p.rows > kMostSkinnyRows || gpu.divides_sms() || p.y != DType::bf16 ||
      (!gated && p.end != GemmEnd::store) || !(large || (!gated && p.k >= 2 * kLongChain)))
    return false;
  const MidTile& t = kMidKernels[plan.kernel].tile;
  const SkinnyPlan skinny = plan_skinny(p, gpu.num_sms);
  const int64_t outputs = gated ? skinny.columns / 2 : skinny.columns,
                items =
                    ceil_div(p.rows, int64_t{skinny.block_rows}) * ceil_div(p.outputs(), outputs),
                tiles = plan.row_blocks * ceil_div(p.outputs(), int64_t{t.outputs()});
  const auto of_skinny = [&](int64_t rows) {
    return load_of(items, skinny.columns, rows, gpu.num_sms);
  };
  const auto of_mid = [&](int64_t rows) { return load_of(tiles, t.columns, rows, gpu.num_sms); };
  return of_skinny(skinny.block_rows) < of_mid(t.groups * t.tiles * plan.tile_rows) ||
         (gated && p.k >= kLongChain && 10 * tiles < 9 * gpu.num_sms && of_skinny(0) <= of_mid(0));
}

}  // namespace

Why try_mid(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (p.rows < fewest_mid_rows(p, gpu)) return "few rows for such a weight";
  if (p.rows > kMostRowsOfBlocks && is_for_large(p, gpu, choice)) return "many rows";
  if (p.end == GemmEnd::heads && !gpu.divides_sms()) return "SMs are not divided";
  if (p.y == DType::f32 && p.weight.in_halves) return "results in f32 of a weight in halves";
  if (p.y == DType::f32 && p.outputs() < kFewestLogits) return "few columns for logits";
  if (p.outputs() % 8 != 0) return "columns not in eights";
  choice.mid = plan_pairs(p, gpu);
  if (choice.mid.kernel >= 0) return kServes;
  choice.mid = plan_mid(p, gpu);
  if (choice.mid.kernel < 0) return "no tile for such results";
  return is_shared_out_by_skinny(p, gpu, choice.mid) ? "skinny shares the weight out better"
                                                     : kServes;
}

Why try_wide_to_send(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  return p.rows < kFewestSentRows ? "few rows" : try_wide(p, gpu, choice);
}
Why try_mid_to_send(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  return p.rows < kFewestSentRows ? "few rows" : try_mid(p, gpu, choice);
}

// -- skinny --

Why try_skinny(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (p.y == DType::f32 && p.weight.in_halves) return "results in f32 of a weight in halves";
  const bool huge = p.weight_bytes() > kHugeWeight && p.end != GemmEnd::gate;
  if (p.rows > (huge ? kMostOfHugeWeight : kMostSkinnyRows)) return "many rows";
  choice.skinny = plan_skinny(p, gpu.num_sms);
  return kServes;
}

}  // namespace nanovllm
