#include "ops/cuda/gemm/choose.h"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "ops/cuda/gemm/choose_kernels.h"
#include "ops/cuda/gemm/gemm_kernels.h"

namespace nanovllm {
namespace {

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
  Try* decline;
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
      return fmt::format("{} columns by {} x {} rows, {} blocks of rows{}", t.columns,
                         t.groups * t.tiles, choice.mid.tile_rows, choice.mid.row_blocks,
                         kMidKernels[choice.mid.kernel].in_pairs ? ", a half of k each" : "");
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
