// Memory of the CPU backend: large pages where the system has them, and what is left.
#pragma once

#include "ops/backend.h"

namespace nanovllm::cpu {

/// Zeroed; 2 MB pages are asked for where that pays. Throws Error(device) with the sizes when there
/// is not enough.
Buffer allocate(size_t bytes);

/// Memory that products work on: it grows where more is asked for than ever before, and is then
/// empty.
class GrowingBuffer {
 public:
  void reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    data_ = allocate(bytes);
    bytes_ = bytes;
  }
  std::byte* get() const { return data_.get(); }

 private:
  Buffer data_;
  size_t bytes_ = 0;
};

/// Of the machine, as `meminfo` says or, without such a file, the kernel; or of the container where
/// that has a limit.
MemoryInfo memory_info(const char* meminfo = "/proc/meminfo");

}  // namespace nanovllm::cpu
