// y = x w^T in bf16 through cuBLASLt, restricted to algorithms that add the k products of an output
// in one chain, in order.
//
// Measured on an H200 with cuBLASLt 13: all algorithms of the tensor core families below, without a
// split of K, give the same bits, whatever their tile, stages or cluster, and for every number of
// rows; so does a plain loop of mma.sync m16n8k16 over k (gemm_in_order). The choice among them is
// therefore free, and a row's bits do not depend on the batch. Elsewhere that is not taken on
// trust: the families are compared at the first start, and one that differs is not used
// (gemm_families.h). The matrix-vector family (13) and family 16 add in other orders, and so do
// kernels for rows that do not begin on 16 bytes, for k that is no multiple of a tile's depth, and
// some for few columns. Those, and f32, which has no such class, take our own kernel.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/core/layout.h"
#include "ops/cuda/gemm/gemm_check.h"

namespace nanovllm {
namespace {

constexpr int64_t kTileDepth = 64, kTileColumns = 8, kFewestColumns = 16;

}  // namespace

bool CudaBackend::gemm_takes_blas(Tensor y, Tensor x, Tensor w) {
  const int64_t n = w.shape[0], k = x.shape[1];
  return x.dtype == DType::bf16 && k % kTileDepth == 0 && n % kTileColumns == 0 &&
         n >= kFewestColumns && wide_rows({y, x, w});
}

void CudaBackend::gemm(Tensor y, Tensor x, Weight weight) {
  const Tensor& w = weight.data;
  check(x.rank == 2 && w.rank == 2 && y.rank == 2 && x.shape[1] == w.shape[1] &&
            y.shape[0] == x.shape[0] && y.shape[1] == w.shape[0] && x.dtype == w.dtype &&
            (y.dtype == x.dtype || y.dtype == DType::f32),
        "gemm: {} = {} times {} transposed", y.describe(), x.describe(), w.describe());
  if (y.numel() == 0) return;
#ifdef NANOVLLM_CUDA_HOPPER
  if (gemm_wide(y, x, w, false) || gemm_mid(y, x, w, false) || gemm_skinny(y, x, w, false) ||
      gemm_large<LargeEnd::store>(y, x, w))
    return;
#endif
  use_device();
  // Whoever takes it, the bits are the same.
  if (gemm_takes_blas(y, x, w)) {
    await_gemm_families();
    if (const cublasLtMatmulAlgo_t* algorithm = gemm_algorithms_->choose(
            {row_bucket(x.shape[0]), w.shape[0], x.shape[1], y.dtype == DType::f32});
        algorithm &&
        gemm_algorithms_->run(y, x, w, *algorithm, lane_->blas_workspace.get(), stream()))
      return;
  }
  gemm_in_order(y, x, w, stream());
}

void CudaBackend::gemm_silu_and_mul(Tensor y, Tensor gate_up, Tensor x, Weight weight) {
  const Tensor& w = weight.data;
  check(x.rank == 2 && w.rank == 2 && y.rank == 2 && x.shape[1] == w.shape[1] &&
            y.shape[0] == x.shape[0] && 2 * y.shape[1] == w.shape[0] && x.dtype == w.dtype &&
            y.dtype == x.dtype,
        "gemm_silu_and_mul: {} = {} times {} transposed", y.describe(), x.describe(), w.describe());
  if (y.numel() == 0) return;
#ifdef NANOVLLM_CUDA_HOPPER
  if (gemm_wide(y, x, w, true) || gemm_mid(y, x, w, true) || gemm_skinny(y, x, w, true) ||
      gemm_large<LargeEnd::gate>(y, x, w))
    return;
#endif
  Backend::gemm_silu_and_mul(y, gate_up, x, weight);
}

bool CudaBackend::gemm_sent(Tensor y, Tensor x, Tensor w, const SentParts& to) {
#ifdef NANOVLLM_CUDA_HOPPER
  return gemm_wide(y, x, w, false, &to) || gemm_mid(y, x, w, false, nullptr, &to);
#else
  return (void)y, (void)x, (void)w, (void)to, false;
#endif
}

}  // namespace nanovllm
