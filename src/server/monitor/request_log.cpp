#include "server/monitor/request_log.h"

#include <chrono>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "io/json.h"

namespace nanovllm::server {
namespace {

/// As "2026-11-25T12:34:56.789Z".
std::string now() {
  const auto time = std::chrono::system_clock::now();
  const auto since = std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch());
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(time)), since.count() % 1000);
}

}  // namespace

std::string request_line(const RequestLine& line, bool json) {
  const auto& g = line.generated;
  const auto model = g ? g->model.substr(0, 64) : std::string_view();
  if (!json) {
    std::string text = fmt::format("{} {} {}", line.status, line.method, line.path);
    if (g)
      text += fmt::format(" id={} model={} prompt={} completion={} cached={} {:.3f}s", g->id,
                          quote(model), g->prompt_tokens, g->completion_tokens, g->cached_tokens,
                          g->seconds);
    return text;
  }
  Json out = {
      {"time", now()}, {"status", line.status}, {"method", line.method}, {"path", line.path}};
  if (g)
    out.update({{"id", g->id},
                {"model", model},
                {"prompt_tokens", g->prompt_tokens},
                {"completion_tokens", g->completion_tokens},
                {"cached_tokens", g->cached_tokens},
                {"seconds", g->seconds}});
  return dump_json(out);
}

std::string json_note(std::string_view note) {
  return dump_json({{"time", now()}, {"note", note}});
}

}  // namespace nanovllm::server
