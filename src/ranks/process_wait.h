// Ends a process of an MPI job that waits for others in vain, where the wait itself cannot be
// ended.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "ranks/alarm_clock.h"

namespace nanovllm {

/// Ends this process at once, with one line that says why: another rank hangs, and the wait for
/// it here cannot be ended. mpirun then ends the others.
[[noreturn]] void end_process(const std::string& why);

/// While this lives, another rank of this host that is stopped for 6 seconds ends this process.
/// Where mpirun did not start it, nothing is done.
class WatchForStoppedRanks {
 public:
  /// `what` is waited for: "the next step". `only`: the one rank that matters, if not all do.
  explicit WatchForStoppedRanks(std::string what, std::optional<int> only = {});
  ~WatchForStoppedRanks();
  WatchForStoppedRanks(const WatchForStoppedRanks&) = delete;
  WatchForStoppedRanks& operator=(const WatchForStoppedRanks&) = delete;

 private:
  void look(std::optional<int> only);
  /// Whether it took less than `duration` until this is destroyed.
  bool ends_within(std::chrono::milliseconds duration);

  const std::string what_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  std::thread looks_;
};

/// For waits for other processes, and for calls of drivers that can hang with them: the process
/// ends if one takes longer than `patience` while this lives. `patience` must be enough for slow
/// disks and devices.
class WaitForProcesses {
 public:
  WaitForProcesses(const std::string& what, std::chrono::milliseconds patience);
  /// The same object for the next wait: time counts from now.
  void go_on(std::chrono::milliseconds patience) { alarm_.set(patience); }

 private:
  AlarmClock alarm_;
};

}  // namespace nanovllm
