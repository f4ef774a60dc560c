#include "cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include "cli/output.h"
#include "core/seconds.h"

namespace nanovllm::cli {
namespace {

std::string clock_time(double s) {
  const auto whole = static_cast<int64_t>(s + 0.5);
  if (whole >= 3600)
    return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

}  // namespace

Progress::Progress(bool quiet) : active_(!quiet && ::isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

bool Progress::due() {
  const auto now = Clock::now();
  if (!active_ || (last_shown_ && to_seconds(now - *last_shown_) < 0.2)) return false;
  last_shown_ = now;
  return true;
}

void Progress::show(const std::string& line) {
  say("\r\x1b[K" + line);
  shown_ = true;
}

void Progress::loading(const char* what, int64_t done, int64_t total) {
  if (!due()) return;
  show(total > 0 ? fmt::format("{} {} %", what, 100 * done / total) : std::string(what));
}

void Progress::update(const EngineStats& stats, int64_t done, int64_t total) {
  if (!due()) return;
  const auto now = Clock::now();
  if (!window_start_) {
    window_start_ = start_ = now;
    window_stats_ = stats;
  }
  const double window = to_seconds(now - *window_start_);
  if (window >= 1) {
    prefill_rate_ = double(stats.prompt_tokens - window_stats_.prompt_tokens) / window;
    decode_rate_ = double(stats.generated_tokens - window_stats_.generated_tokens) / window;
    window_start_ = now;
    window_stats_ = stats;
  }
  std::string line = total >= 0 ? fmt::format("{}/{} requests", done, total)
                                : fmt::format("{} requests done", done);
  line += fmt::format(", {} running, prefill {:.0f} tok/s, decode {:.0f} tok/s", stats.running,
                      prefill_rate_, decode_rate_);
  if (total > 0 && done > 0)
    line +=
        ", " + clock_time(to_seconds(now - start_) / double(done) * double(total - done)) + " left";
  show(line);
}

void Progress::clear() {
  if (!shown_) return;
  say("\r\x1b[K");
  shown_ = false;
}

}  // namespace nanovllm::cli
