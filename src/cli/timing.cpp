#include "cli/timing.h"

#include <algorithm>

#include "cli/bench.h"

namespace nanovllm::cli {

double seconds_of(Backend& device, int64_t repetitions, const std::function<void()>& body) {
  constexpr double kLongEnough = 2e-3;  // a launch and a wait take about 10 us
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
