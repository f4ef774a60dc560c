// AlarmClock: does something if a wait takes too long. Time in which this process was stopped does
// not count.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace nanovllm {

class AlarmClock {
 public:
  /// `ring` is called on a thread of the clock's own, once at most; it must not throw.
  AlarmClock(std::chrono::milliseconds patience, std::function<void()> ring);
  ~AlarmClock();
  AlarmClock(const AlarmClock&) = delete;
  AlarmClock& operator=(const AlarmClock&) = delete;

  /// A wait begins: rings unless stop() comes in time.
  void set() { set(patience_); }
  /// For a wait that may take another time than usual.
  void set(std::chrono::milliseconds patience);
  /// The wait has ended. Whether the clock has rung, now or before.
  bool stop();

 private:
  using Clock = std::chrono::steady_clock;

  void run();

  const std::chrono::milliseconds patience_;
  const std::function<void()> ring_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false, has_rung_ = false, ends_ = false;
  Clock::duration left_{};  // until it rings
  Clock::time_point last_look_;
  std::thread thread_;
};

}  // namespace nanovllm
