#include "cli/terminal/progress.h"

#include <algorithm>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cli/terminal/output.h"
#include "core/seconds.h"

namespace nanovllm::cli {
namespace {

std::string clock_time(double s) {
  const auto whole = static_cast<int64_t>(s + 0.5);
  if (whole >= 3600)
    return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

size_t terminal_columns() {
  winsize size{};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

}  // namespace

Progress::Progress(bool quiet) : active_(!quiet && takes_escapes(STDERR_FILENO)) {}

Progress::~Progress() {
  clear();
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (clock_.joinable()) clock_.join();
}

/// The first line of another kind is due at once, others five times a second.
bool Progress::due(Line line) {
  const auto now = Clock::now();
  if (!active_ || (line == last_ && to_seconds(now - last_shown_) < 0.2)) return false;
  last_ = line;
  last_shown_ = now;
  return true;
}

void Progress::show(std::vector<std::string> parts) {
  const std::lock_guard lock(mutex_);
  if (parts_.empty()) shown_since_ = Clock::now();
  parts_ = std::move(parts);
  draw();
  if (!clock_.joinable()) clock_ = std::thread([this] { tick(); });
  changed_.notify_all();
}

/// As many parts as there are columns for: a line that wraps would not be taken away again.
void Progress::draw() const {
  const size_t columns = terminal_columns();
  const double seconds = to_seconds(Clock::now() - shown_since_);
  std::string line = seconds < 1 ? "" : clock_time(seconds) + " ";
  line += parts_.front().substr(0, columns > line.size() ? columns - 1 - line.size() : 0);
  for (size_t i = 1; i < parts_.size(); ++i)
    if (line.size() + 2 + parts_[i].size() < columns) line += ", " + parts_[i];
  say("\r\x1b[K" + line);
}

void Progress::tick() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    if (parts_.empty())
      changed_.wait(lock);
    else if (changed_.wait_for(lock, std::chrono::seconds(1)) == std::cv_status::timeout &&
             !parts_.empty())
      draw();
  }
}

void Progress::loading(const char* what, int64_t done, int64_t total) {
  if (!due(Line::loading)) return;
  show({total > 0 ? fmt::format("{} {} %", what, 100 * done / total) : std::string(what)});
}

void Progress::reading(const LLM& llm) {
  if (!due(Line::reading)) return;
  std::vector<std::string> parts = {"reading the prompt"};
  for (const SequenceSnapshot& s : llm.snapshot(1).running)
    parts.push_back(fmt::format("{} of {} tokens",
                                std::min(s.num_computed_tokens, s.num_prompt_tokens),
                                s.num_prompt_tokens));
  show(std::move(parts));
}

void Progress::update(const EngineStats& stats, int64_t done, int64_t total) {
  if (!due(Line::batch)) return;
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
  std::vector<std::string> parts = {total >= 0 ? fmt::format("{}/{} requests", done, total)
                                               : fmt::format("{} requests done", done)};
  const std::string prompts = fmt::format("prompts {:.0f} tok/s", prefill_rate_);
  const bool reads_only = decode_rate_ < 0.5 && prefill_rate_ > 0;  // what a narrow line has to say
  parts.push_back(reads_only ? prompts : fmt::format("{:.0f} tok/s", decode_rate_));
  if (total > 0 && done > 0)
    parts.push_back(clock_time(to_seconds(now - start_) / double(done) * double(total - done)) +
                    " left");
  if (!reads_only) parts.push_back(prompts);
  parts.push_back(fmt::format("{} running", stats.running));
  show(std::move(parts));
}

void Progress::clear() {
  const std::lock_guard lock(mutex_);
  if (parts_.empty()) return;
  parts_.clear();
  say("\r\x1b[K");
}

}  // namespace nanovllm::cli
