// Element types and the bf16/f16 conversions; `dispatch_float` turns a run-time DType into a
// compile-time type.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/check.h"

namespace nanovllm {

enum class DType : uint8_t { f32, f16, bf16, i32, i64, e4m3 };

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i64:
      return 8;
    case DType::e4m3:
      return 1;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::e4m3:
      return "fp8_e4m3";
  }
  return "?";
}

/// bfloat16 storage: the upper half of an f32. Conversion rounds to nearest even and keeps NaN.
struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    bits = (u & 0x7fffffffu) > 0x7f800000u
               ? static_cast<uint16_t>((u >> 16) | 0x40u)
               : static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

/// IEEE half storage; read from checkpoints only, never computed in.
struct f16 {
  uint16_t bits = 0;
  explicit operator float() const {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1fu,
                   mantissa = bits & 0x3ffu;
    if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0)
      return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -subnormal : subnormal;
  }
};

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>)
    return DType::f32;
  else if constexpr (std::is_same_v<T, f16>)
    return DType::f16;
  else if constexpr (std::is_same_v<T, bf16>)
    return DType::bf16;
  else if constexpr (std::is_same_v<T, int32_t>)
    return DType::i32;
  else {
    static_assert(std::is_same_v<T, int64_t>);
    return DType::i64;
  }
}

/// Calls `body.template operator()<T>()` with T = float or bf16, the two types that kernels compute
/// in.
template <class Body>
void dispatch_float(DType dtype, Body&& body) {
  if (dtype == DType::f32)
    body.template operator()<float>();
  else if (dtype == DType::bf16)
    body.template operator()<bf16>();
  else
    fail(ErrorKind::invalid_argument, "no kernel for {}: use f32 or bf16", name_of(dtype));
}

}  // namespace nanovllm
