// Threads of the CPU backend: OpenMP regions of a given size, because oneDNN's are of that kind and
// a second pool would fight it for the cores. Work is cut into fixed contiguous shares; every
// result is independent of the cut.
#pragma once

#include <algorithm>
#include <cstdint>

#include <omp.h>

#include "ops/cpu/num_threads.h"

namespace nanovllm::cpu {

/// Throws if the system does not let this process start so many threads: OpenMP would end it.
void check_can_start(int threads);

/// body(begin, end, thread) over [0, count) in contiguous shares, one per thread. The body must not
/// throw. `cost` is the rough number of elements touched: what is too little to share runs on the
/// caller.
template <class Body>
void parallel_for(int threads, int64_t count, int64_t cost, Body&& body) {
  constexpr int64_t kWorthSharing = 16 * 1024;
  threads = static_cast<int>(std::min<int64_t>({threads, count, cost / kWorthSharing + 1}));
  if (threads <= 1) {
    if (count > 0) body(int64_t{0}, count, 0);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), rank = omp_get_thread_num();
    body(count * rank / team, count * (rank + 1) / team, static_cast<int>(rank));
  }
}

/// body(i, thread) for i in [0, count), handed out one by one: for units of very different size.
template <class Body>
void parallel_each(int threads, int64_t count, Body&& body) {
  threads = static_cast<int>(std::min<int64_t>(threads, count));
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) body(i, omp_get_thread_num());
}

/// While alive, libraries called from this thread (oneDNN) use `threads` threads.
class ThreadCount {
 public:
  explicit ThreadCount(int threads) : saved_(omp_get_max_threads()) {
    if (threads != saved_) omp_set_num_threads(threads);
  }
  ~ThreadCount() {
    if (omp_get_max_threads() != saved_) omp_set_num_threads(saved_);
  }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int saved_;
};

}  // namespace nanovllm::cpu
