// The envelope of every error, as OpenAI's and vLLM's clients read it.
#pragma once

#include <string>
#include <string_view>

#include "nanovllm/error.h"

#include "io/json.h"
#include "server/http/http.h"

namespace nanovllm::server {

/// The API whose envelope an endpoint's errors have.
enum class ErrorStyle {
  openai,     ///< {"error": {"message", "type", "param", "code"}}, with vLLM's types
  anthropic,  ///< {"type": "error", "error": {"type", "message"}}
};
/// Anthropic's under /v1/messages.
ErrorStyle error_style(std::string_view path);

/// The envelope with the type that belongs to the status; messages are cut to 1,024 bytes. An empty
/// `param` is null.
HttpResponse error_response(int status, std::string_view message, std::string_view param = {},
                            ErrorStyle style = ErrorStyle::openai);
/// The status that an Error of this kind is answered with.
int status_of(ErrorKind kind);
/// The envelope alone, without line ends.
std::string error_body(int status, std::string_view message, std::string_view param = {},
                       ErrorStyle style = ErrorStyle::openai);

}  // namespace nanovllm::server
