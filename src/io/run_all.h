// Work that may be done in any order, on several threads.
#pragma once

#include <functional>
#include <vector>

namespace nanovllm {

/// Does all of it, on at most 16 threads. Throws what one of it threw, when the others have ended.
void run_all(const std::vector<std::function<void()>>& work);

}  // namespace nanovllm
