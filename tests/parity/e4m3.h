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

/// The bits of the nearest number, the even one of two; of the largest magnitude beyond it.
inline uint8_t e4m3_nearest(double value) {
  const double magnitude = std::fmin(std::abs(value), 448.0);
  int low = 0, high = 0x7e;  // their numbers lie around it
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (e4m3_value(static_cast<uint8_t>(middle)) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - e4m3_value(static_cast<uint8_t>(low)),
               above = e4m3_value(static_cast<uint8_t>(high)) - magnitude;
  const int nearest = below < above || (below == above && low % 2 == 0) ? low : high;
  return static_cast<uint8_t>(nearest | (std::signbit(value) ? 0x80 : 0));
}

}  // namespace nanovllm
