#include "bench/timing.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

#include "bench/bench.h"

namespace nanovllm::cli {
namespace {

// A launch on an idle device and the wait for its end take up to 0.1 ms, which steps that follow
// each other do not see.
constexpr double kLongEnough = 20e-3;

int64_t copies_for(double seconds) {
  return std::clamp<int64_t>(static_cast<int64_t>(kLongEnough / seconds), 1, 50);
}

/// run(rank) on a thread for each; the first exception, when all are back.
void on_all(size_t ranks, const std::function<void(size_t)>& run) {
  std::mutex mutex;
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        run(rank);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

double seconds_of(Backend& device, int64_t repetitions, const std::function<void()>& body) {
  const auto time = [&](const std::function<void()>& run) {
    device.synchronize();
    const auto begin = std::chrono::steady_clock::now();
    run();
    device.synchronize();
    return seconds_since(begin);
  };
  body();  // what happens once in a process, outside the recording
  const double eager = time(body);
  const int64_t copies = copies_for(eager);
  const auto several = [&] {
    for (int64_t i = 0; i < copies; ++i) body();
  };
  const auto graph = device.capture(several);
  const std::function<void()> run =
      graph ? [&] { graph->launch(); } : std::function<void()>(several);
  run();
  std::vector<double> seconds;
  for (int64_t i = 0; i < repetitions; ++i) seconds.push_back(time(run) / double(copies));
  return median(seconds);
}

double seconds_of_ranks(std::span<Backend* const> devices, int64_t repetitions, bool records,
                        const std::function<void(size_t)>& body) {
  if (devices.size() == 1) return seconds_of(*devices[0], repetitions, [&] { body(0); });
  const auto time = [&](const std::function<void(size_t)>& run) {
    const auto begin = std::chrono::steady_clock::now();
    on_all(devices.size(), [&](size_t rank) {
      devices[rank]->synchronize();  // and is this thread's device from now on
      run(rank);
      devices[rank]->synchronize();
    });
    return seconds_since(begin);
  };
  time(body);
  const int64_t copies = copies_for(time(body));
  const auto several = [&](size_t rank) {
    for (int64_t i = 0; i < copies; ++i) body(rank);
  };
  std::function<void(size_t)> run = several;
  std::vector<std::unique_ptr<Graph>> graphs(devices.size());
  if (records) {
    on_all(devices.size(), [&](size_t rank) {
      devices[rank]->synchronize();
      graphs[rank] = devices[rank]->capture([&] { several(rank); });
      devices[rank]->synchronize();
    });
    if (graphs[0]) run = [&](size_t rank) { graphs[rank]->launch(); };
  }
  time(run);
  std::vector<double> seconds;
  for (int64_t i = 0; i < repetitions; ++i) seconds.push_back(time(run) / double(copies));
  return median(seconds);
}

}  // namespace nanovllm::cli
