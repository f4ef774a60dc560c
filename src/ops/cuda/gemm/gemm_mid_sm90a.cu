// Launches a kernel of gemm_mid.cuh.
#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/core/micro_batches.h"
#include "ops/cuda/gemm/gemm_mid.cuh"

namespace nanovllm {
namespace {

/// Bytes of weights that a block has under way before its ring is full: enough to keep memory busy,
/// and no more for others to wait behind. With more rows it makes no difference.
constexpr int kPacedBytes = 64 * 1024;
constexpr int64_t kMostPacedRows = 64;

/// The shared memory of a block, with the ring's stages so far, in bytes.
int shared_bytes(const MidKernel& kernel, const MidPlan& plan, const MidShape& shape) {
  const MidTile& tile = kernel.tile;
  return tile.shared_bytes(plan.tile_rows, shape.block_rows, shape.stages) +
         (kernel.in_pairs ? half_sum_bytes(tile.columns, 2, tile.groups) : 0);
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
  const int parts = kernel.in_pairs ? kPair : 1;  // of k
  shape.blocks = parts * plan.row_blocks * static_cast<int>(ceil_div(outputs, tile.outputs()));
  shape.steps = static_cast<int>(ceil_div(k, parts * tile.depth * kSliceWidth));
  const int fixed = shared_bytes(kernel, plan, shape),
            ring = std::min(kernel.ring, static_cast<int>(most) - fixed);
  shape.stages = std::clamp(ring / tile.stage_bytes(shape.block_rows), 2,
                            std::min(kMostStages, std::max(2, shape.steps)));
  shape.pace = m <= kMostPacedRows ? std::max(1, kPacedBytes / tile.weight_bytes()) : shape.stages;
  shape.paired = kernel.shares && plan.row_blocks % kPair == 0;
  return shape;
}

/// The part of the weights that is copied at once; `paired` blocks bring a part each.
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

void CudaBackend::gemm_mid(Tensor y, Tensor x, const Weight& w, const MidPlan& plan,
                           const HeadsInput* heads, const SentParts* sent) {
  with_index<std::size(kMidKernels)>(plan.kernel, [&]<int i>() {
    using Y = std::conditional_t<kMidKernels[i].out == DType::f32, float, bf16>;
    constexpr MidTile tile = kMidKernels[i].tile;
    const MidShape shape = shape_of(kMidKernels[i], plan, y, w.k(),
                                    divides_sms() ? kOverlapProductBytes : max_shared_bytes_);
    const unsigned cluster = shape.paired || kMidKernels[i].in_pairs ? kPair : 1;
    constexpr int kBlocksPerSm = kMidKernels[i].ring == kMidHalfRing ? 2 : 1;
    const int64_t blocks = kStays<Y>       ? std::min(shape.blocks, num_sms_ * kBlocksPerSm)
                           : divides_sms() ? shape.blocks
                                           : std::max(shape.blocks, num_sms_);
    const dim3 grid{grid_size(ceil_div(blocks, cluster) * cluster)};
    const auto shared = static_cast<size_t>(shared_bytes(kMidKernels[i], plan, shape));
    const MapBox rows{.parts = 1, .rows = shape.block_rows, .slices = tile.depth};
    const auto go = [&]<class Input>(const Input& input) {
      launch_clusters(gemm_mid_kernel<tile.columns, tile.groups, tile.tiles, tile.depth, tile.gated,
                                      DeviceType<Y>, Input>,
                      grid, cluster, tile.threads(), shared, can_launch_early_, device_ptr<Y>(y),
                      gemm_map(encode_map_, w.data, weights_box(tile, shape.paired)),
                      gemm_map(encode_map_, x, rows), shape, input);
    };
    if constexpr (kMidKernels[i].in_pairs) return go(MidPairs{});
    if constexpr (kMidKernels[i].makes_heads())
      if (heads) return go(*heads);
    if constexpr (kMidKernels[i].can_send())
      if (sent) return go(*sent);
    if constexpr (std::is_same_v<Y, bf16> && tile.tiles == 1 && !tile.gated)
      if (w.format.in_halves) return go(MidNothing<true>{});
    go(MidNothing<false>{});
  });
}

}  // namespace nanovllm
