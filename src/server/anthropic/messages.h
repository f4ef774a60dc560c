// /v1/messages, as Anthropic's clients speak it (https://docs.anthropic.com/en/api/messages).
#pragma once

#include "server/answer_writer.h"

namespace nanovllm::server {

/// Of a body without `max_tokens`, as /v1/messages/count_tokens has it.
GenerationRequest read_message_prompt(const Json& body, const RequestDefaults& defaults);
GenerationRequest read_message(const Json& body, const RequestDefaults& defaults);
std::unique_ptr<AnswerWriter> make_message_writer(const WriterContext& context);

}  // namespace nanovllm::server
