// How long a device takes for a few operations, without the host's share.
#pragma once

#include <functional>

#include "ops/backend.h"

namespace nanovllm::cli {

/// Seconds of one `body`, which issues operations on `device`: the median of `repetitions` replays
/// of a graph that holds it often enough to outweigh the launch; without graphs, of plain calls.
double seconds_of(Backend& device, int64_t repetitions, const std::function<void()>& body);

}  // namespace nanovllm::cli
