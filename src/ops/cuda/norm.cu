// RMSNorm, alone and with the residual addition before it. A row belongs to one block (or to one
// warp, up to 512 elements); it is read once, into registers, and written once.
#include "ops/cuda/cuda_backend.h"
#include "ops/cuda/row_math.cuh"

namespace nanovllm {
namespace {

/// Rows of a [t, n] or [t, heads, n] tensor.
template <class T>
struct RowsOf {
  T* data;
  int64_t outer_stride, inner_stride;
  __device__ T* row(int64_t outer, int64_t inner) const {
    return data + outer * outer_stride + inner * inner_stride;
  }
};

template <class T>
RowsOf<DeviceType<T>> rows_of(const Tensor& t) {
  return {device_ptr<T>(t), t.stride[0], t.rank == 3 ? t.stride[1] : 0};
}

/// Sum over the threads of one row: a warp of the block, or all of it.
__device__ float row_sum(float x, unsigned threads, float* shared) {
  return threads == kWarp ? warp_sum(x) : block_sum(x, shared);
}

/// What one thread has of a row: the vectors at first, first + step, ... The first kHeld of them
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

template <class T>
__device__ void store_normalised(T* target, Vec<T> values, const Vec<T>& weights, float reciprocal,
                                 int64_t count, bool wide) {
#pragma unroll
  for (int i = 0; i < Vec<T>::size; ++i)
    values.v[i] = normalise(values.v[i], reciprocal, weights.v[i]);
  store_vec(target, values, count, wide);
}

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
  Vec<T> values = load_vec(stream, count, wide);
  const Vec<T> more = load_vec(addend, count, wide);
#pragma unroll
  for (int i = 0; i < Vec<T>::size; ++i)
    values.v[i] = round_to<T>(to_float(values.v[i]) + to_float(more.v[i]));
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

}  // namespace

void CudaBackend::rms_norm(Tensor y, Tensor x, Tensor w, float eps) {
  const auto last = static_cast<size_t>(x.rank) - 1;
  check((x.rank == 2 || x.rank == 3) && x.rank == y.rank && x.shape == y.shape && w.rank == 1 &&
            w.shape[0] == x.shape[last] && x.dtype == y.dtype && x.dtype == w.dtype &&
            dense_last_axis(x) && dense_last_axis(y),
        "rms_norm: {} from {} with {}", y.describe(), x.describe(), w.describe());
  const int64_t n = x.shape[last], heads = x.rank == 3 ? x.shape[1] : 1, rows = x.shape[0] * heads;
  const unsigned threads = row_threads(n), rows_per_block = threads == kWarp ? 4 : 1;
  dispatch_float(x.dtype, [&]<class T>() {
    launch_early(rms_norm_kernel<DeviceType<T>>, grid_size(ceil_div(rows, rows_per_block)),
                 threads * rows_per_block, 0, rows_of<T>(y), rows_of<T>(x), device_ptr<T>(w),
                 grid_size(rows), grid_size(heads), n, eps, threads, wide_rows({y, x, w}));
  });
}

void CudaBackend::add_rms_norm(Tensor y, Tensor residual, Tensor x, Tensor w, float eps) {
  check(x.rank == 2 && x.shape == y.shape && x.shape == residual.shape && y.rank == 2 &&
            residual.rank == 2 && w.rank == 1 && w.shape[0] == x.shape[1] && x.dtype == y.dtype &&
            x.dtype == residual.dtype && x.dtype == w.dtype,
        "add_rms_norm: {} from {} + {} with {}", y.describe(), residual.describe(), x.describe(),
        w.describe());
  dispatch_float(x.dtype, [&]<class T>() {
    launch_early(add_rms_norm_kernel<DeviceType<T>>, grid_size(x.shape[0]), row_threads(x.shape[1]),
                 0, rows_of<T>(y), rows_of<T>(residual), rows_of<T>(x), device_ptr<T>(w),
                 x.shape[1], eps, wide_rows({y, residual, x, w}));
  });
}

}  // namespace nanovllm
