#include "server/endpoints.h"

#include "server/anthropic/messages.h"
#include "server/openai/completions_writer.h"
#include "server/openai/responses.h"

namespace nanovllm::server {

const GenerationEndpoint* find_generation_endpoint(std::string_view path) {
  static constexpr GenerationEndpoint kEndpoints[] = {
      {"/v1/chat/completions", "chatcmpl-", read_chat, make_completions_writer},
      {"/v1/completions", "cmpl-", read_completion, make_completions_writer},
      {"/v1/responses", "resp_", read_response, make_response_writer},
      {"/v1/messages", "msg_", read_message, make_message_writer, ErrorStyle::anthropic},
  };
  for (const GenerationEndpoint& endpoint : kEndpoints)
    if (endpoint.path == path) return &endpoint;
  return nullptr;
}

}  // namespace nanovllm::server
