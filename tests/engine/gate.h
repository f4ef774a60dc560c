// Gate: where a test's thread hangs until the test lets it go.
#pragma once

#include <condition_variable>
#include <mutex>

namespace nanovllm {

class Gate {
 public:
  /// Returns once open() has been called.
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_open_; });
  }
  /// For good; from any thread.
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

}  // namespace nanovllm
