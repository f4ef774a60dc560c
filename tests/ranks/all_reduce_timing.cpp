// Times what ranks on GPUs do together, as a step runs it, in a graph: all_reduce alone, with the
// residual addition and the norm after it in operations of their own and in one, and the gathering
// of logits. Beside ours NCCL's own sums of the same sizes, where its header was there at build
// time.
//   all_reduce_timing [ranks, default 2] [hidden size, default 4096] [vocabulary, default 151936]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "core/seconds.h"
#ifdef NANOVLLM_NCCL
#include "ranks/nccl_timing.h"
#endif
#include "ranks/open_ranks.h"

namespace nanovllm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCalls = 20;  // in a graph
constexpr int64_t kMostRows = 16384;

int rounds_for(int64_t bytes) { return bytes > (1 << 22) ? 3 : 20; }

/// One rank's side: microseconds per call of what all ranks issue.
class Timer {
 public:
  Timer(Backend& backend, Communicator& comm, ThreadGroup& group)
      : backend_(backend), comm_(comm), group_(group) {}

  double time(int64_t bytes, const std::function<void()>& body) {
    const int rounds = rounds_for(bytes);
    // A rank that still frees or allocates would wait for the GPUs of those that wait for it.
    group_.barrier(comm_.rank());
    body();
    const auto graph = backend_.capture([&] {
      for (int i = 0; i < kCalls; ++i) body();
    });
    graph->launch();
    backend_.synchronize();
    group_.barrier(comm_.rank());
    const auto begin = Clock::now();
    for (int i = 0; i < rounds; ++i) graph->launch();
    backend_.synchronize();
    const double seconds = seconds_since(begin);
    group_.barrier(comm_.rank());
    return 1e6 * seconds / (kCalls * rounds);
  }

 private:
  Backend& backend_;
  Communicator& comm_;
  ThreadGroup& group_;
};

void time_reductions(Backend& backend, Communicator& comm, Timer& timer, int64_t hidden) {
  const int64_t most = kMostRows * hidden * 2;
  const Buffer memory = backend.allocate(static_cast<size_t>(2 * most + hidden * 2));
  const auto at = [&](int64_t offset, int64_t rows) {
    return Tensor(memory.get() + offset, DType::bf16, {rows, hidden}, backend.device());
  };
  const Tensor w = at(2 * most, 1).reshape({hidden});
  for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 16384}) {
    const Tensor x = at(0, rows), residual = at(most, rows);
    const auto bytes = static_cast<int64_t>(x.bytes());
    const double alone = timer.time(bytes, [&] { comm.all_reduce(x); });
    const double two = timer.time(bytes, [&] {
      comm.all_reduce(x);
      backend.add_rms_norm(x, residual, x, w, 1e-6F);
    });
    bool fused = true;
    const double one = timer.time(bytes, [&] {
      fused = fused && comm.fusions().all_reduce_add_rms_norm(x, residual, w, 1e-6F);
    });
    if (comm.rank() == 0)
      std::printf(
          "%6lld rows, %9lld bytes: all_reduce %8.2f us, %6.1f GB/s; with norm %8.2f us; "
          "in one %8.2f us\n",
          static_cast<long long>(rows), static_cast<long long>(bytes), alone,
          static_cast<double>(bytes) / alone / 1e3, two, fused ? one : 0.0);
  }
}

#ifdef NANOVLLM_NCCL
void time_nccl(const Communicator& comm, ThreadGroup& group, int64_t hidden) {
  const int rank = comm.rank();
  const auto meet = [&] { group.barrier(rank); };
  const auto share = [&](void* bytes, size_t size) {
    if (rank == 0) group.show(rank, bytes);
    meet();
    if (rank != 0) std::memcpy(bytes, group.shown_by(0), size);
    meet();
  };
  NcclTimer timer(rank, comm.world_size(), share, meet, kMostRows * hidden * 2);
  for (const int64_t rows : {1, 8, 32, 64, 128, 512, 2048, 16384}) {
    const int64_t bytes = rows * hidden * 2;
    const double us = timer.time(bytes, kCalls, rounds_for(bytes));
    if (rank == 0)
      std::printf("%6lld rows, %9lld bytes: NCCL %8.2f us, %6.1f GB/s\n",
                  static_cast<long long>(rows), static_cast<long long>(bytes), us,
                  static_cast<double>(bytes) / us / 1e3);
  }
}
#endif

void time_gathering(Backend& backend, Communicator& comm, Timer& timer, int64_t vocab) {
  const int64_t world = comm.world_size(), n = (vocab + world - 1) / world;
  constexpr int64_t kMostGathered = 256;
  const Buffer parts = backend.allocate(static_cast<size_t>(world * kMostGathered * n) * 4),
               out = backend.allocate(static_cast<size_t>(kMostGathered * vocab) * 4);
  for (const int64_t rows : {1, 16, 64, 256}) {
    const Tensor all(parts.get(), DType::f32, {world, rows, n}, backend.device()),
        logits(out.get(), DType::f32, {rows, vocab}, backend.device());
    const double us = timer.time(rows * n * 4, [&] { comm.all_gather(logits, all); });
    if (comm.rank() == 0)
      std::printf("%6lld rows: all_gather of %lld columns %8.2f us\n", static_cast<long long>(rows),
                  static_cast<long long>(n), us);
  }
}

void run_rank(int rank, const std::shared_ptr<ThreadGroup>& group, int64_t hidden, int64_t vocab) {
  const auto backend = make_backend(fmt::format("cuda:{}", rank), {});
  const auto comm = open_communicator(*backend, group, rank);
  Timer timer(*backend, *comm, *group);
  time_reductions(*backend, *comm, timer, hidden);
#ifdef NANOVLLM_NCCL
  time_nccl(*comm, *group, hidden);
#endif
  time_gathering(*backend, *comm, timer, vocab);
  backend->synchronize();
  group->barrier(rank);
}

}  // namespace
}  // namespace nanovllm

int main(int argc, char** argv) {
  using namespace nanovllm;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int world = argc > 1 ? std::atoi(argv[1]) : 2;
  const int64_t hidden = argc > 2 ? std::atoll(argv[2]) : 4096,
                vocab = argc > 3 ? std::atoll(argv[3]) : 151936;
  const auto group = std::make_shared<ThreadGroup>(world, std::chrono::seconds(20));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([=, &group] {
      try {
        run_rank(rank, group, hidden, vocab);
      } catch (const std::exception& error) {
        std::printf("rank %d: %s\n", rank, error.what());
        group->fail({rank, ErrorKind::engine, error.what()});
      }
    });
  for (std::thread& thread : threads) thread.join();
  return group->failure() ? 1 : 0;
}
