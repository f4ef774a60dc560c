// Weight: a matrix of a checkpoint as products read it. Not a Tensor: its bytes mean something only
// to the backend that made the view, and to the operations that take a Weight.
#pragma once

#include <vector>

#include "core/tensor.h"

namespace nanovllm {

/// How a weight's numbers are stored, and how the rows that meet them are. A quantised weight that
/// meets plain rows is a matrix of bf16 numbers as much as any other: bf16(scale * (number -
/// zero)), computed in f32 (docs/contract.md). Its products give the bits that the product with
/// those bf16 numbers gives. One that meets quantised rows has products of their own definition.
struct WeightFormat {
  enum Numbers : uint8_t { f32, bf16, int4, int8, e4m3 } numbers = bf16;
  /// How gemm() quantises the rows that meet the weight, to E4M3 beside E4M3 numbers and to int8
  /// beside integers. plain: not at all. token: a row has one scale, by its largest magnitude.
  /// group: each kRowGroup of its numbers has one (E4M3 with `group` kRowGroup). tensor: all rows
  /// have the checkpoint's input_scale (E4M3). With token, but for int4, and tensor `group` is k.
  enum class Rows : uint8_t { plain, token, group, tensor } rows = Rows::plain;
  /// Of a quantised weight: the neighbouring columns of a row that share a scale and a zero point;
  /// k, or a multiple of 32 that divides k.
  int64_t group = 0;
  /// Of a weight that meets plain rows or groups: the halves of k have a product each, rounded as y
  /// is, and y is the sum of both, made in f32: the bits of two ranks with a half each.
  bool in_halves = false;

  constexpr WeightFormat(Numbers is, int64_t group_size = 0, Rows meet = Rows::plain)
      : numbers(is), rows(meet), group(group_size) {}
  constexpr bool is_quantised() const { return numbers > bf16; }
  constexpr bool quantises_rows() const { return rows != Rows::plain; }
  constexpr bool has_zeros() const {
    return (numbers == int4 || numbers == int8) && !quantises_rows();
  }
  constexpr int bits() const {
    return numbers == f32 ? 32 : numbers == bf16 ? 16 : numbers == int4 ? 4 : 8;
  }
  /// Scales of a row of k columns.
  constexpr int64_t groups(int64_t k) const { return (k + group - 1) / group; }
  bool operator==(const WeightFormat&) const = default;
};

/// A quantised matrix [n, k] of which a backend makes its own layout, row-major.
struct QuantizedRows {
  std::vector<int8_t> numbers;  // [n, k]: int8; int4 as -8 to 7; the bits of an E4M3, none a NaN
  std::vector<float> scales;    // [n, groups], from kLeastScale to below kMostScale
  std::vector<int8_t> zeros;    // [n, groups], of the numbers' range; empty without zero points
  float input_scale = 0;        // of the rows that meet it, with WeightFormat::Rows::tensor
};
/// Of a weight's scales: between them no product with a number that is not 0 leaves f32's normal
/// numbers, nor does a scale times 2^120.
constexpr float kLeastScale = 0x1p-100f, kMostScale = 0x1p+7f;
/// Columns of a product with quantised rows that are summed before scales and f32 sums.
constexpr int64_t kRowGroup = 128;
/// The magnitude from which the scale of quantised rows is computed, at least.
constexpr float kLeastMagnitude = 0x1p-100f;

/// The format in which a checkpoint's plain numbers are kept by a model that computes in `dtype`,
/// f32 or bf16.
constexpr WeightFormat plain_format(DType dtype) {
  return dtype == DType::f32 ? WeightFormat::f32 : WeightFormat::bf16;
}
/// Whether the shape of a row-parallel weight [n, k] that one rank has whole allows halves,
/// of a model that multiplies in them (ModelConfig::is_in_halves(), docs/contract.md).
constexpr bool multiplies_in_halves(int64_t n, int64_t k) { return n >= 1024 && k % 256 == 0; }
/// The dtype of the numbers that a weight stands for.
constexpr DType dtype_of(WeightFormat format) {
  return format.numbers == WeightFormat::f32 ? DType::f32 : DType::bf16;
}

/// A view, as Tensor is: [n, k], or a stack [count, n, k] whose first axis may be strided.
struct Weight {
  Tensor data;  // Backend::load() fills it, or load_quantised(), with all that the format needs
  WeightFormat format = WeightFormat::bf16;

  bool defined() const { return data.defined(); }
  bool is_stack() const { return data.rank == 3; }
  int64_t count() const { return is_stack() ? data.shape[0] : 1; }
  int64_t n() const { return data.shape[static_cast<size_t>(data.rank - 2)]; }
  int64_t k() const { return data.shape[static_cast<size_t>(data.rank - 1)]; }
  /// Bytes that a product reads of all matrices, but for a backend's padding.
  size_t bytes() const {
    if (!format.is_quantised()) return data.bytes();
    const size_t scale = sizeof(float) + (format.has_zeros() ? 1 : 0);
    return static_cast<size_t>(count() * n()) * (static_cast<size_t>(k() * format.bits()) / 8 +
                                                 static_cast<size_t>(format.groups(k())) * scale);
  }

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
