// Launches the kernel of gemm_packed.cuh.
#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/quantised/gemm_packed_turns.cuh"

namespace nanovllm {
namespace {

/// The bytes that a ring takes of an SM's shared memory: less than half, so that the next product's
/// weight can come in while this one ends; more for a weight of which that would be a small part.
constexpr int64_t kHalfRing = 96 * 1024, kWholeRing = 184 * 1024;
constexpr int kMostDeepRows = 64;  // of a tile whose stages have two chunks

/// wgmma's for m rows of a tile: fewer kinds where scales are finer than a record (PackedKind).
int wgmma_rows(int m, bool one_group) {
  for (const int rows : {16, 24, 32, 48, 64, 96})
    if (m <= rows && (one_group || rows % 24 != 0)) return rows;
  return kMostPackedTile;
}
/// f<rows>() of those.
template <bool one_group, class F>
void with_rows(int m, F&& f) {
  const int rows = wgmma_rows(m, one_group);
  if constexpr (one_group) {
    if (rows == 24) return f.template operator()<24>();
    if (rows == 48) return f.template operator()<48>();
    if (rows == 96) return f.template operator()<96>();
  }
  if (rows == 16) return f.template operator()<16>();
  if (rows == 32) return f.template operator()<32>();
  if (rows == 64) return f.template operator()<64>();
  f.template operator()<kMostPackedTile>();
}

/// f<PackedKind>().
template <class F>
void with_kind(WeightFormat::Numbers numbers, bool coarse, bool one_group, F&& f) {
  const auto with_groups = [&]<WeightFormat::Numbers of, bool is_coarse>() {
    if (one_group) return f.template operator()<PackedKind<of, is_coarse, true>>();
    f.template operator()<PackedKind<of, is_coarse, false>>();
  };
  if (numbers == WeightFormat::int8)
    return with_groups.template operator()<WeightFormat::int8, false>();
  if (numbers == WeightFormat::e4m3)
    return with_groups.template operator()<WeightFormat::e4m3, false>();
  if (coarse) return with_groups.template operator()<WeightFormat::int4, true>();
  with_groups.template operator()<WeightFormat::int4, false>();
}

/// All but y's stride.
PackedShape shape_of(const Weight& w, int64_t rows, int64_t outputs, const PackedPlan& plan,
                     int num_sms) {
  const bool gated = outputs < w.n();
  const PackedLayout layout(w.format, w.n(), w.k());
  PackedShape shape{};
  shape.rows = static_cast<int>(rows);
  shape.columns = static_cast<int>(outputs);
  shape.block_rows = static_cast<int>(ceil_div(rows, plan.row_blocks * 8) * 8);
  shape.row_blocks = plan.row_blocks;
  shape.warps = plan.warps;
  shape.units = static_cast<int>(outputs / kPackedRows);
  shape.up = gated ? shape.units : 0;
  shape.items = plan.row_blocks * static_cast<int>(ceil_div(
                                      shape.units, gated ? plan.warps : plan.warps * plan.units));
  shape.record_bytes = layout.record_bytes;
  shape.groups = layout.groups;
  const int chunk = kPackedSlices * shape.block_rows * kSliceRowBytes +
                    plan.warps * plan.units * layout.record_bytes;
  shape.cluster = w.format.in_halves ? 2 : 1;
  const int chunks = layout.columns / shape.cluster;
  const bool two = w.format.numbers == WeightFormat::int4 && chunks % 2 == 0 &&
                   shape.block_rows <= kMostDeepRows;
  shape.depth = two ? 2 : 1;
  shape.steps = chunks / shape.depth;
  shape.x_bytes = shape.depth * kPackedSlices * shape.block_rows * kSliceRowBytes;
  shape.stage_bytes = static_cast<int>(ceil_div(shape.depth * chunk, 1024) * 1024);
  const int64_t tiles = ceil_div(shape.items, num_sms / shape.cluster), all = tiles * shape.steps;
  shape.in_turns = takes_turns(w.format, w.k() / shape.cluster, plan.groups(), rows, tiles);
  const int half_sums = shape.cluster == 1
                            ? 0
                            : half_sum_bytes(wgmma_rows(shape.block_rows, layout.groups == 1),
                                             plan.units, shape.in_turns ? 1 : plan.groups());
  const int64_t ring = (all * shape.stage_bytes > kWholeRing ? kWholeRing : kHalfRing) - half_sums,
                room = std::min(ring / shape.stage_bytes, all);
  shape.stages = shape.in_turns ? turn_stages(room)
                                : static_cast<int>(std::clamp<int64_t>(room, 2, kMostStages));
  return shape;
}

}  // namespace

void CudaBackend::gemm_packed(Tensor y, Tensor x, const Weight& w, bool gated,
                              const PackedPlan& plan) {
  const PackedLayout layout(w.format, w.n(), w.k());
  const int num_sms = divides_sms() ? other_sms_ : num_sms_;
  PackedShape shape = shape_of(w, x.shape[0], y.shape[1], plan, num_sms);
  shape.stride = y.stride[0];
  const CUtensorMap records =
      map_records(encode_map_, w, layout, gated ? 2 : 1,
                  gated ? plan.warps : plan.warps * plan.units, shape.depth * layout.record_bytes);
  const CUtensorMap rows_of_x =
      gemm_map(encode_map_, x,
               {.parts = 1, .rows = shape.block_rows, .slices = shape.depth * kPackedSlices});
  const auto* row_scales = reinterpret_cast<const uint32_t*>(w.data.data + layout.row_scales());
  const bool is_coarse = w.format.numbers == WeightFormat::int4 && !has_any(fine_, w);
  with_kind(w.format.numbers, is_coarse, shape.groups == 1, [&]<class Kind>() {
    with_rows<Kind::kOneGroup>(shape.block_rows, [&]<int rows>() {
      const auto go = [&]<int units, int depth, bool in_turns>() {
        const int groups = in_turns ? 1 : plan.groups(),
                  sums = (shape.cluster > 1 ? half_sum_bytes(rows, units, groups) : 0) +
                         (in_turns ? handed_bytes(rows, units) : 0);
        launch_clusters(gemm_packed_kernel<Kind, rows, units, depth, in_turns>,
                        grid_size(num_sms / shape.cluster * shape.cluster), shape.cluster,
                        ((in_turns ? kMostPackedGroups : groups) + 1) * kGroupThreads,
                        static_cast<size_t>(packed_shared_bytes(rows, shape.block_rows,
                                                                shape.stage_bytes, shape.stages) +
                                            sums),
                        can_launch_early_, device_ptr<bf16>(y), records, rows_of_x, row_scales,
                        shape);
      };
      const auto with_units = [&]<int depth, bool in_turns>() {
        if (plan.units == 1) return go.template operator()<1, depth, in_turns>();
        go.template operator()<2, depth, in_turns>();
      };
      if constexpr (Kind::kNumbers == WeightFormat::int4 && rows <= kMostTurnRows)
        if (shape.in_turns) return with_units.template operator()<kTurnChunks, true>();
      if constexpr (Kind::kNumbers == WeightFormat::int4 && rows <= kMostDeepRows)
        if (shape.depth == 2) return with_units.template operator()<2, false>();
      with_units.template operator()<1, false>();
    });
  });
}

}  // namespace nanovllm
