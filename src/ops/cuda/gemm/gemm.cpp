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
#include <cstdio>

#include <fmt/format.h>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/core/layout.h"
#include "ops/cuda/gemm/cublaslt/gemm_check.h"
#include "ops/cuda/quantised/packed.h"

namespace nanovllm {

GemmChoice CudaBackend::choose(const GemmProblem& p) {
  if (logs_choices_) [[unlikely]] {
    const std::string line =
        fmt::format("{}: gemm ({}) of {} rows, weight {} x {}: {}\n", name_, name_of(p.end), p.rows,
                    p.n, p.k, explain_gemm(p, gemm_gpu()));
    if (logged_choices_.insert(line).second) std::fputs(line.c_str(), stderr);
  }
  return choose_gemm(p, gemm_gpu());
}

bool CudaBackend::run_gemm(Tensor y, Tensor x, const Weight& weight, GemmEnd end,
                           const HeadsInput* heads, const SentParts* sent) {
  const Tensor& w = weight.data;
  const GemmChoice choice = choose({end, weight.format, y.dtype, x.shape[0], weight.n(), weight.k(),
                                    wide_rows({y, x, w}), !uneven_.contains(w.data)});
  use_device();
  switch (choice.kernel) {
    case GemmKernel::w8a8:
      gemm_w8a8(y, x, weight, end == GemmEnd::gate, choice.w8a8);
      return true;
#ifdef NANOVLLM_CUDA_HOPPER
    case GemmKernel::wide:
      gemm_wide(y, x, weight, choice.wide, sent);
      return true;
    case GemmKernel::mid:
      gemm_mid(y, x, weight, choice.mid, heads, sent);
      return true;
    case GemmKernel::skinny:
      gemm_skinny(y, x, weight, end == GemmEnd::gate, choice.skinny);
      return true;
    case GemmKernel::large:
      gemm_large(y, x, weight, end, choice.large, heads);
      return true;
    case GemmKernel::packed:
      gemm_packed(y, x, weight, end == GemmEnd::gate, choice.packed);
      return true;
    case GemmKernel::fp8:
      gemm_fp8(y, x, weight, end == GemmEnd::gate, choice.fp8, sent);
      return true;
    case GemmKernel::int8:
      gemm_int8(y, x, weight, end == GemmEnd::gate, choice.fp8, sent);
      return true;
#endif
    case GemmKernel::mma:
      gemm_mma(y, x, weight, end == GemmEnd::gate, choice.mma);
      return true;
    case GemmKernel::blas:
      if (weight.format.in_halves ? gemm_blas_in_halves(y, x, w) : gemm_blas(y, x, w)) return true;
      [[fallthrough]];
    case GemmKernel::in_order:
      if (weight.format.in_halves) {
        const int64_t k = weight.k() / 2;
        gemm_in_order(y, x.cols(0, k), w.cols(0, k), stream());
        gemm_in_order(y, x.cols(k, 2 * k), w.cols(k, 2 * k), stream(), true);
      } else {
        gemm_in_order(y, x, w, stream());
      }
      return true;
    case GemmKernel::unpacked:
      return with_unpacked(weight, [&](const Weight& plain) { return run_gemm(y, x, plain, end); });
    default:
      return (void)heads, (void)sent, false;
  }
}

bool CudaBackend::gemm_blas(Tensor y, Tensor x, Tensor w) {
  await_gemm_families();
  const bool twice = y.rank == 3;
  const cublasLtMatmulAlgo_t* algorithm =
      gemm_algorithms_->choose({row_bucket(x.shape[0]), w.shape[0], x.shape[1] / (twice ? 2 : 1),
                                y.dtype == DType::f32, twice});
  return algorithm &&
         gemm_algorithms_->run(y, x, w, *algorithm, micro_batch_->blas_workspace.get(), stream());
}

// They lie where attention, which is done by then, leaves partial results.
template <class F>
void CudaBackend::with_halves(const Tensor& y, F&& f) {
  const int64_t m = y.shape[0], n = y.shape[1],
                most = static_cast<int64_t>(kPartialBytes / size_of(y.dtype)) / (2 * n);
  for (int64_t from = 0; from < m; from += most) {
    const int64_t to = std::min(m, from + most);
    f(Tensor(partial_results(), y.dtype, {2, to - from, n}, device()), from, to);
  }
}

bool CudaBackend::gemm_blas_in_halves(Tensor y, Tensor x, Tensor w) {
  bool done = true;
  with_halves(y, [&](Tensor both, int64_t from, int64_t to) {
    done = done && gemm_blas(both, x.rows(from, to), w);
    if (done) add(y.rows(from, to), both[0], both[1]);
  });
  return done;
}

Weight CudaBackend::unpack(const Weight& w) {
  use_device();
  WeightFormat format = WeightFormat::bf16;
  format.in_halves = w.format.in_halves;
  const Weight plain = weight_view(micro_batch_->unpacked.get(), format, w.n(), w.k());
  unpack_weight(plain.data, w, !uneven_.contains(w.data.data), stream());
  return plain;
}

void CudaBackend::gemm(Tensor y, Tensor x, Weight weight) {
  const Tensor& w = weight.data;
  check(x.rank == 2 && w.rank == 2 && y.rank == 2 && x.shape[1] == w.shape[1] &&
            y.shape[0] == x.shape[0] && y.shape[1] == w.shape[0] && x.dtype == w.dtype &&
            (y.dtype == x.dtype || y.dtype == DType::f32),
        "gemm: {} = {} times {} transposed", y.describe(), x.describe(), w.describe());
  if (y.numel() > 0)
    check(run_gemm(y, x, weight, GemmEnd::store), "gemm: no kernel for {} times such a weight, {}",
          x.describe(), w.describe());
}

// The norm adds up the halves of k that cuBLASLt makes: a kernel, a write and a read less.
void CudaBackend::gemm_add_rms_norm(Tensor y, Tensor residual, Tensor x, Weight weight, Tensor norm,
                                    float eps, Weight reader) {
  const bool by_parts = weight.format.in_halves && !reader.format.quantises_rows() &&
                        y.dtype == x.dtype &&
                        choose({GemmEnd::store, weight.format, y.dtype, x.shape[0], weight.n(),
                                weight.k(), wide_rows({y, x, weight.data})})
                                .kernel == GemmKernel::blas;
  if (!by_parts) return Backend::gemm_add_rms_norm(y, residual, x, weight, norm, eps, reader);
  use_device();
  with_halves(y, [&](Tensor both, int64_t from, int64_t to) {
    const Tensor rows = y.rows(from, to), stream = residual.rows(from, to), of_x = x.rows(from, to);
    if (!gemm_blas(both, of_x, weight.data))
      return Backend::gemm_add_rms_norm(rows, stream, of_x, weight, norm, eps);
    if (add_norm_of_parts(rows, stream, both, norm, eps)) return;
    add(rows, both[0], both[1]);
    add_rms_norm(rows, stream, rows, norm, eps);
  });
}

void CudaBackend::gemm_silu_and_mul(Tensor y, Tensor gate_up, Tensor x, Weight weight) {
  const Tensor& w = weight.data;
  check(x.rank == 2 && w.rank == 2 && y.rank == 2 && x.shape[1] == w.shape[1] &&
            y.shape[0] == x.shape[0] && 2 * y.shape[1] == w.shape[0] && x.dtype == w.dtype &&
            y.dtype == x.dtype,
        "gemm_silu_and_mul: {} = {} times {} transposed", y.describe(), x.describe(), w.describe());
  if (y.numel() > 0 && !run_gemm(y, x, weight, GemmEnd::gate))
    Backend::gemm_silu_and_mul(y, gate_up, x, weight);
}

}  // namespace nanovllm
