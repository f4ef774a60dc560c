// Times of the steady clock as plain numbers.
#pragma once

#include <chrono>

namespace nanovllm {

inline double to_seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return to_seconds(std::chrono::steady_clock::now() - begin);
}

}  // namespace nanovllm
