// A few threads for what must block neither the I/O thread nor the engine's: reading bodies,
// templates, tokenizing, long answers.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace nanovllm::server {

class Pool {
 public:
  explicit Pool(int threads) : Pool() {  // where the last cannot start, the first ones end
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  /// Finishes the jobs that it has.
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  /// `job` may not throw.
  void add(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_one();
  }

 private:
  Pool() = default;
  void work() {
    while (true) {
      std::function<void()> job;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return is_ending_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  bool is_ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace nanovllm::server
