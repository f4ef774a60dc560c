// Shared by the model-based tests: their length, and their randomness.
//
// NANOVLLM_LONG_TESTS=1 runs 10^7 operations instead of 10^5.
#pragma once

#include <cstdlib>
#include <exception>
#include <random>
#include <string>

#include <gtest/gtest.h>

namespace nanovllm {

inline constexpr uint64_t kWholeHash = ~uint64_t{0};
inline constexpr int kNumSeeds = 250;

inline int num_operations_per_seed() {
  const char* value = std::getenv("NANOVLLM_LONG_TESTS");
  const bool is_long = value && std::string(value) == "1";
  return (is_long ? 10'000'000 : 100'000) / kNumSeeds;
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(double p) { return static_cast<double>(engine_() >> 11) < p * 0x1p53; }
  template <class Container>
  const auto& pick(const Container& container) {
    return *std::next(container.begin(), below(std::ssize(container)));
  }

 private:
  std::mt19937_64 engine_;
};

/// Steps of `run`, each followed by the comparison with its model; a fatal failure ends them.
template <class Run>
void run_operations(Run& run, uint64_t seed) {
  for (int i = 0; i < num_operations_per_seed(); ++i) {
    try {
      run.step();
      run.compare();
    } catch (const std::exception& error) {
      FAIL() << "seed " << seed << ", operation " << i << ": " << error.what();
    }
  }
}

}  // namespace nanovllm
