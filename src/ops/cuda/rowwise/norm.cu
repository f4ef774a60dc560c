// RMSNorm, alone and with the residual addition before it. A row belongs to one block (or to one
// warp, up to 512 elements); it is read once, into registers, and written once. Rows of whole
// vectors of bf16 have kernels of their own (norm_rows.cuh).
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/core/micro_batches.h"
#include "ops/cuda/rowwise/norm_rows.cuh"

namespace nanovllm {
namespace {

/// Sum over the threads of one row: a warp of the block, or all of it.
__device__ float row_sum(float x, unsigned threads, float* shared) {
  return threads == kWarp ? warp_sum(x) : block_sum(x, shared);
}

/// One thread's part of a row: the vectors at first, first + step, ... The first kHeld of them
/// stay in registers between the two passes, any others are read again.
constexpr int kHeld = 2;

/// The weights of the held vectors: loaded before wait_for_previous(), since no kernel writes them.
template <class T>
struct Weights {
  Vec<T> held[kHeld];
  __device__ Weights(const T* w, int64_t first, int64_t step, int64_t n, bool wide) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (const int64_t c = first + i * step; c < n) held[i] = load_vec(w + c, n - c, wide);
  }
};

/// The pass over a row that both kernels end with; `source` has what `held` does not.
template <class T>
__device__ void normalise_row(T* target, const T* source, const Vec<T> (&held)[kHeld], const T* w,
                              const Weights<T>& weights, float reciprocal, int64_t first,
                              int64_t step, int64_t n, bool wide) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (const int64_t c = first + i * step; c < n)
      store_normalised(target + c, held[i], weights.held[i], reciprocal, n - c, wide);
  for (int64_t c = first + kHeld * step; c < n; c += step)
    store_normalised(target + c, load_vec(source + c, n - c, wide), load_vec(w + c, n - c, wide),
                     reciprocal, n - c, wide);
}

template <class T>
__global__ void rms_norm_kernel(RowsOf<T> y, RowsOf<T> x, const T* w, unsigned rows, unsigned heads,
                                int64_t n, float eps, unsigned threads, bool wide) {
  __shared__ float shared[kWarp];
  let_next_start();
  const unsigned index = blockIdx.x * (blockDim.x / threads) + threadIdx.x / threads;
  const unsigned thread = threadIdx.x % threads;
  const int64_t step = int64_t{threads} * Vec<T>::size, first = int64_t{thread} * Vec<T>::size;
  const Weights<T> weights(w, first, step, n, wide);
  wait_for_previous();
  if (index >= rows) return;  // whole warps: a block of several rows has no barrier
  const T* source = x.row(index / heads, index % heads);
  Vec<T> held[kHeld];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (const int64_t c = first + i * step; c < n) {
      held[i] = load_vec(source + c, n - c, wide);
      sum = add_squares(sum, held[i]);
    }
  for (int64_t c = first + kHeld * step; c < n; c += step)
    sum = add_squares(sum, load_vec(source + c, n - c, wide));
  const float reciprocal = reciprocal_rms(row_sum(sum, threads, shared), n, eps);
  normalise_row(y.row(index / heads, index % heads), source, held, w, weights, reciprocal, first,
                step, n, wide);
}

/// Adds a vector of `addend` to that of `stream` and returns the sum.
template <class T>
__device__ Vec<T> add_vec(T* stream, const T* addend, int64_t count, bool wide) {
  const Vec<T> before = load_vec(stream, count, wide);
  Vec<T> values = load_vec(addend, count, wide);
  add_stream(values, before);
  store_vec(stream, values, count, wide);
  return values;
}

template <class T>
__global__ void add_rms_norm_kernel(RowsOf<T> y, RowsOf<T> residual, RowsOf<T> x, const T* w,
                                    int64_t n, float eps, bool wide) {
  __shared__ float shared[kWarp];
  let_next_start();
  const T* addend = x.row(blockIdx.x, 0);
  T* stream = residual.row(blockIdx.x, 0);
  const int64_t step = int64_t{blockDim.x} * Vec<T>::size,
                first = int64_t{threadIdx.x} * Vec<T>::size;
  const Weights<T> weights(w, first, step, n, wide);
  wait_for_previous();
  Vec<T> held[kHeld];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (const int64_t c = first + i * step; c < n) {
      held[i] = add_vec(stream + c, addend + c, n - c, wide);
      sum = add_squares(sum, held[i]);
    }
  for (int64_t c = first + kHeld * step; c < n; c += step)
    sum = add_squares(sum, add_vec(stream + c, addend + c, n - c, wide));
  const float reciprocal = reciprocal_rms(row_sum(sum, blockDim.x, shared), n, eps);
  // Each thread reads back what it wrote itself.
  normalise_row(y.row(blockIdx.x, 0), stream, held, w, weights, reciprocal, first, step, n, wide);
}

constexpr int kMostOfWarp = 20, kMostOfBlock = 32;  // vectors of each lane

/// Runs `go` with the vectors that a warp's lane has of a row of n elements, up to `most`; false
/// where there is no kernel of so many.
template <int most, class F>
bool with_vectors(int64_t n, F&& go) {
  const auto run = [&]<int kVectors>() {
    if constexpr (kVectors <= most)
      if (n == kVectors * kWarp * Vec<__nv_bfloat16>::size)
        return go.template operator()<kVectors>(), true;
    return false;
  };
  return [&]<int... kVectors>(std::integer_sequence<int, kVectors...>) {
    return (run.template operator()<kVectors>() || ...);
  }
  (std::integer_sequence<int, 4, 8, 10, 16, 20, 32>());
}

/// From so many rows on, a warp for each keeps an H200 busy.
constexpr int64_t kManyRows = 1024;

/// Null where rows need the general kernels.
template <bool kAdd, class End, class Rows = PlainRows>
auto one_row_kernel_for(const Tensor& x, bool wide) {
  decltype(&one_row_kernel<kAdd, kMostOfBlock, End, Rows>) kernel = nullptr;
  if (wide && x.dtype == DType::bf16 && x.rank == 2)
    with_vectors<kMostOfBlock>(
        x.shape[1], [&]<int kVectors>() { kernel = one_row_kernel<kAdd, kVectors, End, Rows>; });
  return kernel;
}

}  // namespace

template <bool kAdd>
bool CudaBackend::norm_many_rows(Tensor y, Tensor residual, Tensor x, Tensor w, float eps) {
  const bool wide = wide_rows({y, x, w}) && (!kAdd || wide_rows({residual}));
  const int64_t fewest = divides_sms() ? 1 : kManyRows;
  if (x.dtype != DType::bf16 || x.rank != 2 || x.shape[0] < fewest || !wide) return false;
  return with_vectors<kMostOfWarp>(x.shape[1], [&]<int kVectors>() {
    const auto kernel = divides_sms() ? many_rows_kernel<kAdd, kVectors, true, PlainRows>
                                      : many_rows_kernel<kAdd, kVectors, false, PlainRows>;
    launch_early(kernel, grid_size(ceil_div(x.shape[0], kRowsPerBlock)), kRowsPerBlock * kWarp,
                 divides_sms() ? kOverlapNormBytes : 0, rows_of<bf16>(y),
                 rows_of<bf16>(kAdd ? residual : x), PlainRows{rows_of<bf16>(x)},
                 device_ptr<bf16>(w), grid_size(x.shape[0]), eps);
  });
}

bool CudaBackend::add_norm_of_parts(Tensor y, Tensor residual, Tensor parts, Tensor w, float eps) {
  if (y.dtype != DType::bf16 || divides_sms() || !wide_rows({y, residual, parts[0], w}))
    return false;
  const SummedRows sums{{rows_of<bf16>(parts[0])}, {rows_of<bf16>(parts[1])}};
  const int64_t rows = y.shape[0];
  if (rows >= kManyRows)
    return with_vectors<kMostOfWarp>(y.shape[1], [&]<int kVectors>() {
      launch_early(many_rows_kernel<true, kVectors, false, SummedRows>,
                   grid_size(ceil_div(rows, kRowsPerBlock)), kRowsPerBlock * kWarp, 0,
                   rows_of<bf16>(y), rows_of<bf16>(residual), sums, device_ptr<bf16>(w),
                   grid_size(rows), eps);
    });
  const auto kernel = one_row_kernel_for<true, StoredRows, SummedRows>(y, true);
  if (kernel)
    launch_early(kernel, grid_size(rows), row_threads(y.shape[1]), 0, StoredRows{rows_of<bf16>(y)},
                 rows_of<bf16>(residual), sums, device_ptr<bf16>(w), eps);
  return kernel != nullptr;
}

void CudaBackend::rms_norm(Tensor y, Tensor x, Tensor w, float eps) {
  const auto last = static_cast<size_t>(x.rank) - 1;
  check((x.rank == 2 || x.rank == 3) && x.rank == y.rank && x.shape == y.shape && w.rank == 1 &&
            w.shape[0] == x.shape[last] && x.dtype == y.dtype && x.dtype == w.dtype &&
            dense_last_axis(x) && dense_last_axis(y),
        "rms_norm: {} from {} with {}", y.describe(), x.describe(), w.describe());
  if (norm_many_rows<false>(y, {}, x, w, eps)) return;
  const bool wide = wide_rows({y, x, w});
  if (const auto kernel = one_row_kernel_for<false, StoredRows>(x, wide))
    return launch_early(kernel, grid_size(x.shape[0]), row_threads(x.shape[1]), 0,
                        StoredRows{rows_of<bf16>(y)}, rows_of<bf16>(x), PlainRows{rows_of<bf16>(x)},
                        device_ptr<bf16>(w), eps);
  const int64_t n = x.shape[last], heads = x.rank == 3 ? x.shape[1] : 1, rows = x.shape[0] * heads;
  const unsigned threads = row_threads(n), rows_per_block = threads == kWarp ? 4 : 1;
  dispatch_float(x.dtype, [&]<class T>() {
    launch_early(rms_norm_kernel<DeviceType<T>>, grid_size(ceil_div(rows, rows_per_block)),
                 threads * rows_per_block, 0, rows_of<T>(y), rows_of<T>(x), device_ptr<T>(w),
                 grid_size(rows), grid_size(heads), n, eps, threads, wide);
  });
}

void CudaBackend::add_rms_norm(Tensor y, Tensor residual, Tensor x, Tensor w, float eps,
                               Weight reader) {
  check(x.rank == 2 && x.shape == y.shape && x.shape == residual.shape && y.rank == 2 &&
            residual.rank == 2 && w.rank == 1 && w.shape[0] == x.shape[1] && x.dtype == y.dtype &&
            x.dtype == residual.dtype && x.dtype == w.dtype,
        "add_rms_norm: {} from {} + {} with {}", y.describe(), residual.describe(), x.describe(),
        w.describe());
  const auto quantised = [&]<class End>(const End& end) {
    const auto kernel = one_row_kernel_for<true, End>(x, wide_rows({residual, x, w}));
    if (kernel)
      launch_early(kernel, grid_size(x.shape[0]), row_threads(x.shape[1]), 0, end,
                   rows_of<bf16>(residual), PlainRows{rows_of<bf16>(x)}, device_ptr<bf16>(w), eps);
    return kernel != nullptr;
  };
  if (with_rows_for(reader, y, quantised) || norm_many_rows<true>(y, residual, x, w, eps)) return;
  const bool wide = wide_rows({y, residual, x, w});
  if (const auto kernel = one_row_kernel_for<true, StoredRows>(x, wide))
    return launch_early(kernel, grid_size(x.shape[0]), row_threads(x.shape[1]), 0,
                        StoredRows{rows_of<bf16>(y)}, rows_of<bf16>(residual),
                        PlainRows{rows_of<bf16>(x)}, device_ptr<bf16>(w), eps);
  dispatch_float(x.dtype, [&]<class T>() {
    launch_early(add_rms_norm_kernel<DeviceType<T>>, grid_size(x.shape[0]), row_threads(x.shape[1]),
                 0, rows_of<T>(y), rows_of<T>(residual), rows_of<T>(x), device_ptr<T>(w),
                 x.shape[1], eps, wide);
  });
}

}  // namespace nanovllm
