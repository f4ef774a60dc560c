// Our own y = x w^T: the definition of the order in which a product is summed, and the fallback for
// shapes and alignments that cuBLASLt does not take. bf16: one chain of mma m16n8k16 steps over k,
// which is what cuBLASLt's algorithms without a split of K compute, bit for bit. f32: one chain of
// fused multiply-adds over k, for verification, not for speed.
#include "ops/cuda/core/handles.h"
#include "ops/cuda/core/layout.h"
#include "ops/cuda/gemm/cublaslt/gemm_check.h"
#include "ops/cuda/ptx/device.cuh"
#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {
namespace {

template <class T>
struct Matrix {
  T* data;
  int64_t rows, stride;
};

/// `adds`: to what is there, after it has been rounded.
template <class Y>
__device__ void store(Y* y, float sum, bool adds) {
  const Y rounded = round_to<Y>(sum);
  *y = adds ? round_to<Y>(to_float(*y) + to_float(rounded)) : rounded;
}

// -- bf16: a block makes 64 x 64 of y, each of its four warps 32 x 32 --

constexpr int kTile = 64, kDepth = 32,
              kPitch = kDepth + 8;  // the pad keeps ldmatrix free of bank conflicts
constexpr int kMmaThreads = 128;

/// Rows first .. first + 64, columns k0 .. k0 + 32 of m, zeros past its ends.
__device__ void load_tile(__nv_bfloat16 (&tile)[kTile][kPitch],
                          const Matrix<const __nv_bfloat16>& m, int64_t first, int64_t k0,
                          int64_t k, bool wide) {
  constexpr int kParts = kDepth / 8;
  for (int i = threadIdx.x; i < kTile * kParts; i += kMmaThreads) {
    const int row = i / kParts, c = i % kParts * 8;
    const int64_t left = first + row < m.rows ? k - k0 - c : 0;
    *reinterpret_cast<Vec<__nv_bfloat16>*>(&tile[row][c]) =
        load_vec(m.data + (left > 0 ? (first + row) * m.stride + k0 + c : 0), left, wide);
  }
}

template <class Y>
__global__ void __launch_bounds__(kMmaThreads)
    gemm_mma_kernel(Matrix<Y> y, Matrix<const __nv_bfloat16> x, Matrix<const __nv_bfloat16> w,
                    int64_t k, bool wide, bool adds) {
  __shared__ alignas(16) __nv_bfloat16 x_tile[kTile][kPitch], w_tile[kTile][kPitch];
  const int64_t row0 = int64_t{blockIdx.y} * kTile, column0 = int64_t{blockIdx.x} * kTile;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  float sum[2][4][4] = {};
  for (int64_t k0 = 0; k0 < k; k0 += kDepth) {
    __syncthreads();  // the previous tiles have been read
    load_tile(x_tile, x, row0, k0, k, wide);
    load_tile(w_tile, w, column0, k0, k, wide);
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < kDepth; kk += 16) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        load_matrices(a[i], &x_tile[warp_row + 16 * i + lane % 16][kk + lane / 16 * 8]);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        uint32_t b[4];
        load_matrices(
            b, &w_tile[warp_column + 8 * j + lane / 16 * 8 + lane % 8][kk + lane / 8 % 2 * 8]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_m16n8k16(sum[i][j], a[i], b[0], b[1]);
          mma_m16n8k16(sum[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t row = row0 + warp_row + 16 * i + lane / 4 + e / 2 * 8,
                      column = column0 + warp_column + 8 * j + lane % 4 * 2 + e % 2;
        if (row < y.rows && column < w.rows)
          store(y.data + row * y.stride + column, sum[i][j][e], adds);
      }
}

// -- f32: 16 x 16 threads make 16 kRows x 64 of y --

constexpr int kFmaDepth = 16, kFmaColumns = 64;

template <int kRows>
__global__ void __launch_bounds__(256)
    gemm_fma_kernel(Matrix<float> y, Matrix<const float> x, Matrix<const float> w, int64_t k,
                    bool adds) {
  __shared__ float x_tile[kFmaDepth][16 * kRows + 1], w_tile[kFmaDepth][kFmaColumns + 1];
  const int64_t row0 = int64_t{blockIdx.y} * 16 * kRows,
                column0 = int64_t{blockIdx.x} * kFmaColumns;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const auto fill = [&](auto& tile, const Matrix<const float>& m, int64_t first, int rows,
                        int64_t k0) {
    for (int i = threadIdx.x; i < rows * kFmaDepth; i += 256) {
      const int row = i / kFmaDepth, c = i % kFmaDepth;
      tile[c][row] =
          first + row < m.rows && k0 + c < k ? m.data[(first + row) * m.stride + k0 + c] : 0.0f;
    }
  };
  float sum[kRows][4] = {};
  for (int64_t k0 = 0; k0 < k; k0 += kFmaDepth) {
    __syncthreads();
    fill(x_tile, x, row0, 16 * kRows, k0);
    fill(w_tile, w, column0, kFmaColumns, k0);
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < kFmaDepth; ++kk)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          sum[i][j] = __fmaf_rn(x_tile[kk][ty + 16 * i], w_tile[kk][tx + 16 * j], sum[i][j]);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t row = row0 + ty + 16 * i, column = column0 + tx + 16 * j;
      if (row < y.rows && column < w.rows) store(y.data + row * y.stride + column, sum[i][j], adds);
    }
}

template <class T>
Matrix<DeviceType<T>> matrix(const Tensor& t) {
  return {device_ptr<T>(t), t.shape[0], t.stride[0]};
}
template <class T>
Matrix<const DeviceType<T>> const_matrix(const Tensor& t) {
  return {device_ptr<T>(t), t.shape[0], t.stride[0]};
}

}  // namespace

void gemm_in_order(Tensor y, Tensor x, Tensor w, cudaStream_t stream, bool adds) {
  const int64_t m = x.shape[0], n = w.shape[0], k = x.shape[1];
  if (x.dtype == DType::f32) {
    const bool few = m <= 16;
    const dim3 grid{grid_size(ceil_div(n, kFmaColumns)), grid_size(ceil_div(m, few ? 16 : 64))};
    (few ? gemm_fma_kernel<1> : gemm_fma_kernel<4>)<<<grid, 256, 0, stream>>>(
        matrix<float>(y), const_matrix<float>(x), const_matrix<float>(w), k, adds);
    cuda_check(cudaGetLastError());
    return;
  }
  const dim3 grid{grid_size(ceil_div(n, kTile)), grid_size(ceil_div(m, kTile))};
  dispatch_float(y.dtype, [&]<class Y>() {
    gemm_mma_kernel<DeviceType<Y>><<<grid, kMmaThreads, 0, stream>>>(
        matrix<Y>(y), const_matrix<bf16>(x), const_matrix<bf16>(w), k, wide_rows({x, w}), adds);
  });
  cuda_check(cudaGetLastError());
}

}  // namespace nanovllm
