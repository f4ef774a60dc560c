// How operands lie in memory, and how many blocks cover them.
#pragma once

#include <initializer_list>

#include "core/tensor.h"

namespace nanovllm {

/// Whether every row of every tensor begins on a 16-byte boundary.
inline bool wide_rows(std::initializer_list<Tensor> tensors) {
  for (const Tensor& t : tensors) {
    if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
    for (int axis = 0; axis + 1 < t.rank; ++axis)
      if (t.stride[static_cast<size_t>(axis)] * static_cast<int64_t>(size_of(t.dtype)) % 16 != 0)
        return false;
  }
  return true;
}

inline bool dense_last_axis(const Tensor& t) {
  const auto last = static_cast<size_t>(t.rank) - 1;
  return t.rank > 0 && (t.stride[last] == 1 || t.shape[last] <= 1);
}

constexpr int kWarp = 32;  // threads in step

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr unsigned grid_size(int64_t n) { return static_cast<unsigned>(n); }

}  // namespace nanovllm
