// When the layers of a decode step run in two lanes.
#pragma once

#include "ops/backend.h"

namespace nanovllm {

/// Two lanes where attention takes most of the step. They hide the time in which products, norms
/// and rotations wait for one another, behind the attention of the other half, which waits for
/// memory. They cost a second reading of every weight: so weights must be small beside the keys and
/// values, and the halves must have rows enough that their products take no longer than those of
/// all. Measured on an H200: docs/performance.md.
constexpr int decode_lanes(const DecodeSize& size) {
  constexpr int64_t kFewestRows = 64;
  constexpr double kLeastCache = 8;  // for each byte of weights; a bound, up to twice what is there
  const bool pays = size.rows >= kFewestRows && size.cache_bytes >= kLeastCache * size.weight_bytes;
  return pays ? 2 : 1;
}

}  // namespace nanovllm
