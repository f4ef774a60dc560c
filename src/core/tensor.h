// Tensor: a view of memory that somebody else owns. Trivially copyable, passed by value, never
// frees.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>

#include "core/dtype.h"

namespace nanovllm {

struct Device {
  enum Kind : uint8_t { cpu, cuda } kind = cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// Owns bytes; the deleter knows where they came from.
using Buffer = std::unique_ptr<std::byte[], std::function<void(std::byte*)>>;

struct Tensor {
  std::byte* data = nullptr;
  std::array<int64_t, 4> shape{}, stride{};  // in elements; row-major unless sliced
  int8_t rank = 0;
  DType dtype = DType::f32;
  /// Not 0: the bytes are a [n, k] matrix in its backend's private layout, or 2: its halves of k
  /// are, one behind the other. Fit for gemm() and embedding() only.
  uint8_t packed = 0;
  Device device{};

  Tensor() = default;
  /// A contiguous view of `data`.
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {});

  int64_t numel() const;
  size_t bytes() const { return static_cast<size_t>(numel()) * size_of(dtype); }
  bool contiguous() const;
  bool defined() const { return data != nullptr; }

  /// Typed pointer to the first element; throws unless T matches dtype, or if the tensor is packed.
  template <class T>
  T* ptr() const {
    check(dtype == dtype_of<T>() && !packed, "tensor is {}{}, expected {}", packed ? "packed " : "",
          name_of(dtype), name_of(dtype_of<T>()));
    return reinterpret_cast<T*>(data);
  }

  Tensor rows(int64_t begin, int64_t end) const;  // first axis
  Tensor cols(int64_t begin, int64_t end) const;  // last axis: q, k, v out of one qkv
  Tensor split(int64_t inner) const;              // last axis [n * inner] -> [n, inner]: heads
  Tensor reshape(std::initializer_list<int64_t> new_shape) const;  // contiguous only
  Tensor operator[](int64_t i) const;                              // drops the first axis

  std::string describe() const;  // "bf16[12, 1024]"
};

}  // namespace nanovllm

/// Formats as describe() does, and only when a message is made: the arguments of a check() that
/// holds cost nothing.
template <>
struct fmt::formatter<nanovllm::Tensor> {
  constexpr auto parse(format_parse_context& context) { return context.begin(); }
  template <class Context>
  auto format(const nanovllm::Tensor& tensor, Context& context) const {
    return fmt::format_to(context.out(), "{}", tensor.describe());
  }
};
