// Chooses and launches a kernel of gemm_mid.cuh.
#include <algorithm>
#include <limits>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/core/lanes.h"
#include "ops/cuda/gemm/gemm_mid.cuh"

namespace nanovllm {
namespace {

constexpr int64_t kMostRows = 256, kTileRows = 64;

/// Fewer rows are gemm_skinny.cuh's, whose smaller tiles give more SMs a part of a small weight.
/// Measured on an H200.
int64_t fewest_rows(const Tensor& w, DType out) {
  constexpr int64_t kLongChain = 2048;  // where skinny tiles wait for long
  if (out == DType::f32) return 33;
  const int64_t bytes = w.numel() * 2;
  return bytes > kLargeWeight || (w.shape[1] >= kLongChain && 2 * bytes > kLargeWeight) ? 9 : 65;
}

/// What a ring takes of an SM's shared memory: nearly all, or half where two blocks share an SM,
/// one of which stores its tile while the other multiplies.
constexpr int kWholeRing = 222 * 1024, kHalfRing = 104 * 1024;

/// A kernel, and whether two blocks above each other share their weights. Measured on an H200:
/// copies of less than 8 KB cost more than sharing saves, and so do two groups that wait for two
/// others. Some are for lanes alone, where a product has fewer SMs.
struct MidKernel {
  MidTile tile;
  bool shares;
  int ring = kWholeRing;
  DType out = DType::bf16;
  bool for_lanes = false;
};
constexpr MidKernel kKernels[] = {
    {{32, 1, 1, 2}, false},
    {{48, 1, 1, 2}, false},
    {{64, 1, 1, 2}, true},
    {{96, 1, 1, 2}, true},
    {{128, 1, 1, 1}, false},
    {{144, 1, 1, 1}, false},
    {{64, 2, 1, 1}, false},
    {{96, 2, 1, 1}, false},
    {{96, 1, 1, 1}, false, kHalfRing, DType::f32},
    {{192, 2, 1, 1}, false, kWholeRing, DType::f32},
    {{192, 3, 1, 1}, false, kWholeRing, DType::f32},
    {{192, 2, 2, 1}, false, kWholeRing, DType::f32},
    {{96, 1, 1, 1, true}, true},
    {{96, 2, 1, 1, true}, true},
    {{96, 3, 1, 1, true}, false},
    {{192, 1, 1, 1, true}, false},
    {{192, 2, 1, 1, true}, false},
    {{192, 3, 1, 1, true}, false},
    {{192, 2, 2, 1, true}, false},
    {{128, 2, 1, 1}, false, kWholeRing, DType::bf16, true},
    {{32, 2, 1, 2}, false, kWholeRing, DType::bf16, true},
    {{128, 2, 1, 1, true}, false, kWholeRing, DType::bf16, true},
};

/// Whether the kernel can end in HeadsInput.
constexpr bool makes_heads(const MidTile& t) {
  return t.columns == kProductHead && t.tiles == 1 && !t.gated;
}

/// Whether the kernel can end in SentParts.
constexpr bool can_send(const MidKernel& k) {
  return k.out == DType::bf16 && k.tile.tiles == 1 && !k.tile.gated && !k.for_lanes;
}

/// How a product is cut.
struct MidPlan {
  int kernel = -1, row_blocks = 0, tile_rows = 0;
};

/// What is asked of a plan besides its product.
struct MidDemand {
  bool gated, heads, in_lanes;
  int num_sms;
};

bool may_serve(const MidKernel& kernel, const MidDemand& demand, DType out) {
  return kernel.tile.gated == demand.gated && kernel.out == out &&
         (demand.in_lanes || !kernel.for_lanes) && (!demand.heads || makes_heads(kernel.tile));
}

/// The cut that takes the fewest cycles (gemm_mid.cuh).
MidPlan plan_of(const Tensor& y, const Tensor& w, const MidDemand& demand) {
  constexpr int64_t kBlockCycles = 6000,  // that a block takes besides
      kAgainCycles = 10;                  // for each block that reads a large weight again
  const int64_t m = y.shape[0], outputs = y.shape[1], steps = w.shape[1] / 16,
                again = w.numel() * 2 > kLargeWeight ? kAgainCycles : 0;
  MidPlan best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < static_cast<int>(std::size(kKernels)); ++i) {
    const MidTile& t = kKernels[i].tile;
    if (!may_serve(kKernels[i], demand, y.dtype)) continue;
    const int64_t tiles = t.groups * t.tiles, row_blocks = ceil_div(m, kTileRows * tiles),
                  tile_rows = ceil_div(m, row_blocks * tiles * 8) * 8,
                  waves = ceil_div(row_blocks * ceil_div(outputs, t.outputs()), demand.num_sms),
                  c = t.columns, taken = c + tiles * tile_rows,
                  cycles = std::max({taken / 2, (taken + tiles * (c + kTileRows)) / 4,
                                     tiles * std::max(16 + c / 4, c / 2)}),
                  all = waves * ((cycles + row_blocks * again) * steps + kBlockCycles);
    if (all < least)
      least = all, best = {i, static_cast<int>(row_blocks), static_cast<int>(tile_rows)};
  }
  return best;
}

/// y in the cut of `plan`, with a ring as deep as its kernel's and `most` bytes of shared memory
/// allow.
MidShape shape_of(const MidKernel& kernel, const MidPlan& plan, const Tensor& y, int64_t k,
                  size_t most) {
  const MidTile& tile = kernel.tile;
  const int64_t m = y.shape[0], outputs = y.shape[1];
  MidShape shape{};
  shape.rows = static_cast<int>(m);
  shape.columns = static_cast<int>(outputs);
  shape.stride = y.stride[0];
  shape.tile_rows = plan.tile_rows;
  shape.row_blocks = plan.row_blocks;
  shape.block_rows = copied_rows(tile.block_rows(plan.tile_rows), m);
  shape.blocks = plan.row_blocks * static_cast<int>(ceil_div(outputs, tile.outputs()));
  shape.steps = static_cast<int>(ceil_div(k, tile.depth * kSliceWidth));
  const int fixed = tile.shared_bytes(plan.tile_rows, shape.block_rows, 0),
            ring = std::min(kernel.ring, static_cast<int>(most) - fixed);
  shape.stages = std::clamp(ring / tile.stage_bytes(shape.block_rows), 2,
                            std::min(kMostStages, std::max(2, shape.steps)));
  shape.paired = kernel.shares && plan.row_blocks % kPair == 0;
  return shape;
}

/// What is copied of the weights at once; `paired` blocks bring a part each.
MapBox weights_box(const MidTile& tile, bool paired) {
  const int parts = tile.gated ? 2 : 1;
  MapBox box{.parts = parts, .rows = tile.columns, .parts_of_box = parts, .slices = tile.depth};
  if (paired && tile.depth % kPair == 0)
    box.slices /= kPair;
  else if (paired)
    box.rows /= kPair, box.parts_of_box = 1;
  return box;
}

}  // namespace

bool CudaBackend::gemm_mid(Tensor y, Tensor x, Tensor w, bool gated, const HeadsInput* heads,
                           const SentParts* sent) {
  constexpr int64_t kFewestLogits = 8192;  // a result in f32 is logits
  const int64_t m = x.shape[0], k = x.shape[1], outputs = y.shape[1];
  const int64_t fewest = divides_sms() ? 1 : fewest_rows(w, y.dtype);
  if (!is_hopper_ || x.dtype != DType::bf16 || m < fewest || m > kMostRows ||
      k % kSliceWidth != 0 || outputs % 8 != 0 || !wide_rows({y, x, w}))
    return false;
  // Where lanes have the same SMs, such blocks find no room beside attention's.
  if (runs_lanes_ != divides_sms() || (heads && !divides_sms()) ||
      (y.dtype == DType::f32 && outputs < kFewestLogits))
    return false;
  const int num_sms = divides_sms() ? lane_sms_ : num_sms_;
  const MidPlan plan = plan_of(
      y, w,
      {.gated = gated, .heads = heads != nullptr, .in_lanes = divides_sms(), .num_sms = num_sms});
  with_index<std::size(kKernels)>(plan.kernel, [&]<int i>() {
    using Y = std::conditional_t<kKernels[i].out == DType::f32, float, bf16>;
    constexpr MidTile tile = kKernels[i].tile;
    const MidShape shape =
        shape_of(kKernels[i], plan, y, k, divides_sms() ? kLaneProductBytes : max_shared_bytes_);
    const unsigned cluster = shape.paired ? kPair : 1;
    constexpr int kBlocksPerSm = kKernels[i].ring == kHalfRing ? 2 : 1;
    const int64_t blocks = kStays<Y>       ? std::min(shape.blocks, num_sms_ * kBlocksPerSm)
                           : divides_sms() ? shape.blocks
                                           : std::max(shape.blocks, num_sms_);
    const dim3 grid{grid_size(ceil_div(blocks, cluster) * cluster)};
    const auto shared =
        static_cast<size_t>(tile.shared_bytes(plan.tile_rows, shape.block_rows, shape.stages));
    const MapBox rows{.parts = 1, .rows = shape.block_rows, .slices = tile.depth};
    const auto go = [&]<class Input>(const Input& input) {
      launch_clusters(gemm_mid_kernel<tile.columns, tile.groups, tile.tiles, tile.depth, tile.gated,
                                      DeviceType<Y>, Input>,
                      grid, cluster, tile.threads(), shared, can_launch_early_, device_ptr<Y>(y),
                      gemm_map(encode_map_, w, weights_box(tile, shape.paired)),
                      gemm_map(encode_map_, x, rows), shape, input);
    };
    if constexpr (makes_heads(tile))
      if (heads) return go(*heads);
    if constexpr (can_send(kKernels[i]))
      if (sent) return go(*sent);
    go(MidNothing{});
  });
  return plan.kernel >= 0;
}

}  // namespace nanovllm
