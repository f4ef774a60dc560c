// Embedding, row gathering, additions and the gated activation: each reads its inputs once and
// writes its output once, 16 bytes a thread. One block is one row (blockIdx.x) by 256 vectors
// (blockIdx.y).
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/ptx/device.cuh"

namespace nanovllm {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ int64_t column() {
  return (int64_t{blockIdx.y} * kThreads + threadIdx.x) * Vec<T>::size;
}

template <class T>
dim3 grid_for(int64_t rows, int64_t columns) {
  return {grid_size(rows), grid_size(ceil_div(columns, int64_t{kThreads} * Vec<T>::size))};
}

/// y[i, :] = x[rows[i] - first, :], zeros where that is no row of x.
template <class T>
__global__ void take_rows_kernel(T* y, int64_t y_stride, const T* x, int64_t x_stride,
                                 int64_t x_rows, const int* rows, int64_t first, int64_t n,
                                 bool wide) {
  let_next_start();
  wait_for_previous();
  const int64_t c = column<T>(), row = rows[blockIdx.x] - first;
  if (c >= n) return;
  const bool exists = 0 <= row && row < x_rows;
  const Vec<T> values = load_vec(x + (exists ? row * x_stride + c : 0), exists ? n - c : 0, wide);
  store_vec(y + blockIdx.x * y_stride + c, values, n - c, wide);
}

/// y[i, :] = a[i, :] + b[i, :]; a bias is a b whose rows are all the same (b_stride 0). y may be a.
template <class T>
__global__ void add_kernel(T* y, int64_t y_stride, const T* a, int64_t a_stride, const T* b,
                           int64_t b_stride, int64_t n, bool wide) {
  let_next_start();
  wait_for_previous();
  const int64_t c = column<T>();
  if (c >= n) return;
  Vec<T> values = load_vec(a + blockIdx.x * a_stride + c, n - c, wide);
  const Vec<T> more = load_vec(b + blockIdx.x * b_stride + c, n - c, wide);
#pragma unroll
  for (int i = 0; i < Vec<T>::size; ++i)
    values.v[i] = round_to<T>(to_float(values.v[i]) + to_float(more.v[i]));
  store_vec(y + blockIdx.x * y_stride + c, values, n - c, wide);
}

template <class T>
__global__ void silu_and_mul_kernel(T* y, int64_t y_stride, const T* gate_up, int64_t stride,
                                    int64_t n, bool wide) {
  let_next_start();
  wait_for_previous();
  const int64_t c = column<T>();
  if (c >= n) return;
  const T* source = gate_up + blockIdx.x * stride + c;
  Vec<T> gate = load_vec(source, n - c, wide);
  const Vec<T> up = load_vec(source + n, n - c, wide);
#pragma unroll
  for (int i = 0; i < Vec<T>::size; ++i)
    gate.v[i] = round_to<T>(silu_times(to_float(gate.v[i]), to_float(up.v[i])));
  store_vec(y + blockIdx.x * y_stride + c, gate, n - c, wide);
}

__global__ void feed_tokens_kernel(int* tokens, const int* source, const int* sampled,
                                   const int* slots, int* slot_tokens, int count) {
  let_next_start();
  wait_for_previous();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  int token = tokens[i];
  if (source[i] >= 0) tokens[i] = token = sampled[source[i]];
  if (slots[i] >= 0) slot_tokens[slots[i]] = token;
}

}  // namespace

void CudaBackend::feed_tokens(Tensor tokens, Tensor source, Tensor sampled, Tensor slots,
                              Tensor slot_tokens) {
  check(tokens.numel() == source.numel() && tokens.numel() == slots.numel(),
        "feed_tokens: {} from {} for {}", tokens.describe(), source.describe(), slots.describe());
  const int64_t count = tokens.numel();
  launch_early(feed_tokens_kernel, {grid_size(ceil_div(count, int64_t{kThreads}))}, kThreads, 0,
               tokens.ptr<int32_t>(), source.ptr<int32_t>(), sampled.ptr<int32_t>(),
               slots.ptr<int32_t>(), slot_tokens.ptr<int32_t>(), static_cast<int>(count));
}

void CudaBackend::embedding(Tensor y, Tensor tokens, Weight weight, int64_t first_row) {
  const Tensor& table = weight.data;
  check(y.rank == 2 && table.rank == 2 && y.shape[0] == tokens.numel() &&
            y.shape[1] == table.shape[1] && y.dtype == table.dtype,
        "embedding: {} tokens of {} into {}", tokens.describe(), table.describe(), y.describe());
  dispatch_float(y.dtype, [&]<class T>() {
    using D = DeviceType<T>;
    launch_early(take_rows_kernel<D>, grid_for<D>(y.shape[0], y.shape[1]), kThreads, 0,
                 device_ptr<T>(y), y.stride[0], device_ptr<T>(table), table.stride[0],
                 table.shape[0], tokens.ptr<int32_t>(), first_row, y.shape[1],
                 wide_rows({y, table}));
  });
}

void CudaBackend::gather_rows(Tensor y, Tensor x, Tensor rows) {
  check(y.rank == 2 && x.rank == 2 && y.shape[0] == rows.numel() && y.shape[1] == x.shape[1] &&
            y.dtype == x.dtype,
        "gather_rows: rows {} of {} into {}", rows.describe(), x.describe(), y.describe());
  dispatch_float(y.dtype, [&]<class T>() {
    using D = DeviceType<T>;
    launch_early(take_rows_kernel<D>, grid_for<D>(y.shape[0], y.shape[1]), kThreads, 0,
                 device_ptr<T>(y), y.stride[0], device_ptr<T>(x), x.stride[0], x.shape[0],
                 rows.ptr<int32_t>(), int64_t{0}, y.shape[1], wide_rows({y, x}));
  });
}

void CudaBackend::add(Tensor x, Tensor y) {
  check(x.rank == 2 && y.rank == 2 && x.shape == y.shape && x.dtype == y.dtype, "add {} to {}",
        y.describe(), x.describe());
  add(x, x, y);
}

void CudaBackend::add(Tensor y, Tensor a, Tensor b) {
  dispatch_float(y.dtype, [&]<class T>() {
    using D = DeviceType<T>;
    launch_early(add_kernel<D>, grid_for<D>(y.shape[0], y.shape[1]), kThreads, 0, device_ptr<T>(y),
                 y.stride[0], device_ptr<T>(a), a.stride[0], device_ptr<T>(b), b.stride[0],
                 y.shape[1], wide_rows({y, a, b}));
  });
}

void CudaBackend::add_bias(Tensor x, Tensor bias) {
  check(x.rank == 2 && bias.rank == 1 && x.shape[1] == bias.shape[0] && x.dtype == bias.dtype,
        "add bias {} to {}", bias.describe(), x.describe());
  dispatch_float(x.dtype, [&]<class T>() {
    using D = DeviceType<T>;
    launch_early(add_kernel<D>, grid_for<D>(x.shape[0], x.shape[1]), kThreads, 0, device_ptr<T>(x),
                 x.stride[0], device_ptr<T>(x), x.stride[0], device_ptr<T>(bias), int64_t{0},
                 x.shape[1], wide_rows({x, bias}));
  });
}

void CudaBackend::silu_and_mul(Tensor y, Tensor gate_up) {
  check(y.rank == 2 && gate_up.rank == 2 && y.shape[0] == gate_up.shape[0] &&
            2 * y.shape[1] == gate_up.shape[1] && y.dtype == gate_up.dtype,
        "silu_and_mul: {} from {}", y.describe(), gate_up.describe());
  const int64_t n = y.shape[1];
  dispatch_float(y.dtype, [&]<class T>() {
    using D = DeviceType<T>;
    launch_early(silu_and_mul_kernel<D>, grid_for<D>(y.shape[0], n), kThreads, 0, device_ptr<T>(y),
                 y.stride[0], device_ptr<T>(gate_up), gate_up.stride[0], n,
                 wide_rows({y, gate_up, gate_up.cols(n, 2 * n)}));
  });
}

}  // namespace nanovllm
