#include "comm/thread_group.h"

#include <algorithm>
#include <cstring>

#include "comm/sum.h"
#include "core/seconds.h"

namespace nanovllm {

std::string describe(const RankFailure& failure, int world_size) {
  return fmt::format("rank {} of {}: {}", failure.rank, world_size, failure.cause);
}

ThreadGroup::ThreadGroup(int world_size, std::chrono::milliseconds patience)
    : patience_(patience),
      rounds_of_(static_cast<size_t>(world_size)),
      shown_(static_cast<size_t>(world_size)) {}

void ThreadGroup::throw_failure() const {
  if (failure_) throw Error(failure_->kind, describe(*failure_, world_size()));
}

void ThreadGroup::barrier(int rank) {
  // A little spinning saves two context switches where the others are about to come.
  constexpr int kSpins = 400;
  std::unique_lock lock(mutex_);
  throw_failure();
  const uint64_t round = round_;
  ++rounds_of_[static_cast<size_t>(rank)];
  if (++num_arrived_ == world_size()) {
    num_arrived_ = 0;
    round_.store(round + 1, std::memory_order_release);
    lock.unlock();
    changed_.notify_all();
    return;
  }
  lock.unlock();
  for (int i = 0; i < kSpins; ++i)
    if (round_.load(std::memory_order_acquire) != round) return;
  lock.lock();
  const bool woken =
      changed_.wait_for(lock, patience_, [&] { return round_ != round || failure_.has_value(); });
  if (!woken) {
    const auto missing =
        std::find(rounds_of_.begin(), rounds_of_.end(), round) - rounds_of_.begin();
    fail_locked(
        {static_cast<int>(missing), ErrorKind::engine,
         fmt::format("hangs: the other ranks have waited {:.1f} s for it", to_seconds(patience_))});
  }
  if (round_ == round) throw_failure();
}

void ThreadGroup::fail_locked(RankFailure failure) {
  if (failure_) return;
  failure_ = std::move(failure);
  changed_.notify_all();
  for (const auto& wake : wake_) wake();
}

void ThreadGroup::fail(RankFailure failure) noexcept {
  const std::lock_guard lock(mutex_);
  fail_locked(std::move(failure));
}

std::optional<RankFailure> ThreadGroup::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void ThreadGroup::on_failure(std::function<void()> wake) {
  const std::lock_guard lock(mutex_);
  if (failure_) return wake();
  wake_.push_back(std::move(wake));
}

namespace {

class ThreadCommunicator final : public Communicator, public RankFusions {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return group_->world_size(); }
  RankFusions& fusions() override { return *this; }

  /// Nothing is gained, but this is how GPUs go.
  int64_t rows_worth_halving() const override { return 32; }

  // Every rank sums its share of the elements, out of all ranks' tensors and back into all of them:
  // no element has two writers, and none is read after it was written.
  void all_reduce(Tensor x) override {
    check(x.contiguous(), "all_reduce of strided {}", x);
    meet(x.data);
    dispatch_float(x.dtype, [&]<class T>() {
      const std::vector<T*> ranks = shown<T>();
      const int64_t n = x.numel(), begin = n * rank_ / world_size(),
                    end = n * (rank_ + 1) / world_size();
      T* const own = ranks[static_cast<size_t>(rank_)];
      sum_ranks<T>(own, ranks, begin, end);
      for (T* other : ranks)
        if (other != own && begin < end)
          std::memcpy(static_cast<void*>(other + begin), own + begin,
                      static_cast<size_t>(end - begin) * sizeof(T));
    });
    group_->barrier(rank_);
  }

  void all_gather(Tensor out, Tensor parts) override {
    const int64_t t = parts.shape[1], n = parts.shape[2], m = out.shape[1];
    check(out.contiguous() && parts.contiguous() && out.dtype == parts.dtype && out.shape[0] == t,
          "all_gather of {} to {}", parts, out);
    meet(parts[rank_].data);
    const auto size = static_cast<int64_t>(size_of(out.dtype));
    for (int r = 0; r < world_size(); ++r) {
      const int64_t width = std::clamp<int64_t>(m - r * n, 0, n) * size;
      const auto* from = static_cast<const std::byte*>(group_->shown_by(r));
      for (int64_t row = 0; row < t && width > 0; ++row)
        std::memcpy(out.data + (row * m + r * n) * size, from + row * n * size,
                    static_cast<size_t>(width));
    }
    group_->barrier(rank_);
  }

 private:
  void meet(void* pointer) {
    group_->show(rank_, pointer);
    group_->barrier(rank_);
  }
  template <class T>
  std::vector<T*> shown() const {
    std::vector<T*> pointers;
    for (int r = 0; r < world_size(); ++r) pointers.push_back(static_cast<T*>(group_->shown_by(r)));
    return pointers;
  }

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
};

}  // namespace

std::unique_ptr<Communicator> make_thread_communicator(std::shared_ptr<ThreadGroup> group,
                                                       int rank) {
  return std::make_unique<ThreadCommunicator>(std::move(group), rank);
}

}  // namespace nanovllm
