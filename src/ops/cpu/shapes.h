// Checks of the operations' operands; a violation names the operand.
#pragma once

#include "core/tensor.h"

namespace nanovllm::cpu {

inline bool has_dense_rows(const Tensor& t) {
  const size_t last = static_cast<size_t>(t.rank) - 1;
  return t.rank >= 1 && (t.stride[last] == 1 || t.shape[last] <= 1);
}

/// [rows, columns], rows possibly strided.
inline void expect_matrix(const char* name, const Tensor& t, int64_t rows, int64_t columns) {
  check(
      t.rank == 2 && t.shape[0] == rows && t.shape[1] == columns && has_dense_rows(t) && !t.packed,
      "{}: {}, expected [{}, {}]", name, t, rows, columns);
}

/// [tokens, heads, dim], tokens and heads possibly strided.
inline void expect_heads(const char* name, const Tensor& t, DType dtype, int64_t tokens,
                         int64_t heads, int64_t dim) {
  check(t.rank == 3 && t.dtype == dtype && t.shape[0] == tokens && t.shape[1] == heads &&
            t.shape[2] == dim && has_dense_rows(t),
        "{}: {}, expected {}[{}, {}, {}]", name, t, name_of(dtype), tokens, heads, dim);
}

/// [n], contiguous.
inline void expect_vector(const char* name, const Tensor& t, DType dtype, int64_t n) {
  check(t.rank == 1 && t.dtype == dtype && t.shape[0] == n && t.contiguous(),
        "{}: {}, expected {}[{}]", name, t, name_of(dtype), n);
}

}  // namespace nanovllm::cpu
