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
/// Measured on an H200: 0.9 GB of weights and 96 to 256 rows gain 2 to 7 % from 4 times as many
/// bytes of keys and values on, 64 rows 5 % from 8 times on and nothing before, 48 rows lose; 14 GB
/// of weights lose a quarter.
constexpr int decode_lanes(const DecodeSize& size) {
  constexpr int64_t kFewestRows = 64;
  constexpr double kMostWeights = 2e9;
  constexpr double kLeastCache = 6;  // for each byte of weights; a bound, up to twice what is there
  const bool pays = size.rows >= kFewestRows && size.weight_bytes <= kMostWeights &&
                    size.cache_bytes >= kLeastCache * size.weight_bytes;
  return pays ? 2 : 1;
}

}  // namespace nanovllm
