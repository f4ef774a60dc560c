// When the layers of a decode step run in two micro-batches, and how these share the GPU.
#pragma once

#include <algorithm>

#include "ops/backend.h"

namespace nanovllm {

/// Two micro-batches where attention takes most of the step. They hide the time in which products,
/// norms and rotations wait for one another, behind the attention of the other half, which waits
/// for memory. They cost a second reading of every weight: so weights must be small, and small
/// beside the keys and values; and the more rows, the longer products take on few SMs.
///
/// Measured on an H200 with 0.9 GB of weights: 48 rows of 1,024 tokens gain 16 %, 96 and 192 rows
/// 6 %, 256 rows 3 %; 128 and 256 rows of 400 tokens 3 to 4 %; 64 rows of 400 tokens lose 2 %, 128
/// and 256 rows of 200 tokens 12 to 15 %, 24 rows of 1,024 tokens 5 %. 14 GB of weights lose a
/// quarter. Quantised weights, whose products compute more, lose sooner: the same model in int4 5 %
/// at 64 rows of 1,000 tokens, and gains 8 % at 96; in FP8 6 % and nothing, in int8 13 and 24 %;
/// larger ones, of 2.8 and 7.2 GB as bf16, lose 14 to 60 % in int4 and FP8.
constexpr int decode_micro_batches(const DecodeSize& size) {
  constexpr int64_t kFewestRows = 40;
  constexpr double kMostWeights = 2e9;
  // For each byte of weights: bytes of keys and values, or of a bound, up to twice what is there.
  constexpr double kLeast = 6, kLeastPerRow = 0.045;
  if (size.format.quantises_rows()) return 1;
  const double weights = size.weight_bytes * (size.format.is_quantised() ? 2 : 1),
               cache = size.cache_bytes / weights,
               least = std::max(kLeast, kLeastPerRow * static_cast<double>(size.rows));
  const bool pays = size.rows >= kFewestRows && cache >= least;
  return pays && weights <= kMostWeights ? 2 : 1;
}

/// On Hopper the SMs are divided: one micro-batch's attention leaves so many to the other's
/// products. There, a product of few, large tiles reads its rows seldom from the L2 cache, and
/// waits for no SM's queue of keys.
constexpr int kOverlapProductSms = 32;
/// The means to keep them apart: shared memory that a block of attention takes at least, and
/// products and norms at most. A norm has room beside a product, and neither beside
/// attention.
constexpr size_t kOverlapAttentionBytes = size_t{200} << 10,
                 kOverlapProductBytes = size_t{196} << 10, kOverlapNormBytes = size_t{28} << 10;

}  // namespace nanovllm
