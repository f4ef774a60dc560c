// y = x w^T in bf16 through cuBLASLt, restricted to algorithms that add the k products of an output
// in one chain, in order.
//
// Measured on an H200 with cuBLASLt 13: all algorithms of the tensor core families below, without a
// split of K, give the same bits, whatever their tile, stages or cluster, and for every number of
// rows; so does a plain loop of mma.sync m16n8k16 over k (gemm_in_order). The choice among them is
// therefore free, and a row's bits do not depend on the batch. The matrix-vector family (13) and
// family 16 add in other orders, and so do kernels for rows that do not begin on 16 bytes and for k
// that is no multiple of a tile's depth. Those, and f32, which has no such class, take our own
// kernel.
#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "ops/cuda/cuda_backend.h"
#include "ops/cuda/layout.h"

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

/// cuBLASLt's own numbers: wgmma kernels fed by TMA (Hopper), then mma.sync kernels.
constexpr int32_t kWgmmaFamily = 66;
constexpr int32_t kMmaFamilies[] = {21, 23, 24, 41, 42};

constexpr int64_t kFewestRows = 16, kManyRows = 256;
constexpr int64_t kTileDepth = 64;

/// One algorithm serves all row counts of a bucket: powers of two and their midpoints.
int64_t row_bucket(int64_t rows) {
  const int64_t power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  return std::max(kFewestRows, rows <= power / 4 * 3 ? power / 4 * 3 : power);
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

int32_t family_of(const cublasLtMatmulAlgo_t& algorithm) {
  return config_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_ID);
}

bool adds_in_order(const cublasLtMatmulAlgo_t& algorithm) {
  const int32_t family = family_of(algorithm);
  return (family == kWgmmaFamily ||
          std::ranges::find(kMmaFamilies, family) != std::end(kMmaFamilies)) &&
         config_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
         config_of<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) ==
             CUBLASLT_REDUCTION_SCHEME_NONE;
}

Preference make_preference(uint64_t workspace) {
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
    set(attribute, uint32_t{16});
  return preference;
}

/// What cuBLASLt proposes for `rows` rows, best first, of the algorithms that add in order.
std::vector<cublasLtMatmulAlgo_t> propose(cublasLtHandle_t blas, cublasLtMatmulDesc_t operation,
                                          int64_t rows, int64_t n, int64_t k, bool f32_out,
                                          uint64_t workspace) {
  Layout w(CUDA_R_16BF, k, n, k), x(CUDA_R_16BF, k, rows, k),
      y(f32_out ? CUDA_R_32F : CUDA_R_16BF, n, rows, n);
  const Preference preference = make_preference(workspace);
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> results;
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(blas, operation, w.get(), x.get(), y.get(), y.get(),
                                     preference.get(), kCandidates, results.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
  cublas_check(status);
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (const auto& result : std::span(results).first(static_cast<size_t>(count)))
    if (result.state == CUBLAS_STATUS_SUCCESS && adds_in_order(result.algo))
      algorithms.push_back(result.algo);
  return algorithms;
}

}  // namespace

const CudaBackend::GemmChoice& CudaBackend::gemm_choice(const GemmKey& key,
                                                        cublasLtMatmulDesc_t operation) {
  const auto [place, is_new] = gemm_choices_.try_emplace(key);
  GemmChoice& choice = place->second;
  if (!is_new) return choice;
  const auto [bucket, n, k, f32_out] = key;
  // Where cuBLASLt would split K, what is left of its proposals is poor (eight times too slow at
  // worst). The wgmma kernel that it proposes for more rows serves well there.
  for (int64_t rows = bucket; rows == bucket || rows <= kManyRows; rows = row_bucket(rows + 1)) {
    const auto algorithms = propose(blas_.get(), operation, rows, n, k, f32_out, kBlasWorkspace);
    if (algorithms.empty()) continue;
    if (const bool good = family_of(algorithms.front()) == kWgmmaFamily; good || !choice.found)
      choice = {true, algorithms.front()};
    if (family_of(choice.algorithm) == kWgmmaFamily) break;
  }
  return choice;
}

void CudaBackend::gemm(Tensor y, Tensor x, Tensor w) {
  check(x.rank == 2 && w.rank == 2 && y.rank == 2 && x.shape[1] == w.shape[1] &&
            y.shape[0] == x.shape[0] && y.shape[1] == w.shape[0] && x.dtype == w.dtype &&
            (y.dtype == x.dtype || y.dtype == DType::f32),
        "gemm: {} = {} times {} transposed", y.describe(), x.describe(), w.describe());
  if (y.numel() == 0) return;
  const int64_t m = x.shape[0], n = w.shape[0], k = x.shape[1];
  if (x.dtype == DType::f32 || k % kTileDepth != 0 || !wide_rows({y, x, w}))
    return gemm_in_order(y, x, w);
  use_device();

  cublasLtMatmulDescOpaque_t opaque{};
  cublasLtMatmulDesc_t operation = &opaque;
  cublas_check(cublasLtMatmulDescInit(operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  cublas_check(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                              sizeof transposed));

  const GemmChoice& choice = gemm_choice({row_bucket(m), n, k, y.dtype == DType::f32}, operation);
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
