// Times all_reduce between the GPUs of this machine, as a decode step runs it: in a graph.
//   all_reduce_timing [ranks, default 2]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "engine/open_ranks.h"

namespace nanovllm {
namespace {

using Clock = std::chrono::steady_clock;

/// Microseconds per call.
double time_of(Backend& backend, Communicator& comm, ThreadGroup& group, Tensor x) {
  constexpr int kCalls = 20;
  const int rounds = x.bytes() > (1 << 20) ? 5 : 20;
  comm.all_reduce(x);
  const auto graph = backend.capture([&] {
    for (int i = 0; i < kCalls; ++i) comm.all_reduce(x);
  });
  graph->launch();
  backend.synchronize();
  group.barrier(comm.rank());
  const auto begin = Clock::now();
  for (int i = 0; i < rounds; ++i) graph->launch();
  backend.synchronize();
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  group.barrier(comm.rank());
  return 1e6 * seconds / (kCalls * rounds);
}

void run_rank(int rank, const std::shared_ptr<ThreadGroup>& group) {
  const auto backend = make_backend(fmt::format("cuda:{}", rank), {});
  const auto comm = open_communicator(*backend, group, rank);
  constexpr int64_t kMost = int64_t{64} << 20;
  const Buffer memory = backend->allocate(kMost);
  for (int64_t bytes = 8 << 10; bytes <= kMost; bytes *= 2) {
    const Tensor x(memory.get(), DType::bf16, {1, bytes / 2}, backend->device());
    const double us = time_of(*backend, *comm, *group, x);
    if (rank == 0)
      std::printf("%9lld bytes %9.2f us  %7.1f GB/s\n", static_cast<long long>(bytes), us,
                  static_cast<double>(bytes) / us / 1e3);
  }
}

}  // namespace
}  // namespace nanovllm

int main(int argc, char** argv) {
  using namespace nanovllm;
  const int world = argc > 1 ? std::atoi(argv[1]) : 2;
  const auto group = std::make_shared<ThreadGroup>(world, std::chrono::seconds(20));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([rank, &group] {
      try {
        run_rank(rank, group);
      } catch (const std::exception& error) {
        std::printf("rank %d: %s\n", rank, error.what());
        group->fail({rank, ErrorKind::engine, error.what()});
      }
    });
  for (std::thread& thread : threads) thread.join();
  return group->failure() ? 1 : 0;
}
