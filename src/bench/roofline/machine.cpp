#include "bench/roofline/machine.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/seconds.h"

namespace nanovllm::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Independent sums, so that the loop waits for memory and not for its own additions.
uint64_t sum(const uint64_t* data, size_t count) {
  constexpr size_t kLanes = 32;
  uint64_t lanes[kLanes] = {};
  for (size_t i = 0; i + kLanes <= count; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += data[i + lane];
  uint64_t total = 0;
  for (uint64_t lane : lanes) total += lane;
  return total;
}

// "Key:  123 kB" of a file in /proc, in bytes; 0 if it is not there.
int64_t proc_bytes(const char* path, const std::string& wanted) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string key;
    int64_t kilobytes = 0;
    if (words >> key >> kilobytes && key == wanted) return kilobytes * 1024;
  }
  return 0;
}

template <class Body>
void run_threads(int threads, Body&& body) {
  std::vector<std::thread> pool;
  for (int rank = 0; rank < threads; ++rank) pool.emplace_back([&body, rank] { body(rank); });
  for (std::thread& thread : pool) thread.join();
}

}  // namespace

double measure_read_bandwidth(int threads) {
  const size_t bytes = static_cast<size_t>(
      std::clamp<int64_t>(proc_bytes("/proc/meminfo", "MemAvailable:") / 4, 64 << 20, 1 << 30));
  const size_t share = bytes / sizeof(uint64_t) / static_cast<size_t>(threads);
  std::vector<std::vector<uint64_t>> buffers(static_cast<size_t>(threads));
  // Each thread touches its own part first: its pages lie on its own memory node.
  run_threads(threads, [&](int rank) { buffers[static_cast<size_t>(rank)].assign(share, 1); });
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  double best = 0;
  for (int pass = 0; pass < 8; ++pass) {
    const auto start = Clock::now();
    run_threads(threads, [&](int rank) {
      const auto& buffer = buffers[static_cast<size_t>(rank)];
      sums[static_cast<size_t>(rank)] = sum(buffer.data(), buffer.size());
    });
    const double seconds = seconds_since(start);
    // The sums are used, or the compiler would not read at all.
    const bool read = std::all_of(sums.begin(), sums.end(), [](uint64_t s) { return s > 0; });
    if (read) best = std::max(best, double(share * sizeof(uint64_t)) * threads / seconds);
  }
  return best;
}

int64_t peak_memory() { return proc_bytes("/proc/self/status", "VmHWM:"); }

void reset_peak_memory() { std::ofstream("/proc/self/clear_refs") << "5"; }

Rates known_gpu_rates(const std::string& device) {
  if (device.find("H200") != std::string::npos) return {4.65e12, 790e12};
  return {};
}

}  // namespace nanovllm::cli
