// The line on the terminal that says how far the work is.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "nanovllm/llm.h"

namespace nanovllm::cli {

/// Writes to standard error, and only if that is a terminal and `quiet` is false. While the line is
/// shown, a thread keeps its clock going: a step may take seconds.
class Progress {
 public:
  explicit Progress(bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  bool active() const { return active_; }
  /// "loading weights 45 %"
  void loading(const char* what, int64_t done, int64_t total);
  /// "12/256 requests, 412 tok/s, 1:23 left, prompts 3210 tok/s, 8 running"; at most five times a
  /// second. `total` is -1 where it is not known.
  void update(const EngineStats& stats, int64_t done, int64_t total);
  /// "reading the prompt, 512 of 1536 tokens", while an answer has not begun. The request is the
  /// only one.
  void reading(const LLM& llm);
  /// Takes the line away, so that something else can be written.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Line { none, loading, reading, batch };
  bool due(Line line);
  void show(std::vector<std::string> parts);
  void draw() const;
  void tick();

  const bool active_;
  Line last_ = Line::none;
  Clock::time_point last_shown_;  // of `last_`
  Clock::time_point start_ = Clock::now();

  // Rates are those of the last seconds: what was counted at the start of the window.
  std::optional<Clock::time_point> window_start_;
  EngineStats window_stats_;
  double prefill_rate_ = 0, decode_rate_ = 0;

  mutable std::mutex mutex_;  // of what follows, which the clock's thread reads
  std::condition_variable changed_;
  std::vector<std::string> parts_;  // the most important one first; empty: nothing is shown
  Clock::time_point shown_since_;
  bool ends_ = false;
  std::thread clock_;
};

}  // namespace nanovllm::cli
