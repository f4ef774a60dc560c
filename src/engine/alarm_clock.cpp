#include "engine/alarm_clock.h"

namespace nanovllm {

AlarmClock::AlarmClock(std::chrono::milliseconds patience, std::function<void()> ring)
    : patience_(patience), ring_(std::move(ring)), thread_([this] { run(); }) {}

AlarmClock::~AlarmClock() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

// Nobody is woken: the thread looks often enough.
void AlarmClock::set(std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  is_set_ = true;
  time_ = std::chrono::steady_clock::now() + patience;
}

bool AlarmClock::stop() {
  const std::lock_guard lock(mutex_);
  is_set_ = false;
  return has_rung_;
}

void AlarmClock::run() {
  const auto between_looks = patience_ / 16;
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, between_looks, [&] { return ends_; })) {
    if (!is_set_ || has_rung_ || std::chrono::steady_clock::now() < time_) continue;
    has_rung_ = true;
    lock.unlock();
    ring_();
    lock.lock();
  }
}

}  // namespace nanovllm
