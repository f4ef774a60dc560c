// DeviceTurn: groups of ranks that share a device take turns on it, a step at a time. Kernels of
// ranks wait for each other across GPUs, and a decode step of few rows fills its GPU
// (ops/cuda/decoder/decoder_layers_sm90a.cu). Two groups at once would wait for ever, each on a GPU
// that the other fills.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace nanovllm {

class DeviceTurn {
 public:
  /// `drain`, called from any thread, returns when the group's devices have done what they were
  /// given so far. Must not throw.
  explicit DeviceTurn(std::function<void()> drain);
  ~DeviceTurn();
  DeviceTurn(const DeviceTurn&) = delete;
  DeviceTurn& operator=(const DeviceTurn&) = delete;

  /// Sets the group's devices, by name: take() waits for groups that share one. Under take_all().
  void join(std::vector<std::string> devices);
  /// Returns when no other group has work under way on a device of this group; none gives it work
  /// while the caller holds the lock. Work that this group gives its devices then is drained before
  /// another group's turn.
  [[nodiscard]] std::unique_lock<std::mutex> take();
  /// No other group has anything under way anywhere: for opening and closing devices, where drivers
  /// wait for devices to be idle.
  [[nodiscard]] std::unique_lock<std::mutex> take_all();

 private:
  bool shares_with(const DeviceTurn& other) const;
  /// Has it drained if it may have something under way.
  void pause();

  const std::function<void()> drain_;
  std::vector<std::string> devices_;
  bool is_active_ = false;  // may have something under way
};

}  // namespace nanovllm
