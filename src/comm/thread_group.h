// ThreadGroup: ranks that are threads of one process. They meet at a barrier that knows who is
// missing, and a rank that fails stops all others there.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "nanovllm/error.h"

#include "comm/communicator.h"

namespace nanovllm {

/// Why a group was stopped.
struct RankFailure {
  int rank = 0;
  ErrorKind kind = ErrorKind::engine;
  std::string cause;
};

/// Shared by its ranks and by the thread that made them. Any thread may call any of it.
class ThreadGroup final : public RankMeeting {
 public:
  /// `patience`: how long a rank may keep the others waiting at a barrier before it counts as hung.
  ThreadGroup(int world_size, std::chrono::milliseconds patience);

  int world_size() const override { return static_cast<int>(shown_.size()); }
  void barrier(int rank) override;
  /// Stops the group: a rank at a barrier, or coming to one, throws. The first failure stays.
  void fail(RankFailure failure) noexcept;
  std::optional<RankFailure> failure() const;
  void on_failure(std::function<void()> wake) override;
  void show(int rank, void* pointer) override { shown_[static_cast<size_t>(rank)] = pointer; }
  void* shown_by(int rank) const override { return shown_[static_cast<size_t>(rank)]; }

 private:
  void throw_failure() const;  // with the mutex held
  void fail_locked(RankFailure failure);

  const std::chrono::milliseconds patience_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<uint64_t> round_ = 0;  // barriers that are complete
  int num_arrived_ = 0;
  std::vector<uint64_t> rounds_of_;  // barriers that each rank has come to
  std::optional<RankFailure> failure_;
  std::vector<std::function<void()>> wake_;
  std::vector<void*> shown_;
};

/// Rank `rank`'s communicator over host memory.
std::unique_ptr<Communicator> make_thread_communicator(std::shared_ptr<ThreadGroup> group,
                                                       int rank);

/// "rank 1 of 4: cause"
std::string describe(const RankFailure& failure, int world_size);

}  // namespace nanovllm
