// Chooses and launches a kernel of gemm_large.cuh.
#include <algorithm>
#include <bit>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/gemm/gemm_large.cuh"

namespace nanovllm {
namespace {

/// Row pairs in a group of tiles: a cluster's tiles at the same time are about as high as wide.
constexpr int kGroupPairs = 8;

/// How the copy engine sees a matrix: boxes of 128 rows by 64 columns.
CUtensorMap map_of(EncodeMap encode, const Tensor& t) {
  return tensor_map<2>(encode, t, {t.shape[1], t.shape[0]}, {t.stride[0] * 2},
                       {kLargeDepth, kLargeRows});
}

/// With fewer, tiles of 256 rows leave too much undone: measured, cuBLASLt is as fast at 512 rows
/// of the widest weights and faster below.
constexpr int64_t kFewestRows = 768;

/// Whether the tiles keep the clusters busy to the end: 90 % of the time that the last of them
/// takes.
bool fills(int64_t pairs, int64_t clusters) {
  return 10 * pairs >= 9 * ceil_div(pairs, clusters) * clusters;
}

}  // namespace

template <LargeEnd end>
bool CudaBackend::gemm_large(Tensor y, Tensor x, Tensor w, const LargeInput<end>& input) {
  constexpr bool gated = end == LargeEnd::gate;
  const int64_t k = x.shape[1];
  if (!is_hopper_ || x.shape[0] < kFewestRows || x.dtype != DType::bf16 || y.dtype != DType::bf16 ||
      k % kLargeDepth != 0 || k < kLargeParts * kLargeDepth ||
      y.shape[1] % Vec<__nv_bfloat16>::size != 0 || !wide_rows({y, x, w}))
    return false;
  const int tile_columns = gated ? kLargeColumns / 2 : kLargeColumns;
  const int64_t row_pairs = ceil_div(x.shape[0], int64_t{kLargeRows * kLargeBlocks}),
                pairs = row_pairs * ceil_div(y.shape[1], int64_t{tile_columns}),
                clusters = std::min<int64_t>(num_sms_ / kLargeBlocks, pairs);
  if (!fills(pairs, num_sms_ / kLargeBlocks)) return false;
  const LargeShape shape{.rows = static_cast<int>(y.shape[0]),
                         .columns = static_cast<int>(y.shape[1]),
                         .stride = y.stride[0],
                         .steps = static_cast<int>(k / kLargeDepth),
                         .pairs = static_cast<int>(pairs),
                         .row_pairs = static_cast<int>(row_pairs),
                         .groups = kGroupPairs,
                         .up = static_cast<int>(y.shape[1])};
  launch_early(gemm_large_kernel<end>, grid_size(clusters * kLargeBlocks), kLargeThreads,
               sizeof(LargeShared), device_ptr<bf16>(y), map_of(encode_map_, x),
               map_of(encode_map_, w), shape, input);
  return true;
}

template bool CudaBackend::gemm_large(Tensor, Tensor, Tensor, const LargeInput<LargeEnd::store>&);
template bool CudaBackend::gemm_large(Tensor, Tensor, Tensor, const LargeInput<LargeEnd::gate>&);

bool CudaBackend::fused_gemm_qk_norm_rope_store(Tensor qkv, Tensor q, Tensor k, Tensor v, Tensor x,
                                                Weight w, Tensor q_norm, Tensor k_norm, float eps,
                                                const Batch& batch, Tensor cos_sin, KvCache cache) {
  check_fused("gemm_qk_norm_rope_store", q, k, v, batch, cos_sin, cache);
  const int64_t block_size = cache.k.shape[2];
  const auto follows = [&](const Tensor& next, const Tensor& t) {
    return next.data == t.data + t.shape[1] * kProductHead * size_of(t.dtype) &&
           next.stride[0] == t.stride[0];
  };
  if (q.dtype != DType::bf16 || q.shape[2] != kProductHead || cos_sin.shape[1] != kProductHead ||
      q.stride[1] != kProductHead || !follows(k, q) || !follows(v, k) ||
      !std::has_single_bit(static_cast<uint64_t>(block_size)) ||
      !wide_rows({cache.k, cache.v, cos_sin, q_norm, k_norm}))
    return false;
  LargeInput<LargeEnd::heads> input{
      HeadsInput{.heads = fused_arguments<bf16>(q, k, v, batch, cos_sin, cache),
                 .block_shift = std::countr_zero(static_cast<uint64_t>(block_size))}};
  input.heads.q_norm = device_ptr<bf16>(q_norm);
  input.heads.k_norm = device_ptr<bf16>(k_norm);
  input.heads.eps = eps;
  return gemm_mid(qkv, x, w.data, false, &input) || gemm_large(qkv, x, w.data, input);
}

}  // namespace nanovllm
