#include "cli/timing.h"

#include <algorithm>

#include "cli/bench.h"

namespace nanovllm::cli {

double seconds_of(Backend& device, int64_t repetitions, const std::function<void()>& body) {
  // A launch on an idle device and the wait for its end take up to 0.1 ms, which steps that follow
  // each other do not see.
  constexpr double kLongEnough = 20e-3;
  const auto time = [&](const std::function<void()>& run) {
    device.synchronize();
    const auto begin = std::chrono::steady_clock::now();
    run();
    device.synchronize();
    return seconds_since(begin);
  };
  body();  // what happens once in a process, outside the recording
  const double eager = time(body);
  const auto copies = std::clamp<int64_t>(static_cast<int64_t>(kLongEnough / eager), 1, 50);
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

}  // namespace nanovllm::cli
