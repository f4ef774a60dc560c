// The choice of cuBLASLt's algorithm for a product: one that adds the k products of an output in
// one chain, in order (gemm.cpp, gemm_families.h), and of those the one that was measured to be
// fastest, or else the one that cuBLASLt proposes first.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "ops/cuda/core/handles.h"
#include "ops/cuda/gemm/cublaslt/gemm_families.h"

namespace nanovllm {

/// The key by which an algorithm is chosen. One serves all row counts of a bucket.
struct GemmKey {
  int64_t rows, n, k;  // rows: row_bucket() of them
  bool f32_out;
  bool twice = false;  // two such products at once, of the halves of a weight's k
  auto operator<=>(const GemmKey&) const = default;
};

/// Powers of two and their midpoints, 16 at least.
int64_t row_bucket(int64_t rows);

/// A matrix layout on the stack: nothing is allocated per call. Row-major [rows, width] is
/// column-major [width, rows].
struct BlasLayout {
  cublasLtMatrixLayoutOpaque_t opaque{};
  BlasLayout(cudaDataType_t type, int64_t width, int64_t rows, int64_t stride) {
    cublas_check(cublasLtMatrixLayoutInit(&opaque, type, static_cast<uint64_t>(width),
                                          static_cast<uint64_t>(rows), stride));
  }
  /// Two matrices, the second `offset` elements behind the first.
  void repeat(int64_t offset) {
    const int32_t count = 2;
    cublas_check(cublasLtMatrixLayoutSetAttribute(&opaque, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                  &count, sizeof count));
    cublas_check(cublasLtMatrixLayoutSetAttribute(
        &opaque, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset, sizeof offset));
  }
  cublasLtMatrixLayout_t get() { return &opaque; }
};

/// y^T = (w^T)^T x^T, bf16 in, f32 sums, as cuBLASLt is asked for it.
class BlasOperation {
 public:
  BlasOperation();
  cublasLtMatmulDesc_t get() { return &opaque_; }

 private:
  cublasLtMatmulDescOpaque_t opaque_{};
};

/// The choice among cuBLASLt's proposals: all; those that do not split K, of families that may turn
/// out to add in order; those that do add in order.
enum class GemmOrder { any, candidates, in_order };

class GemmAlgorithms {
 public:
  static constexpr size_t kWorkspace = size_t{16} << 20;  // bytes, of every algorithm at most

  /// `device`: the GPU's name. Measured choices are kept in a file for each GPU and version of
  /// cuBLASLt, the verdicts over families in one for each driver besides (cache_file.h).
  GemmAlgorithms(cublasLtHandle_t blas, const std::string& device);

  /// Null where cuBLASLt offers none that adds in order.
  const cublasLtMatmulAlgo_t* choose(const GemmKey& key);
  /// cuBLASLt's proposals, best first.
  std::vector<cublasLtMatmulAlgo_t> propose(const GemmKey& key, GemmOrder order);
  /// y = x w^T on `stream`, or, where y is two matrices, those of the halves of k, with kWorkspace
  /// bytes of device memory. False, and nothing done, where the algorithm, which serves a bucket,
  /// does not take this product.
  bool run(const Tensor& y, const Tensor& x, const Tensor& w, const cublasLtMatmulAlgo_t& algorithm,
           std::byte* workspace, cudaStream_t stream);
  bool adds_in_order(const cublasLtMatmulAlgo_t& algorithm) const;
  static int32_t family_of(const cublasLtMatmulAlgo_t& algorithm);
  GemmFamilies& families() { return families_; }
  /// Makes `algorithm` the choice, here and in the file. A file that cannot be written is no error:
  /// the choice then holds for this process.
  void keep(const GemmKey& key, const cublasLtMatmulAlgo_t& algorithm);

 private:
  void read_file();
  std::optional<cublasLtMatmulAlgo_t> first_choice(const GemmKey& key);

  cublasLtHandle_t blas_;
  GemmFamilies families_;
  BlasOperation operation_;
  std::filesystem::path file_;  // empty: nowhere
  bool file_was_read_ = false;
  std::map<GemmKey, cublasLtMatmulAlgo_t> measured_;
  std::map<GemmKey, std::optional<cublasLtMatmulAlgo_t>> choices_;
};

}  // namespace nanovllm
