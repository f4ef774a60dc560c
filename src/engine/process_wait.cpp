#include "engine/process_wait.h"

#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>

#include "comm/process_group.h"
#include "comm/stopped_ranks.h"

namespace nanovllm {
namespace {

constexpr std::chrono::milliseconds kLook{500}, kStopped{7'000};

[[noreturn]] void end_wait(const std::string& what, const char* how) {
  const ProcessPlace place = process_place();
  end_process(fmt::format("rank {} of {} has waited {} for {}: {}", place.rank, place.count, how,
                          what, describe_missing_ranks()));
}

}  // namespace

void end_process(const std::string& why) {
  fmt::print(stderr, "error: {}\n", why);
  std::_Exit(EXIT_FAILURE);
}

WaitForProcesses::WaitForProcesses(std::string what, std::chrono::milliseconds patience)
    : what_(std::move(what)),
      alarm_(patience, [this] { end_wait(what_, "too long"); }),
      looks_([this] { look_for_stopped_ranks(); }) {
  alarm_.set();
}

WaitForProcesses::~WaitForProcesses() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  looks_.join();
}

bool WaitForProcesses::ends_within(std::chrono::milliseconds duration) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, duration, [&] { return ends_; });
}

// Looks are counted, not seconds: where all ranks are stopped and go on together, none has been
// missing.
void WaitForProcesses::look_for_stopped_ranks() {
  const auto patience = kStopped + lateness(process_place().rank);
  std::vector<int> before;
  for (std::chrono::milliseconds stopped{0}; !ends_within(kLook);) {
    const std::vector<int> now = stopped_ranks();
    stopped = !now.empty() && now == before ? stopped + kLook : std::chrono::milliseconds(0);
    before = now;
    if (stopped < patience) continue;
    end_wait(what_, "7 s");
  }
}

}  // namespace nanovllm
