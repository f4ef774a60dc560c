#include "ranks/device_turn.h"

#include <algorithm>

namespace nanovllm {
namespace {

/// All of this process, and the mutex that guards them and what they hold.
struct Turns {
  std::mutex mutex;
  std::vector<DeviceTurn*> all;
};

Turns& turns() {
  static Turns instance;
  return instance;
}

}  // namespace

DeviceTurn::DeviceTurn(std::function<void()> drain) : drain_(std::move(drain)) {
  const std::lock_guard lock(turns().mutex);
  turns().all.push_back(this);
}

DeviceTurn::~DeviceTurn() {
  const std::lock_guard lock(turns().mutex);
  std::erase(turns().all, this);
}

void DeviceTurn::join(std::vector<std::string> devices) { devices_ = std::move(devices); }

bool DeviceTurn::shares_with(const DeviceTurn& other) const {
  return std::find_first_of(devices_.begin(), devices_.end(), other.devices_.begin(),
                            other.devices_.end()) != devices_.end();
}

void DeviceTurn::pause() {
  if (is_active_) drain_();
  is_active_ = false;
}

std::unique_lock<std::mutex> DeviceTurn::take() {
  std::unique_lock lock(turns().mutex);
  for (DeviceTurn* other : turns().all)
    if (other != this && shares_with(*other)) other->pause();
  is_active_ = !devices_.empty();
  return lock;
}

std::unique_lock<std::mutex> DeviceTurn::take_all() {
  std::unique_lock lock(turns().mutex);
  for (DeviceTurn* other : turns().all)
    if (other != this) other->pause();
  return lock;
}

}  // namespace nanovllm
