// The log: one line a request, never its text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace nanovllm::server {

struct RequestLine {
  int status = 0;
  std::string_view method = "POST", path;  ///< a path that is not there is "other"
  /// Of a request to an endpoint that generates.
  struct Generated {
    std::string_view id, model;
    int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
    double seconds = 0;
  };
  std::optional<Generated> generated{};
};

/// "200 POST /v1/completions id=... prompt=5 ...", or the same as JSON with the time of day.
std::string request_line(const RequestLine& line, bool json);
/// {"time": ..., "note": ...}
std::string json_note(std::string_view note);

}  // namespace nanovllm::server
