#include "ops/cpu/memory.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

namespace nanovllm::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

/// One number of a small text file, or `otherwise`.
size_t read_number(const char* path, size_t otherwise) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : otherwise;
}

double gib(size_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(size_t{1} << 30);
}

[[noreturn]] void fail_allocation(size_t bytes) {
  rlimit address_space{};
  if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY &&
      address_space.rlim_cur < memory_info().free)
    fail(ErrorKind::device,
         "cannot allocate {:.2f} GiB of memory: this process may address {:.2f} GiB in all; raise "
         "that limit (ulimit -v)",
         gib(bytes), gib(address_space.rlim_cur));
  fail(ErrorKind::device, "cannot allocate {:.2f} GiB of memory, {:.2f} GiB are free", gib(bytes),
       gib(memory_info().free));
}

}  // namespace

MemoryInfo memory_info(const char* meminfo) {
  MemoryInfo info;
  if (struct sysinfo system{}; sysinfo(&system) == 0)
    info = {size_t{system.totalram} * system.mem_unit, size_t{system.freeram} * system.mem_unit};
  std::ifstream file(meminfo);
  std::string key, unit;
  for (size_t kilobytes = 0; file >> key >> kilobytes && std::getline(file, unit);) {
    if (key == "MemTotal:") info.total = kilobytes * 1024;
    if (key == "MemAvailable:") info.free = kilobytes * 1024;
  }
  const size_t limit = read_number("/sys/fs/cgroup/memory.max", ~size_t{0});
  const size_t used = read_number("/sys/fs/cgroup/memory.current", 0);
  if (limit < info.total) {
    info.total = limit;
    info.free = std::min(info.free, limit - std::min(limit, used));
  }
  return info;
}

Buffer allocate(size_t bytes) {
  if (bytes < kHugePage) {
    const size_t rounded = std::max<size_t>(256, (bytes + 255) / 256 * 256);
    auto* data = static_cast<std::byte*>(std::aligned_alloc(256, rounded));
    if (!data) fail_allocation(bytes);
    std::memset(data, 0, rounded);
    return {data, [](std::byte* p) { std::free(p); }};
  }
  // The kernel promises memory it does not have; asking first turns a later kill into an error now.
  if (bytes > memory_info().free) fail_allocation(bytes);
  const size_t length = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  // One page more than needed, trimmed to a huge page's boundary.
  void* raw = mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) fail_allocation(bytes);
  const size_t address = reinterpret_cast<size_t>(raw),
               skip = (kHugePage - address % kHugePage) % kHugePage;
  std::byte* data = static_cast<std::byte*>(raw) + skip;
  if (skip) munmap(raw, skip);
  munmap(data + length, kHugePage - skip);
  madvise(data, length, MADV_HUGEPAGE);  // a wish: without it all works, a few percent slower
  return {data, [length](std::byte* p) { munmap(p, length); }};
}

}  // namespace nanovllm::cpu
