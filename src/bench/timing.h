// How long a device takes for a few operations, without the host's share.
#pragma once

#include <functional>
#include <span>

#include "ops/backend.h"

namespace nanovllm::cli {

/// Seconds of one `body`, which issues operations on `device`: the median of `repetitions` replays
/// of a graph that holds it often enough to outweigh the launch; without graphs, of plain calls.
double seconds_of(Backend& device, int64_t repetitions, const std::function<void()>& body);

/// The same of all ranks at once, whose operations wait for each other: body(rank), on a thread for
/// each. The longest of them counts. `records`: the operations can be recorded in graphs.
double seconds_of_ranks(std::span<Backend* const> devices, int64_t repetitions, bool records,
                        const std::function<void(size_t)>& body);

}  // namespace nanovllm::cli
