// /v1/responses, without a store: every request brings its whole conversation
// (https://platform.openai.com/docs/api-reference/responses).
#pragma once

#include "server/answer_writer.h"

namespace nanovllm::server {

GenerationRequest read_response(const Json& body, const RequestDefaults& defaults);
std::unique_ptr<AnswerWriter> make_response_writer(const WriterContext& context);

}  // namespace nanovllm::server
