// oneDNN behind three calls; its types and its two API generations (2.x and 3.x) stay in
// onednn.cpp.
//
// Of its many implementations only the packed "brgemm" ones are used: they read weights at memory
// speed for one row and reach the arithmetic peak for many, and every row's bits are independent of
// the number of rows and of threads. That is checked when a backend is made, on the processor at
// hand; where it does not hold, or there is no such implementation, our own kernel serves
// (gemm.inl). bf16 products beside AMX are always our own (tiles.inl).
#pragma once

#include <memory>
#include <string>

#include "core/tensor.h"
#include "ops/cpu/weights.h"

namespace nanovllm::cpu {

/// "2.6.3", of the library that was loaded.
std::string onednn_version();
/// Whether AMX may be used, as far as oneDNN is concerned: it obeys ONEDNN_MAX_CPU_ISA, and our own
/// kernels do likewise.
bool onednn_allows_amx();

class OneDnn {
 public:
  /// The host memory that this takes, beyond that of a product while it runs: the code of
  /// the last 1,024 kinds of products, some 60 KB each.
  static constexpr size_t kMostBytes = size_t{64} << 20;

  explicit OneDnn(int threads);
  ~OneDnn();

  /// Whether products of this type can be computed here, with row-invariant bits.
  bool supports(DType dtype) const;
  /// The layout every product with a [n, k] weight reads, however many rows it has. Requires
  /// supports(dtype).
  const WeightLayout& layout(DType dtype, int64_t n, int64_t k) const;
  /// y[m, n] = x[m, k] w^T, w in layout(x.dtype, n, k).
  void gemm(const Tensor& y, const Tensor& x, const Tensor& w);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nanovllm::cpu
