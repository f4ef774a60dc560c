// When the layers of a decode step run in two lanes.
#pragma once

#include "ops/backend.h"

namespace nanovllm {

/// Two lanes where attention takes most of the step. They hide the time in which products, norms
/// and rotations wait for one another, behind the attention of the other half, which waits for
/// memory. They cost a second reading of every weight: so weights must be small, and small beside
/// the keys and values, and the halves must have rows enough that their products take less than
/// those of all.
///
/// Measured on an H200 with 0.9 GB of weights: 64 rows gain 5 % from 8 times as many bytes of keys
/// and values on, 48 rows lose. More rows have products of larger tiles (gemm_mid.cuh), which
/// halves would lose: 80 to 256 rows lose 2 to 11 % at 3 to 17 times as many bytes, 256 gain 3 % at
/// 34 times. 14 GB of weights lose a quarter.
constexpr int decode_lanes(const DecodeSize& size) {
  constexpr int64_t kFewRows = 64, kManyRows = 192;
  constexpr double kMostWeights = 2e9;
  // For each byte of weights; of a bound, up to twice what is there.
  constexpr double kLeastOfFew = 6, kLeastOfMany = 30;
  const double cache = size.cache_bytes / size.weight_bytes;
  const bool pays = (size.rows == kFewRows && cache >= kLeastOfFew) ||
                    (size.rows >= kManyRows && cache >= kLeastOfMany);
  return pays && size.weight_bytes <= kMostWeights ? 2 : 1;
}

}  // namespace nanovllm
