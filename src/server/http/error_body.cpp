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

}  // namespace

int status_of(ErrorKind kind) {
  return kind == ErrorKind::invalid_argument ? 400 : kind == ErrorKind::unavailable ? 503 : 500;
}

void append_json(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) >= 0x20) {
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else {
      out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
    }
  }
  out += '"';
}

std::string error_body(int status, std::string_view message, std::string_view param) {
  constexpr size_t kMost = 1024;
  std::string_view shown = message.substr(0, kMost);
  while (find_invalid_utf8(shown) != std::string_view::npos) shown.remove_suffix(1);
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

HttpResponse error_response(int status, std::string_view message, std::string_view param) {
  HttpResponse response{.status = status, .body = error_body(status, message, param)};
  if (status == 503 || status == 429) response.headers.emplace_back("Retry-After", "1");
  if (status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

}  // namespace nanovllm::server
