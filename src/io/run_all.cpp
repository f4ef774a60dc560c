#include "io/run_all.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>

namespace nanovllm {

void run_all(const std::vector<std::function<void()>>& work) {
  constexpr size_t kMostThreads = 16;
  std::atomic<size_t> next{0};
  const auto some = [&] {
    for (size_t i; (i = next++) < work.size();) work[i]();
  };
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::future<void>> others;
  for (size_t i = 1; i < std::min({work.size(), kMostThreads, cores}); ++i)
    others.push_back(std::async(std::launch::async, some));
  some();
  for (auto& other : others) other.get();
}

}  // namespace nanovllm
