// Launches a kernel of gemm_large.cuh.
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

}  // namespace

void CudaBackend::gemm_large(Tensor y, Tensor x, const Weight& w, GemmEnd end,
                             const LargePlan& plan, const HeadsInput* heads) {
  const int64_t clusters = std::min<int64_t>(num_sms_ / kLargeBlocks, plan.pairs);
  const LargeShape shape{
      .rows = static_cast<int>(y.shape[0]),
      .columns = static_cast<int>(y.shape[1]),
      .stride = y.stride[0],
      .steps = static_cast<int>(x.shape[1] / kLargeDepth),
      .chain = static_cast<int>(x.shape[1] / kLargeDepth) / (w.format.in_halves ? 2 : 1),
      .pairs = static_cast<int>(plan.pairs),
      .row_pairs = static_cast<int>(plan.row_pairs),
      .groups = kGroupPairs,
      .up = static_cast<int>(y.shape[1])};
  const auto go = [&]<GemmEnd kEnd>(const LargeInput<kEnd>& input) {
    launch_early(gemm_large_kernel<kEnd>, grid_size(clusters * kLargeBlocks), kLargeThreads,
                 sizeof(LargeShared), device_ptr<bf16>(y), map_of(encode_map_, x),
                 map_of(encode_map_, w.data), shape, input);
  };
  if (end == GemmEnd::heads)
    go(LargeInput<GemmEnd::heads>{*heads});
  else if (end == GemmEnd::gate)
    go(LargeInput<GemmEnd::gate>{});
  else
    go(LargeInput<GemmEnd::store>{});
}

bool CudaBackend::fused_gemm_qk_norm_rope_store(Tensor qkv, Tensor q, Tensor k, Tensor v, Tensor x,
                                                Weight w, Tensor q_norm, Tensor k_norm, float eps,
                                                const Batch& batch, Tensor cos_sin, KvCache cache) {
  check_fused("gemm_qk_norm_rope_store", q, k, v, batch, cos_sin, cache);
  const int64_t block_size = cache.k.shape[2];
  const auto follows = [&](const Tensor& next, const Tensor& t) {
    return next.data == t.data + t.shape[1] * kProductHead * size_of(t.dtype) &&
           next.stride[0] == t.stride[0];
  };
  if (q.dtype != DType::bf16 || cache.k.dtype != DType::bf16 || q.shape[2] != kProductHead ||
      cos_sin.shape[1] != kProductHead || q.stride[1] != kProductHead || !follows(k, q) ||
      !follows(v, k) || !std::has_single_bit(static_cast<uint64_t>(block_size)) ||
      !wide_rows({cache.k, cache.v, cos_sin, q_norm, k_norm}))
    return false;
  HeadsInput input{.heads = fused_arguments<bf16>(q, k, v, batch, cos_sin, cache),
                   .block_shift = std::countr_zero(static_cast<uint64_t>(block_size))};
  input.heads.q_norm = device_ptr<bf16>(q_norm);
  input.heads.k_norm = device_ptr<bf16>(k_norm);
  input.heads.eps = eps;
  return run_gemm(qkv, x, w, GemmEnd::heads, &input);
}

}  // namespace nanovllm
