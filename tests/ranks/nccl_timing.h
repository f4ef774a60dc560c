// NCCL's own sums, beside which all_reduce_timing puts ours.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace nanovllm {

/// One rank's communicator of NCCL's own, with its stream and memory. All calls are collective.
class NcclTimer {
 public:
  /// `share`, called once: rank 0's bytes to all ranks. `meet` returns when all ranks have called
  /// it.
  NcclTimer(int rank, int world_size, const std::function<void(void*, size_t)>& share,
            std::function<void()> meet, int64_t most_bytes);
  ~NcclTimer();

  /// Microseconds of a sum of `bytes` of bf16, in place, of `calls` recorded in a graph that runs
  /// `rounds` times.
  double time(int64_t bytes, int calls, int rounds);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nanovllm
