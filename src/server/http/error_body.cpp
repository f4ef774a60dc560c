#include "server/http/error_body.h"

#include <fmt/format.h>

#include "io/utf8.h"

namespace nanovllm::server {
namespace {

/// vLLM's names (vllm/entrypoints/openai); clients switch on the status first.
std::string_view type_of(int status) {
  switch (status) {
    case 401:
      return "AuthenticationError";
    case 403:
      return "PermissionDeniedError";
    case 404:
      return "NotFoundError";
    case 405:
    case 501:
      return "NotImplementedError";
    case 422:
      return "UnprocessableEntityError";
    case 429:
      return "RateLimitError";
    case 503:
      return "ServiceUnavailableError";
    default:
      return status >= 500 ? "InternalServerError" : "BadRequestError";
  }
}

/// Anthropic's names (https://docs.anthropic.com/en/api/errors).
std::string_view anthropic_type_of(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return status >= 500 ? "api_error" : "invalid_request_error";
  }
}

}  // namespace

ErrorStyle error_style(std::string_view path) {
  return path == "/v1/messages" || path.starts_with("/v1/messages/") ? ErrorStyle::anthropic
                                                                     : ErrorStyle::openai;
}

int status_of(ErrorKind kind) {
  return kind == ErrorKind::invalid_argument ? 400 : kind == ErrorKind::unavailable ? 503 : 500;
}

std::string error_body(int status, std::string_view message, std::string_view param,
                       ErrorStyle style) {
  constexpr size_t kMost = 1024;
  std::string_view shown = message.substr(0, kMost);
  while (find_invalid_utf8(shown) != std::string_view::npos) shown.remove_suffix(1);
  if (style == ErrorStyle::anthropic) {
    std::string body = fmt::format("{{\"type\":\"error\",\"error\":{{\"type\":\"{}\",\"message\":",
                                   anthropic_type_of(status));
    append_json(body, shown);
    return body + "}}";
  }
  std::string body = "{\"error\":{\"message\":";
  append_json(body, shown);
  body += fmt::format(",\"type\":\"{}\",\"param\":", type_of(status));
  if (param.empty())
    body += "null";
  else
    append_json(body, param.substr(0, 128));
  body += fmt::format(",\"code\":{}}}}}", status);
  return body;
}

HttpResponse error_response(int status, std::string_view message, std::string_view param,
                            ErrorStyle style) {
  HttpResponse response{.status = status, .body = error_body(status, message, param, style)};
  if (status == 503 || status == 429) response.headers.emplace_back("Retry-After", "1");
  if (status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

}  // namespace nanovllm::server
