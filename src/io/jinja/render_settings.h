// Settings of a render: limits and a clock.
#pragma once

#include <cstddef>
#include <ctime>
#include <functional>

namespace nanovllm {

/// Limits of one render. Exceeding a limit is an Error(invalid_argument) that names the limit.
struct ChatTemplateLimits {
  size_t max_steps = 20'000'000;  ///< evaluated nodes, and one per 16 bytes of text worked on
  size_t max_memory_bytes = size_t{256} << 20;  ///< values alive at one time
  size_t max_output_bytes = size_t{64} << 20;   ///< the rendered text
  size_t max_depth = 600;  ///< nested expressions, blocks and macro calls while running
};

/// The clock of `strftime_now`.
using ChatClock = std::function<std::tm()>;

}  // namespace nanovllm
