// The one definition of a sum over ranks on the host: in f32, in rank order, rounded once.
#pragma once

#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace nanovllm {

/// out[i] = sum over r of ranks[r][i] for i in [begin, end); `out` may be one of `ranks`.
template <class T>
void sum_ranks(T* out, std::span<T* const> ranks, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float sum = static_cast<float>(ranks[0][i]);
    for (size_t r = 1; r < ranks.size(); ++r) sum += static_cast<float>(ranks[r][i]);
    out[i] = static_cast<T>(sum);
  }
}

}  // namespace nanovllm
