// Whose turn it is on a device. Kernels of ranks wait for each other across GPUs; those of two
// groups at once would wait for ever, where each group has the room on one GPU that the other needs
// there: a decode step of few rows fills its GPU (ops/cuda/decoder/decoder_layers_sm90a.cu). So
// groups that share a device take turns, a step at a time.
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

  /// The group's devices, by name; before, take() waits for nobody. The caller holds take_all().
  void join(std::vector<std::string> devices);
  /// Now no other group has anything under way on a device of this one's, and none gives it
  /// anything while the caller holds this. What this group gives its devices then is drained in its
  /// turn.
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
