#include "core/tensor.h"

namespace nanovllm {
namespace {

/// The places begin .. end of an axis, which `name` stands for in messages.
Tensor part_of(Tensor t, int axis, const char* name, int64_t begin, int64_t end) {
  const auto at = static_cast<size_t>(axis);
  check(0 <= axis && axis < t.rank && 0 <= begin && begin <= end && end <= t.shape[at],
        "{} {}..{} of {}", name, begin, end, t);
  check(!t.packed, "a packed tensor cannot be sliced");
  // Views of a measuring arena have no bytes.
  if (t.data) t.data += static_cast<size_t>(begin * t.stride[at]) * size_of(t.dtype);
  t.shape[at] = end - begin;
  return t;
}

}  // namespace

Tensor::Tensor(void* bytes, DType type, std::initializer_list<int64_t> dims, Device where)
    : data(static_cast<std::byte*>(bytes)),
      rank(static_cast<int8_t>(dims.size())),
      dtype(type),
      device(where) {
  check(dims.size() <= shape.size(), "a tensor has at most 4 dimensions, got {}", dims.size());
  size_t axis = 0;
  for (const int64_t size : dims) shape[axis++] = size;
  int64_t step = 1;
  for (size_t i = dims.size(); i-- > 0; step *= shape[i]) stride[i] = step;
}

int64_t Tensor::numel() const {
  int64_t n = 1;
  for (int i = 0; i < rank; ++i) n *= shape[static_cast<size_t>(i)];
  return n;
}

bool Tensor::contiguous() const {
  int64_t step = 1;
  for (size_t i = static_cast<size_t>(rank); i-- > 0; step *= shape[i])
    if (shape[i] != 1 && stride[i] != step) return false;
  return true;
}

Tensor Tensor::rows(int64_t begin, int64_t end) const {
  return part_of(*this, 0, "rows", begin, end);
}
Tensor Tensor::cols(int64_t begin, int64_t end) const {
  return part_of(*this, rank - 1, "columns", begin, end);
}

Tensor Tensor::split(int64_t inner) const {
  const size_t last = static_cast<size_t>(rank) - 1;
  check(rank >= 1 && rank < 4 && inner > 0 && shape[last] % inner == 0, "split {} by {}",
        describe(), inner);
  Tensor t = *this;
  t.shape[last] = shape[last] / inner;
  t.stride[last] = stride[last] * inner;
  t.shape[last + 1] = inner;
  t.stride[last + 1] = stride[last];
  ++t.rank;
  return t;
}

Tensor Tensor::reshape(std::initializer_list<int64_t> new_shape) const {
  Tensor t(data, dtype, new_shape, device);
  check(contiguous() && !packed && t.numel() == numel(), "reshape {} to {}", describe(),
        t.describe());
  return t;
}

Tensor Tensor::operator[](int64_t i) const {
  Tensor t = rows(i, i + 1);
  for (size_t axis = 1; axis < static_cast<size_t>(rank); ++axis) {
    t.shape[axis - 1] = shape[axis];
    t.stride[axis - 1] = stride[axis];
  }
  --t.rank;
  return t;
}

std::string Tensor::describe() const {
  std::string text = fmt::format("{}[", name_of(dtype));
  for (int i = 0; i < rank; ++i)
    text += fmt::format("{}{}", i ? ", " : "", shape[static_cast<size_t>(i)]);
  return text + "]";
}

}  // namespace nanovllm
