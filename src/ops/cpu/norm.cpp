// rms_norm and its fusion with the residual add.
#include "ops/cpu/cpu_backend.h"
#include "ops/cpu/shapes.h"
#include "ops/cpu/threads.h"

namespace nanovllm::cpu {

void CpuBackend::rms_norm(Tensor y, Tensor x, Tensor w, float eps) {
  check((x.rank == 2 || x.rank == 3) && y.rank == x.rank && y.dtype == x.dtype &&
            has_dense_rows(x) && has_dense_rows(y) && x.shape == y.shape,
        "rms_norm {} = {}", y, x);
  const int64_t rows = x.shape[0], heads = x.rank == 3 ? x.shape[1] : 1,
                n = x.rank == 3 ? x.shape[2] : x.shape[1];
  const int64_t x_head = x.rank == 3 ? x.stride[1] : 0, y_head = y.rank == 3 ? y.stride[1] : 0;
  expect_vector("rms_norm w", w, x.dtype, n);
  dispatch_float(x.dtype, [&]<class T>() {
    const T *from = x.ptr<T>(), *weight = w.ptr<T>();
    T* to = y.ptr<T>();
    parallel_for(threads_, rows, rows * heads * n * 2, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        for (int64_t h = 0; h < heads; ++h)
          kernels_.of<T>().rms_norm(to + i * y.stride[0] + h * y_head,
                                    from + i * x.stride[0] + h * x_head, weight, n, eps);
    });
  });
}

void CpuBackend::add_rms_norm(Tensor y, Tensor residual, Tensor x, Tensor w, float eps,
                              Weight /*reader*/) {
  const int64_t rows = residual.shape[0], n = residual.shape[1];
  expect_matrix("add_rms_norm residual", residual, rows, n);
  expect_matrix("add_rms_norm x", x, rows, n);
  expect_matrix("add_rms_norm y", y, rows, n);
  expect_vector("add_rms_norm w", w, residual.dtype, n);
  dispatch_float(residual.dtype, [&]<class T>() {
    T *sum = residual.ptr<T>(), *to = y.ptr<T>();
    const T *from = x.ptr<T>(), *weight = w.ptr<T>();
    parallel_for(threads_, rows, rows * n * 3, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {  // a row stays in cache from one step to the next
        T* row = sum + i * residual.stride[0];
        kernels_.of<T>().add(row, from + i * x.stride[0], n);
        kernels_.of<T>().rms_norm(to + i * y.stride[0], row, weight, n, eps);
      }
    });
  });
}

}  // namespace nanovllm::cpu
