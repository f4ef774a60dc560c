// The envelope of every error, as OpenAI's and vLLM's clients read it.
#pragma once

#include <string>
#include <string_view>

#include "nanovllm/error.h"

#include "server/http/http.h"

namespace nanovllm::server {

/// {"error": {"message", "type", "param", "code"}} with the type that belongs to the status;
/// messages are cut to 1,024 bytes. An empty `param` is null.
HttpResponse error_response(int status, std::string_view message, std::string_view param = {});
/// The status that an Error of this kind is answered with.
int status_of(ErrorKind kind);
/// The envelope alone, without line ends.
std::string error_body(int status, std::string_view message, std::string_view param = {});

/// Appends `text`, which is UTF-8, as a JSON string with its quotes.
void append_json(std::string& out, std::string_view text);

}  // namespace nanovllm::server
