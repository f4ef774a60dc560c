#include "server/monitor/engine_watch.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>

#include <fmt/format.h>

namespace nanovllm::server {

void EngineWatch::look(const AsyncLLM* llm) {
  const bool hangs =
      llm && options_.watchdog_timeout > 0 && llm->seconds_in_step() > options_.watchdog_timeout;
  if (hangs == is_hanging_) return;
  is_hanging_ = hangs;
  log_.note(hangs ? why_hanging() + ": /health answers 503" : "the engine goes on");
}

std::string EngineWatch::why_hanging() const {
  return fmt::format("the engine has finished no step for {} s", options_.watchdog_timeout);
}

std::jthread EngineWatch::watch_end() const {
  if (!options_.give_up || options_.watchdog_timeout <= 0) return {};
  const std::chrono::duration<double> time(is_hanging_ ? 0 : options_.watchdog_timeout);
  const auto watch = [this, time](const std::stop_token& ended) {
    std::mutex mutex;
    std::condition_variable_any wake;
    std::unique_lock lock(mutex);
    wake.wait_for(lock, ended, time, [] { return false; });
    if (!ended.stop_requested()) options_.give_up(why_hanging());
  };
  try {
    return std::jthread(watch);
  } catch (const std::system_error&) {  // no more threads: then the end is awaited
    return {};
  }
}

}  // namespace nanovllm::server
