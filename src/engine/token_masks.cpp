#include "engine/token_masks.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>

#include "core/check.h"
#include "engine/token_rules.h"

namespace nanovllm {
namespace {

constexpr int kMostThreads = 4;           // the caller's included
constexpr size_t kMasksWorthSharing = 8;  // each takes 5 to 50 us, waking a thread as long

/// The mask of the next token of a sequence with a grammar. Its stop tokens, where they may not be
/// sampled yet or shall be ignored, are left where the grammar has nothing else.
void fill_token_mask(Sequence& s, std::span<uint32_t> mask) {
  const bool too_early = s.num_generated() < s.params.min_tokens;
  try {
    s.matcher->fill_mask(mask);
    check(std::ranges::any_of(mask, std::identity()), "it allows no token");
    for (const int32_t id : s.stop_token_ids)
      if (too_early || (s.params.ignore_eos && !std::ranges::count(s.params.stop_token_ids, id)))
        mask[static_cast<size_t>(id) / 32] &= ~(1u << id % 32);
    if (std::ranges::none_of(mask, std::identity())) s.matcher->fill_mask(mask);
  } catch (const std::exception& error) {
    s.matcher_error = fmt::format("the grammar cannot go on: {}", error.what());
    std::ranges::fill(mask, ~0u);
  }
}

}  // namespace

/// Threads that do what the caller does beside it.
class TokenMasks::Pool {
 public:
  explicit Pool(int count) {
    for (int i = 0; i < count; ++i)
      threads_.emplace_back([this](const std::stop_token& end) { run(end); });
  }
  /// Calls `work` on this thread and on each of the others; returns when all have done it.
  void share(const std::function<void()>& work) {
    std::unique_lock lock(mutex_);
    work_ = &work;
    num_working_ = threads_.size();
    ++round_;
    wake_.notify_all();
    lock.unlock();
    work();
    lock.lock();
    done_.wait(lock, [this] { return num_working_ == 0; });
  }

 private:
  void run(const std::stop_token& end) {
    std::unique_lock lock(mutex_);
    for (int64_t seen = 0; wake_.wait(lock, end, [&] { return round_ > seen; });) {
      seen = round_;
      lock.unlock();
      (*work_)();
      lock.lock();
      if (--num_working_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::condition_variable done_;
  const std::function<void()>* work_ = nullptr;
  size_t num_working_ = 0;
  int64_t round_ = 0;
  std::vector<std::jthread> threads_;  // the first to go: they end, and are waited for
};

TokenMasks::TokenMasks(const StepLimits& limits) : words_(limits.token_mask_words) {}
TokenMasks::~TokenMasks() = default;

void TokenMasks::fill(const Plan& plan, const StepInput& input, std::byte* masks) {
  rows_.clear();
  for (const size_t i : input.sampling)
    if (plan.sequences[i].sequence->has_token_mask()) rows_.push_back(&plan.sequences[i]);
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < rows_.size(); i = next++) {
      const ScheduledSequence& s = *rows_[i];
      const auto words = static_cast<size_t>(words_);
      const std::span mask(reinterpret_cast<uint32_t*>(masks) + i * words, words);
      // The result for a sequence that has ended since it was planned is dropped.
      const bool counts =
          !s.sequence->is_finished() && s.sequence->num_preemptions == s.num_preemptions;
      if (counts && s.sequence->matcher)
        fill_token_mask(*s.sequence, mask);
      else
        std::ranges::fill(mask, ~0u);
      if (counts) keep_allowed_tokens(s, mask);
    }
  };
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const int others = std::min(kMostThreads, cores) - 1;
  if (rows_.size() < kMasksWorthSharing || others < 1) return work();
  if (!pool_) pool_ = std::make_unique<Pool>(others);
  pool_->share(std::ref(work));
}

}  // namespace nanovllm
