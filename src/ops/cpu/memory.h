// Memory of the CPU backend: large pages where the system has them, and what is left.
#pragma once

#include "ops/backend.h"

namespace nanovllm::cpu {

/// Zeroed; 2 MB pages are asked for where that pays. Throws Error(device) with the sizes when there
/// is not enough.
Buffer allocate(size_t bytes);

/// Of the machine, as `meminfo` says or, without such a file, the kernel; or of the container where
/// that has a limit.
MemoryInfo memory_info(const char* meminfo = "/proc/meminfo");

}  // namespace nanovllm::cpu
