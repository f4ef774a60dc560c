#include "ops/cuda/gemm/choose.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "ops/cuda/gemm/choose_quantised.h"
#include "ops/cuda/gemm/gemm_kernels.h"

namespace nanovllm {
namespace {

constexpr int64_t kGroupRows = 64;          // of the tensor cores' first operand
constexpr int64_t kMostRowsOfBlocks = 256;  // where a block has one tile, or few
/// Bytes of a weight from which on it is memory that a product of few rows waits for.
constexpr int64_t kLargeWeight = int64_t{16} << 20;

// Thresholds are measured on an H200; docs/performance/tried.md has what each kernel gained.

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

/// With fewer, tiles of 256 rows leave too much undone: cuBLASLt is as fast at 512 rows of the
/// widest weights and faster below.
constexpr int64_t kFewestLargeRows = 768;

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
    if (t.gated != (p.end == GemmEnd::gate) || kernel.out != p.y ||
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

/// Of a weight in halves, cuBLASLt makes two products, whose sum is a kernel more: an H100 takes 5
/// % longer for the 8B's prompts of 700 tokens than with whole ones, with mid's tiles as long.
bool is_for_large(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  return !p.weight.in_halves || try_large(p, gpu, choice) == kServes;
}

/// What the busiest SM takes: of a weight, and a quarter of x's rows.
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

Why try_mid(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (p.rows < fewest_mid_rows(p, gpu)) return "few rows for such a weight";
  if (p.rows > kMostRowsOfBlocks && is_for_large(p, gpu, choice)) return "many rows";
  if (p.end == GemmEnd::heads && !gpu.divides_sms()) return "SMs are not divided";
  if (p.y == DType::f32 && p.weight.in_halves) return "results in f32 of a weight in halves";
  if (p.y == DType::f32 && p.outputs() < kFewestLogits) return "few columns for logits";
  if (p.outputs() % 8 != 0) return "columns not in eights";
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

// -- sample --

/// With fewer rows of a weight so wide, skinny streams 3 % faster.
constexpr int64_t kWideHead = 2048, kFewestOfWideHead = 9;

Why try_sample(const GemmProblem& p, const GemmGpu&, GemmChoice& choice) {
  if (p.rows > kMostRowsOfBlocks) return "many rows";
  if (p.k > kWideHead && p.rows < kFewestOfWideHead) return "few rows for so wide a head";
  if (p.n % 4 != 0) return "tokens not in fours";
  const int groups = p.rows <= kGroupRows ? 1 : 2;
  const int64_t row_blocks = ceil_div(p.rows, groups * kGroupRows);
  choice.sample = {groups, static_cast<int>(row_blocks),
                   static_cast<int>(ceil_div(p.rows, row_blocks * groups * 8) * 8)};
  return kServes;
}

// -- quantised: choose_quantised.cpp --

Why try_unpacked(const GemmProblem& p, const GemmGpu& gpu, GemmChoice&) {
  GemmProblem plain = p;
  plain.weight = WeightFormat::bf16;
  return choose_gemm(plain, gpu).kernel == GemmKernel::none ? "no kernel of bf16 has this end"
                                                            : kServes;
}

// -- What every GPU has --

/// cuBLASLt's kernels for fewer columns, or for others, add in other orders (gemm.cpp).
constexpr int64_t kBlasColumns = 8, kFewestBlasColumns = 16;

Why try_blas(const GemmProblem& p, const GemmGpu&, GemmChoice&) {
  if (p.n < kFewestBlasColumns) return "few columns";
  return p.n % kBlasColumns != 0 ? "columns not in eights" : kServes;
}
Why try_in_order(const GemmProblem&, const GemmGpu&, GemmChoice&) { return kServes; }

// -- The table: the first that does not decline serves --

struct Row {
  GemmEnd end;
  WeightFormat::Numbers weight;
  GemmKernel kernel;
  bool needs_wgmma;   // sm_90a
  bool needs_slices;  // k in whole slices, rows that begin on 16 bytes
  Why (*decline)(const GemmProblem&, const GemmGpu&, GemmChoice&);
};
constexpr auto kBf16 = WeightFormat::bf16;
constexpr Row kTable[] = {
    {GemmEnd::store, kBf16, GemmKernel::wide, true, true, try_wide},
    {GemmEnd::store, kBf16, GemmKernel::mid, true, true, try_mid},
    {GemmEnd::store, kBf16, GemmKernel::skinny, true, true, try_skinny},
    {GemmEnd::store, kBf16, GemmKernel::large, true, true, try_large},
    {GemmEnd::store, kBf16, GemmKernel::blas, false, true, try_blas},
    {GemmEnd::store, kBf16, GemmKernel::in_order, false, false, try_in_order},
    {GemmEnd::store, WeightFormat::f32, GemmKernel::in_order, false, false, try_in_order},
    {GemmEnd::gate, kBf16, GemmKernel::wide, true, true, try_wide},
    {GemmEnd::gate, kBf16, GemmKernel::mid, true, true, try_mid},
    {GemmEnd::gate, kBf16, GemmKernel::skinny, true, true, try_skinny},
    {GemmEnd::gate, kBf16, GemmKernel::large, true, true, try_large},
    {GemmEnd::gate, kBf16, GemmKernel::mma, false, true, try_mma},
    {GemmEnd::heads, kBf16, GemmKernel::mid, true, true, try_mid},
    {GemmEnd::heads, kBf16, GemmKernel::large, true, true, try_large},
    {GemmEnd::send, kBf16, GemmKernel::wide, true, true, try_wide_to_send},
    {GemmEnd::send, kBf16, GemmKernel::mid, true, true, try_mid_to_send},
    {GemmEnd::scan, kBf16, GemmKernel::sample, true, true, try_sample},
    {GemmEnd::store, WeightFormat::int4, GemmKernel::packed, true, true, try_packed},
    {GemmEnd::store, WeightFormat::int4, GemmKernel::mma, false, true, try_mma},
    {GemmEnd::store, WeightFormat::int4, GemmKernel::unpacked, false, false, try_unpacked},
    {GemmEnd::store, WeightFormat::int8, GemmKernel::packed, true, true, try_packed},
    {GemmEnd::store, WeightFormat::int8, GemmKernel::mma, false, true, try_mma},
    {GemmEnd::store, WeightFormat::int8, GemmKernel::unpacked, false, false, try_unpacked},
    {GemmEnd::store, WeightFormat::e4m3, GemmKernel::packed, true, true, try_packed},
    {GemmEnd::store, WeightFormat::e4m3, GemmKernel::mma, false, true, try_mma},
    {GemmEnd::store, WeightFormat::e4m3, GemmKernel::unpacked, false, false, try_unpacked},
    {GemmEnd::store, WeightFormat::e4m3, GemmKernel::fp8, true, false, try_fp8},
    {GemmEnd::gate, WeightFormat::e4m3, GemmKernel::fp8, true, false, try_fp8},
    {GemmEnd::send, WeightFormat::e4m3, GemmKernel::fp8, true, false, try_fp8_to_send},
    {GemmEnd::store, WeightFormat::int8, GemmKernel::int8, true, false, try_int8},
    {GemmEnd::send, WeightFormat::int8, GemmKernel::int8, true, false, try_int8_to_send},
    {GemmEnd::store, WeightFormat::int8, GemmKernel::w8a8, false, false, try_w8a8},
    {GemmEnd::store, WeightFormat::e4m3, GemmKernel::w8a8, false, false, try_w8a8},
    {GemmEnd::gate, WeightFormat::int8, GemmKernel::int8, true, false, try_int8},
    {GemmEnd::gate, WeightFormat::int8, GemmKernel::w8a8, false, false, try_w8a8},
    {GemmEnd::gate, WeightFormat::e4m3, GemmKernel::w8a8, false, false, try_w8a8},
    {GemmEnd::gate, WeightFormat::int4, GemmKernel::packed, true, true, try_packed},
    {GemmEnd::gate, WeightFormat::int4, GemmKernel::mma, false, true, try_mma},
    {GemmEnd::gate, WeightFormat::int4, GemmKernel::unpacked, false, false, try_unpacked},
    {GemmEnd::gate, WeightFormat::int8, GemmKernel::packed, true, true, try_packed},
    {GemmEnd::gate, WeightFormat::int8, GemmKernel::mma, false, true, try_mma},
    {GemmEnd::gate, WeightFormat::int8, GemmKernel::unpacked, false, false, try_unpacked},
    {GemmEnd::gate, WeightFormat::e4m3, GemmKernel::packed, true, true, try_packed},
    {GemmEnd::gate, WeightFormat::e4m3, GemmKernel::mma, false, true, try_mma},
    {GemmEnd::gate, WeightFormat::e4m3, GemmKernel::unpacked, false, false, try_unpacked},
};

/// Of k in halves: each is whole stages of mid's and wide's kernels. Skinny's have half of their
/// slices of each, and zeros behind.
constexpr int64_t kHalved = 2 * kMostDepth * kSliceWidth;
static_assert(std::ranges::all_of(kMidKernels,
                                  [](const auto& k) { return kMostDepth % k.tile.depth == 0; }) &&
              std::ranges::all_of(kWideKernels,
                                  [](const auto& k) { return kMostDepth % k.tile.depth == 0; }));

/// Whether the row is of such products.
bool is_of(const Row& row, const GemmProblem& p) {
  return row.end == p.end && row.weight == p.weight.numbers &&
         quantises_rows(row.kernel) == p.weight.quantises_rows();
}

Why decline(const Row& row, const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice) {
  if (p.rows < 1) return "no rows";
  if (row.needs_wgmma && !gpu.has_wgmma) return "needs sm_90a";
  if (row.needs_slices && (!p.is_aligned || p.k % kSliceWidth != 0))
    return "k is not in slices of 64, or a row begins off 16 bytes";
  if (p.weight.in_halves && (p.end != GemmEnd::store || (row.needs_slices && p.k % kHalved != 0)))
    return "halves of k do not end with a stage, or of another end";
  return row.decline(p, gpu, choice);
}

/// A kernel's tiles, for people.
std::string describe(const GemmChoice& choice) {
  switch (choice.kernel) {
    case GemmKernel::wide: {
      const WideTile& t = kWideKernels[choice.wide.kernel].tile;
      return fmt::format("{} columns by {} rows, {} blocks of rows", t.columns(), t.rows,
                         choice.wide.row_blocks);
    }
    case GemmKernel::mid: {
      const MidTile& t = kMidKernels[choice.mid.kernel].tile;
      return fmt::format("{} columns by {} x {} rows, {} blocks of rows", t.columns,
                         t.groups * t.tiles, choice.mid.tile_rows, choice.mid.row_blocks);
    }
    case GemmKernel::skinny:
      return fmt::format("{} columns by {} rows", choice.skinny.columns, choice.skinny.block_rows);
    case GemmKernel::large:
      return fmt::format("{} pairs of tiles", choice.large.pairs);
    case GemmKernel::sample:
      return fmt::format("{} x {} rows, {} blocks of rows", choice.sample.groups,
                         choice.sample.tile_rows, choice.sample.row_blocks);
    case GemmKernel::packed:
      return fmt::format("{} warps by {} rows of the weight, {} blocks of rows",
                         choice.packed.warps, choice.packed.units * kPackedRows,
                         choice.packed.row_blocks);
    case GemmKernel::mma:
      return fmt::format("{} warps by {} rows of the weight by {} rows, {} blocks of rows",
                         choice.mma.warps, choice.mma.units * kPackedRows, choice.mma.eights * 8,
                         choice.mma.row_blocks);
    case GemmKernel::fp8:
    case GemmKernel::int8:
      return describe(choice.fp8, choice.kernel == GemmKernel::int8);
    case GemmKernel::w8a8:
      return describe(choice.w8a8);
    default:
      return {};
  }
}

}  // namespace

GemmChoice choose_gemm(const GemmProblem& problem, const GemmGpu& gpu,
                       std::vector<GemmDecline>* declined) {
  GemmChoice choice{.end = problem.end};
  for (const Row& row : kTable) {
    if (!is_of(row, problem)) continue;
    const Why why = decline(row, problem, gpu, choice);
    if (why == kServes) {
      choice.kernel = row.kernel;
      break;
    }
    if (declined) declined->push_back({row.kernel, why});
  }
  return choice;
}

bool can_serve(GemmKernel kernel, const GemmProblem& problem, const GemmGpu& gpu) {
  GemmChoice choice;
  return std::any_of(std::begin(kTable), std::end(kTable), [&](const Row& row) {
    return row.kernel == kernel && is_of(row, problem) &&
           decline(row, problem, gpu, choice) == kServes;
  });
}

const char* name_of(GemmKernel kernel) {
  constexpr const char* kNames[] = {"separate operations",
                                    "wide",
                                    "mid",
                                    "skinny",
                                    "large",
                                    "sample",
                                    "blas",
                                    "in_order",
                                    "packed",
                                    "mma",
                                    "unpacked",
                                    "fp8",
                                    "int8",
                                    "w8a8"};
  return kNames[static_cast<size_t>(kernel)];
}

const char* name_of(GemmEnd end) {
  constexpr const char* kNames[] = {"store", "gate", "heads", "send", "scan"};
  return kNames[static_cast<size_t>(end)];
}

std::string explain_gemm(const GemmProblem& problem, const GemmGpu& gpu) {
  std::vector<GemmDecline> declined;
  const GemmChoice choice = choose_gemm(problem, gpu, &declined);
  std::string text = name_of(choice.kernel);
  if (const std::string tiles = describe(choice); !tiles.empty()) text += ", " + tiles;
  for (size_t i = 0; i < declined.size(); ++i)
    text += fmt::format("{} {} ({})", i == 0 ? "; not" : ",", name_of(declined[i].kernel),
                        declined[i].why);
  return text;
}

}  // namespace nanovllm
