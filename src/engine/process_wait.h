// What ends a process of an MPI job that waits for others in vain, where the wait itself cannot be
// ended.
#pragma once

#include <chrono>
#include <string>
#include <thread>

#include "engine/alarm_clock.h"

namespace nanovllm {

/// Ends this process at once, with one line that says why: somebody else hangs, and what waits for
/// it here cannot be ended. mpirun then ends the others.
[[noreturn]] void end_process(const std::string& why);

/// Whatever waits for other processes while this lives, or calls of drivers that can hang with
/// them, ends in time, or ends this process: when it has taken longer than `patience`, which has to
/// do for slow disks and devices, or when another rank has been stopped for 7 seconds.
class WaitForProcesses {
 public:
  /// `what` is waited for: "the others to start".
  WaitForProcesses(std::string what, std::chrono::milliseconds patience);
  ~WaitForProcesses();
  WaitForProcesses(const WaitForProcesses&) = delete;
  WaitForProcesses& operator=(const WaitForProcesses&) = delete;
  /// Starts afresh.
  void go_on(std::chrono::milliseconds patience) { alarm_.set(patience); }

 private:
  void look_for_stopped_ranks();
  /// Whether it took less than `duration` until this is destroyed.
  bool ends_within(std::chrono::milliseconds duration);

  const std::string what_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
  AlarmClock alarm_;
  std::thread looks_;
};

}  // namespace nanovllm
