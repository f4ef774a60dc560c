// Weight: a matrix of a checkpoint as products read it. Not a Tensor: its bytes mean something only
// to the backend that made the view, and to the operations that take a Weight.
#pragma once

#include "core/tensor.h"

namespace nanovllm {

/// How a weight's numbers are stored.
enum class WeightFormat : uint8_t { f32, bf16 };

/// The format in which a checkpoint's plain numbers are kept by a model that computes in `dtype`,
/// f32 or bf16.
constexpr WeightFormat plain_format(DType dtype) {
  return dtype == DType::f32 ? WeightFormat::f32 : WeightFormat::bf16;
}
constexpr DType dtype_of(WeightFormat format) {
  return format == WeightFormat::f32 ? DType::f32 : DType::bf16;
}

/// A view, as Tensor is: [n, k], or a stack [count, n, k] whose first axis may be strided.
struct Weight {
  Tensor data;  // Backend::load() fills it
  WeightFormat format = WeightFormat::bf16;

  bool defined() const { return data.defined(); }
  bool is_stack() const { return data.rank == 3; }
  int64_t count() const { return is_stack() ? data.shape[0] : 1; }
  int64_t n() const { return data.shape[static_cast<size_t>(data.rank - 2)]; }
  int64_t k() const { return data.shape[static_cast<size_t>(data.rank - 1)]; }
  /// Bytes that a product reads of all matrices.
  size_t bytes() const { return data.bytes(); }

  /// Matrix i of a stack.
  Weight operator[](int64_t i) const {
    Tensor t(data.data + static_cast<size_t>(i * data.stride[0]) * size_of(data.dtype), data.dtype,
             {n(), k()}, data.device);
    t.packed = data.packed;
    return {t, format};
  }
};

/// The stack whose first matrix is `first`, each `stride` bytes behind the one before.
inline Weight stack_of(const Weight& first, int64_t count, size_t stride) {
  Tensor t(first.data.data, first.data.dtype, {count, first.n(), first.k()}, first.data.device);
  t.stride[0] = static_cast<int64_t>(stride / size_of(t.dtype));
  t.packed = first.data.packed;
  return {t, first.format};
}

}  // namespace nanovllm
