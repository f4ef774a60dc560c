// FP8 E4M3 by its definition, beside the program's own.
#pragma once

#include <cmath>
#include <cstdint>

namespace nanovllm {

/// A sign, four bits of exponent with a bias of 7, three of mantissa.
inline float e4m3_value(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

}  // namespace nanovllm
