// The line on the terminal that says how far the work is.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "nanovllm/llm.h"

namespace nanovllm::cli {

/// Writes to standard error, and only if that is a terminal and `quiet` is false.
class Progress {
 public:
  explicit Progress(bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  bool active() const { return active_; }
  /// "loading weights 45 %"
  void loading(const char* what, int64_t done, int64_t total);
  /// "12/256 requests, prefill 3210 tok/s, decode 412 tok/s, 1:23 left"; at most five times a
  /// second. `total` is -1 where it is not known.
  void update(const EngineStats& stats, int64_t done, int64_t total);
  /// Takes the line away, so that something else can be written.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  bool due();
  void show(const std::string& line);

  bool active_;
  bool shown_ = false;
  std::optional<Clock::time_point> last_shown_;
  Clock::time_point start_ = Clock::now();

  // Rates are those of the last seconds: what was counted at the start of the window.
  std::optional<Clock::time_point> window_start_;
  EngineStats window_stats_;
  double prefill_rate_ = 0, decode_rate_ = 0;
};

}  // namespace nanovllm::cli
