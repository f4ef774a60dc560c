#include "ranks/alarm_clock.h"

#include <algorithm>

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

// The thread is not woken: it looks often enough.
void AlarmClock::set(std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  is_set_ = true;
  left_ = patience;
  last_look_ = Clock::now();
}

bool AlarmClock::stop() {
  const std::lock_guard lock(mutex_);
  is_set_ = false;
  return has_rung_;
}

void AlarmClock::run() {
  const Clock::duration between_looks = patience_ / 16;
  std::unique_lock lock(mutex_);
  last_look_ = Clock::now();
  while (!changed_.wait_for(lock, between_looks, [&] { return ends_; })) {
    const auto now = Clock::now();
    left_ -= std::min(now - last_look_, 2 * between_looks);  // more: nobody has run here
    last_look_ = now;
    if (!is_set_ || has_rung_ || left_ > Clock::duration::zero()) continue;
    has_rung_ = true;
    lock.unlock();
    ring_();
    lock.lock();
    last_look_ = Clock::now();
  }
}

}  // namespace nanovllm
