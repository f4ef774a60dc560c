// y = x w^T in bf16 through cuBLASLt, restricted to algorithms that add the k products of an output
// in one chain, in order.
//
// Measured on an H200 with cuBLASLt 13.1: every such algorithm (no split of K, no reduction) gives
// the same bits, whatever its tile, its stages or its cluster, and for every number of rows; so
// does a plain loop of mma.sync m16n8k16 over k (gemm_in_order). The choice among them is therefore
// free, and a row's bits do not depend on the batch. f32 has no such class (and would use TF32 or
// SIMT kernels of many orders), so it always takes our own kernel.
#include <algorithm>
#include <bit>

#include "ops/cuda/cuda_backend.h"

namespace nanovllm {
namespace {

using Preference = Owner<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

constexpr int kCandidates = 32;

/// A matrix layout on the stack: nothing is allocated per call. Row-major [rows, width] is
/// column-major [width, rows].
struct Layout {
  cublasLtMatrixLayoutOpaque_t opaque{};
  Layout(cudaDataType_t type, int64_t width, int64_t rows, int64_t stride) {
    cublas_check(cublasLtMatrixLayoutInit(&opaque, type, static_cast<uint64_t>(width),
                                          static_cast<uint64_t>(rows), stride));
  }
  cublasLtMatrixLayout_t get() { return &opaque; }
};

/// One algorithm serves all row counts of a bucket: powers of two and their midpoints.
int64_t row_bucket(int64_t rows) {
  const int64_t power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  return rows > 16 && rows <= power / 4 * 3 ? power / 4 * 3 : power;
}

/// The largest power of two up to 16 that divides the addresses of all rows, in bytes.
int alignment_of(std::initializer_list<Tensor> tensors) {
  uint64_t bits = 16;
  for (const Tensor& t : tensors)
    bits |=
        reinterpret_cast<uintptr_t>(t.data) | static_cast<uint64_t>(t.stride[0]) * size_of(t.dtype);
  return static_cast<int>(bits & (~bits + 1));
}

cudaDataType_t type_of(const Tensor& t) { return t.dtype == DType::f32 ? CUDA_R_32F : CUDA_R_16BF; }

template <class T>
T config_of(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value{};
  size_t written = 0;
  cublas_check(
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written));
  return value;
}

bool adds_in_order(const cublasLtMatmulAlgo_t& algorithm) {
  return config_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
         config_of<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) ==
             CUBLASLT_REDUCTION_SCHEME_NONE;
}

Preference make_preference(uint64_t workspace, int alignment) {
  cublasLtMatmulPreference_t raw = nullptr;
  cublas_check(cublasLtMatmulPreferenceCreate(&raw));
  Preference preference(raw);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    cublas_check(cublasLtMatmulPreferenceSetAttribute(raw, attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    set(attribute, static_cast<uint32_t>(alignment));
  return preference;
}

}  // namespace

const CudaBackend::GemmChoice& CudaBackend::gemm_choice(const GemmKey& key,
                                                        cublasLtMatmulDesc_t operation) {
  const auto [place, is_new] = gemm_choices_.try_emplace(key);
  GemmChoice& choice = place->second;
  if (!is_new) return choice;
  const auto [rows, n, k, f32_out, alignment] = key;
  // Strides that have the alignment promised, and no better one.
  const int64_t step = std::max<int64_t>(1, alignment / 2), padded = (k + step - 1) / step * step;
  const int64_t y_step = std::max<int64_t>(1, alignment / (f32_out ? 4 : 2));
  Layout w(CUDA_R_16BF, k, n, padded), x(CUDA_R_16BF, k, rows, padded),
      y(f32_out ? CUDA_R_32F : CUDA_R_16BF, n, rows, (n + y_step - 1) / y_step * y_step);
  const Preference preference = make_preference(kBlasWorkspace, alignment);
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> candidates;
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(blas_.get(), operation, w.get(), x.get(), y.get(), y.get(),
                                     preference.get(), kCandidates, candidates.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return choice;
  cublas_check(status);
  for (int i = 0; i < count && !choice.found; ++i) {
    const auto& candidate = candidates[static_cast<size_t>(i)];
    if (candidate.state == CUBLAS_STATUS_SUCCESS && adds_in_order(candidate.algo))
      choice = {true, candidate.algo};
  }
  return choice;
}

void CudaBackend::gemm(Tensor y, Tensor x, Tensor w) {
  check(x.rank == 2 && w.rank == 2 && y.rank == 2 && x.shape[1] == w.shape[1] &&
            y.shape[0] == x.shape[0] && y.shape[1] == w.shape[0] && x.dtype == w.dtype &&
            (y.dtype == x.dtype || y.dtype == DType::f32),
        "gemm: {} = {} times {} transposed", y.describe(), x.describe(), w.describe());
  if (y.numel() == 0) return;
  if (x.dtype == DType::f32) return gemm_in_order(y, x, w);
  use_device();

  cublasLtMatmulDescOpaque_t opaque{};
  cublasLtMatmulDesc_t operation = &opaque;
  cublas_check(cublasLtMatmulDescInit(operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  cublas_check(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                              sizeof transposed));

  const int64_t m = x.shape[0], n = w.shape[0], k = x.shape[1];
  const int alignment = alignment_of({y, x, w});
  const GemmChoice& choice =
      gemm_choice({row_bucket(m), n, k, y.dtype == DType::f32, alignment}, operation);
  if (!choice.found) return gemm_in_order(y, x, w);
  // Column-major, as cuBLASLt sees it: y^T [n, m] = (w^T)^T x^T.
  Layout w_layout(type_of(w), k, n, w.stride[0]), x_layout(type_of(x), k, m, x.stride[0]),
      y_layout(type_of(y), n, m, y.stride[0]);
  const float one = 1.0f, zero = 0.0f;
  const cublasStatus_t status =
      cublasLtMatmul(blas_.get(), operation, &one, w.data, w_layout.get(), x.data, x_layout.get(),
                     &zero, y.data, y_layout.get(), y.data, y_layout.get(), &choice.algorithm,
                     blas_workspace_.get(), kBlasWorkspace, stream_.get());
  // The bucket's algorithm may not take this very row count; the same bits come from our own
  // kernel.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE)
    return gemm_in_order(y, x, w);
  cublas_check(status);
}

}  // namespace nanovllm
