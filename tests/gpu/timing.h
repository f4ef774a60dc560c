// Times operations by replaying graphs of them.
#pragma once

#include <algorithm>
#include <chrono>

#include "gpu/rig.h"

namespace nanovllm {

/// Microseconds of one call of `body(i)`, from a graph of `count` of them.
template <class Body>
double microseconds(Backend& gpu, int count, Body&& body) {
  body(0);  // chooses algorithms outside the recording
  gpu.synchronize();
  const auto graph = gpu.capture([&] {
    for (int i = 0; i < count; ++i) body(i);
  });
  std::vector<double> times;
  for (int run = 0; run < 8; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    graph->launch();
    gpu.synchronize();
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
            .count() /
        count);
  }
  std::sort(times.begin() + 1, times.end());  // the first run warms up
  return times[4];
}

/// Prints the times of sampling and log probabilities.
void time_sampling(Backend& gpu);
/// Prints the times of what lies between the GEMMs and attention of a decode step.
void time_small_operations(Backend& gpu);

}  // namespace nanovllm
