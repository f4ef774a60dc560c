// Row by row: feed_tokens, gather_rows, add, add_bias, silu_and_mul.
#include <cstring>

#include "ops/cpu/cpu_backend.h"
#include "ops/cpu/shapes.h"
#include "ops/cpu/threads.h"

namespace nanovllm::cpu {

void CpuBackend::feed_tokens(Tensor tokens, Tensor source, Tensor sampled, Tensor slots,
                             Tensor slot_tokens) {
  const int64_t count = tokens.numel();
  expect_vector("feed_tokens tokens", tokens, DType::i32, count);
  expect_vector("feed_tokens source", source, DType::i32, count);
  expect_vector("feed_tokens slots", slots, DType::i32, count);
  int32_t* token = tokens.ptr<int32_t>();
  const int32_t *from = source.ptr<int32_t>(), *slot = slots.ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (from[i] >= 0) token[i] = sampled.ptr<int32_t>()[from[i]];
    if (slot[i] >= 0) slot_tokens.ptr<int32_t>()[slot[i]] = token[i];
  }
}

void CpuBackend::gather_rows(Tensor y, Tensor x, Tensor rows) {
  const int64_t count = rows.shape[0], n = x.shape[1];
  expect_matrix("gather_rows x", x, x.shape[0], n);
  expect_matrix("gather_rows y", y, count, n);
  expect_vector("gather_rows rows", rows, DType::i32, count);
  check(x.dtype == y.dtype, "gather_rows {} from {}", y, x);
  const int32_t* index = rows.ptr<int32_t>();
  const size_t element = size_of(x.dtype);
  parallel_for(threads_, count, count * n, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(y.data + static_cast<size_t>(i * y.stride[0]) * element,
                  x.data + static_cast<size_t>(index[i] * x.stride[0]) * element,
                  static_cast<size_t>(n) * element);
  });
}

void CpuBackend::add(Tensor x, Tensor y) {
  const int64_t rows = x.shape[0], n = x.shape[1];
  expect_matrix("add x", x, rows, n);
  expect_matrix("add y", y, rows, n);
  dispatch_float(x.dtype, [&]<class T>() {
    T* to = x.ptr<T>();
    const T* from = y.ptr<T>();
    parallel_for(threads_, rows, rows * n, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        kernels_.of<T>().add(to + i * x.stride[0], from + i * y.stride[0], n);
    });
  });
}

void CpuBackend::add_bias(Tensor x, Tensor bias) {
  const int64_t rows = x.shape[0], n = x.shape[1];
  expect_matrix("add_bias x", x, rows, n);
  expect_vector("add_bias bias", bias, x.dtype, n);
  dispatch_float(x.dtype, [&]<class T>() {
    T* to = x.ptr<T>();
    const T* from = bias.ptr<T>();
    parallel_for(threads_, rows, rows * n, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) kernels_.of<T>().add(to + i * x.stride[0], from, n);
    });
  });
}

void CpuBackend::silu_and_mul(Tensor y, Tensor gate_up) {
  const int64_t rows = y.shape[0], n = y.shape[1];
  expect_matrix("silu_and_mul y", y, rows, n);
  expect_matrix("silu_and_mul gate_up", gate_up, rows, 2 * n);
  dispatch_float(y.dtype, [&]<class T>() {
    T* out = y.ptr<T>();
    const T* gate = gate_up.ptr<T>();
    parallel_for(threads_, rows, rows * n * 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const T* row = gate + i * gate_up.stride[0];
        kernels_.of<T>().silu_and_mul(out + i * y.stride[0], row, row + n, n);
      }
    });
  });
}

}  // namespace nanovllm::cpu
