// RMSNorm, alone and with the residual addition before it. A row belongs to one block (or to one
// warp, up to 512 elements); it is read twice, the second time from the cache, and written once.
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

template <class T>
__global__ void rms_norm_kernel(RowsOf<T> y, RowsOf<T> x, const T* w, int64_t rows, int64_t heads,
                                int64_t n, float eps, unsigned threads, bool wide) {
  __shared__ float shared[kWarp];
  const int64_t index = int64_t{blockIdx.x} * (blockDim.x / threads) + threadIdx.x / threads;
  if (index >= rows) return;  // whole warps: a block of several rows has no barrier
  const unsigned thread = threadIdx.x % threads;
  const T* source = x.row(index / heads, index % heads);
  T* target = y.row(index / heads, index % heads);
  const int64_t step = int64_t{threads} * Vec<T>::size, first = int64_t{thread} * Vec<T>::size;
  float sum = 0.0f;
  for (int64_t c = first; c < n; c += step)
    sum = add_squares(sum, load_vec(source + c, n - c, wide));
  const float reciprocal = reciprocal_rms(row_sum(sum, threads, shared), n, eps);
  for (int64_t c = first; c < n; c += step) {
    Vec<T> values = load_vec(source + c, n - c, wide);
    const Vec<T> weights = load_vec(w + c, n - c, wide);
#pragma unroll
    for (int i = 0; i < Vec<T>::size; ++i)
      values.v[i] = normalise(values.v[i], reciprocal, weights.v[i]);
    store_vec(target + c, values, n - c, wide);
  }
}

template <class T>
__global__ void add_rms_norm_kernel(RowsOf<T> y, RowsOf<T> residual, RowsOf<T> x, const T* w,
                                    int64_t n, float eps, bool wide) {
  __shared__ float shared[kWarp];
  const T* addend = x.row(blockIdx.x, 0);
  T* stream = residual.row(blockIdx.x, 0);
  T* target = y.row(blockIdx.x, 0);
  const int64_t step = int64_t{blockDim.x} * Vec<T>::size,
                first = int64_t{threadIdx.x} * Vec<T>::size;
  float sum = 0.0f;
  for (int64_t c = first; c < n; c += step) {
    Vec<T> values = load_vec(stream + c, n - c, wide);
    const Vec<T> more = load_vec(addend + c, n - c, wide);
#pragma unroll
    for (int i = 0; i < Vec<T>::size; ++i)
      values.v[i] = round_to<T>(to_float(values.v[i]) + to_float(more.v[i]));
    store_vec(stream + c, values, n - c, wide);
    sum = add_squares(sum, values);
  }
  const float reciprocal = reciprocal_rms(row_sum(sum, blockDim.x, shared), n, eps);
  for (int64_t c = first; c < n; c += step) {  // each thread reads back what it wrote itself
    Vec<T> values = load_vec(stream + c, n - c, wide);
    const Vec<T> weights = load_vec(w + c, n - c, wide);
#pragma unroll
    for (int i = 0; i < Vec<T>::size; ++i)
      values.v[i] = normalise(values.v[i], reciprocal, weights.v[i]);
    store_vec(target + c, values, n - c, wide);
  }
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
    launch(rms_norm_kernel<DeviceType<T>>, grid_size(ceil_div(rows, rows_per_block)),
           threads * rows_per_block, 0, rows_of<T>(y), rows_of<T>(x), device_ptr<T>(w), rows, heads,
           n, eps, threads, wide_rows({y, x, w}));
  });
}

void CudaBackend::add_rms_norm(Tensor y, Tensor residual, Tensor x, Tensor w, float eps) {
  check(x.rank == 2 && x.shape == y.shape && x.shape == residual.shape && y.rank == 2 &&
            residual.rank == 2 && w.rank == 1 && w.shape[0] == x.shape[1] && x.dtype == y.dtype &&
            x.dtype == residual.dtype && x.dtype == w.dtype,
        "add_rms_norm: {} from {} + {} with {}", y.describe(), residual.describe(), x.describe(),
        w.describe());
  dispatch_float(x.dtype, [&]<class T>() {
    launch(add_rms_norm_kernel<DeviceType<T>>, grid_size(x.shape[0]), row_threads(x.shape[1]), 0,
           rows_of<T>(y), rows_of<T>(residual), rows_of<T>(x), device_ptr<T>(w), x.shape[1], eps,
           wide_rows({y, residual, x, w}));
  });
}

}  // namespace nanovllm
