#include "ranks/process_wait.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#include <fmt/format.h>

#include "comm/process_group.h"
#include "comm/stopped_ranks.h"

namespace nanovllm {
namespace {

constexpr std::chrono::milliseconds kLook{500}, kStopped{6'000};

[[noreturn]] void end_wait(const std::string& what, const char* how) {
  const ProcessPlace place = process_place();
  end_process(fmt::format("rank {} of {} has waited {} for {}: {}", place.rank, place.count, how,
                          what, describe_missing_ranks()));
}

}  // namespace

void end_process(const std::string& why) {
  std::fputs(("error: " + why + "\n").c_str(), stderr);
  std::_Exit(EXIT_FAILURE);
}

WatchForStoppedRanks::WatchForStoppedRanks(std::string what, std::optional<int> only)
    : what_(std::move(what)) {
  if (process_place().count > 1) looks_ = std::thread([this, only] { look(only); });
}

WatchForStoppedRanks::~WatchForStoppedRanks() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (looks_.joinable()) looks_.join();
}

bool WatchForStoppedRanks::ends_within(std::chrono::milliseconds duration) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, duration, [&] { return ends_; });
}

// Looks are counted, not seconds: where all ranks are stopped and go on together, none has been
// missing.
void WatchForStoppedRanks::look(std::optional<int> only) {
  const auto patience = kStopped + lateness(process_place().rank);
  std::vector<int> before;
  for (std::chrono::milliseconds stopped{0}; !ends_within(kLook);) {
    std::vector<int> now = stopped_ranks();
    if (only) std::erase_if(now, [&](int rank) { return rank != *only; });
    stopped = !now.empty() && now == before ? stopped + kLook : std::chrono::milliseconds(0);
    before = std::move(now);
    if (stopped >= patience) end_wait(what_, "6 s");
  }
}

WaitForProcesses::WaitForProcesses(const std::string& what, std::chrono::milliseconds patience)
    : alarm_(patience, [what] { end_wait(what, "too long"); }) {
  alarm_.set();
}

}  // namespace nanovllm
