// Random quantised weights, and the numbers that they stand for by docs/contract.md's definition.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "core/weight.h"
#include "parity/e4m3.h"

namespace nanovllm::parity {

struct Scales {
  const char* name;
  float low, high;
  bool plain = false;  // most groups of 16 rows have bf16 scales and no zero points
};

inline QuantizedRows random_rows(WeightFormat format, int64_t n, int64_t k, Scales scales,
                                 uint32_t seed = 0) {
  std::mt19937 random(static_cast<uint32_t>(n * 131 + k) + seed);
  QuantizedRows rows;
  const bool is_int4 = format.numbers == WeightFormat::int4;
  for (int64_t i = 0; i < n * k; ++i) {
    const auto bits = static_cast<uint8_t>(random() >> 24);
    rows.numbers.push_back(is_int4 ? static_cast<int8_t>(bits % 16 - 8)
                                   : static_cast<int8_t>((bits & 0x7f) == 0x7f ? 0 : bits));
  }
  std::uniform_real_distribution<float> exponent(std::log2(scales.low), std::log2(scales.high));
  for (int64_t i = 0; i < n * format.groups(k); ++i) {
    float scale = std::exp2(exponent(random));
    const bool is_plain =
        scales.plain && (i / format.groups(k) / 16 + i % format.groups(k)) % 3 != 1;
    // Half of them with few bits, as f16 and bf16 scales are: their products meet ties.
    if (i % 2 || is_plain) scale = static_cast<float>(bf16(scale));
    rows.scales.push_back(scale);
    const auto zero = static_cast<int8_t>(is_int4 ? random() % 16 - 8 : random() >> 24);
    if (format.has_zeros()) rows.zeros.push_back(is_plain ? int8_t{0} : zero);
  }
  if (format.rows == WeightFormat::Rows::tensor) rows.input_scale = 0.011f;
  return rows;
}

/// bf16(scale * (q - zero)), row-major.
inline std::vector<bf16> meaning_of(WeightFormat format, int64_t n, int64_t k,
                                    const QuantizedRows& rows) {
  std::vector<bf16> out;
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < k; ++c) {
      const int8_t q = rows.numbers[static_cast<size_t>(r * k + c)];
      const auto at = static_cast<size_t>(r * format.groups(k) + c / format.group);
      const float number =
          format.numbers == WeightFormat::e4m3
              ? e4m3_value(static_cast<uint8_t>(q))
              : static_cast<float>(q) -
                    (rows.zeros.empty() ? 0.0f : static_cast<float>(rows.zeros[at]));
      // The product of two f32 numbers is exact in double, and rounded once to f32.
      out.emplace_back(static_cast<float>(static_cast<double>(rows.scales[at]) * number));
    }
  return out;
}

}  // namespace nanovllm::parity
