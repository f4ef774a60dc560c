// The answers of /v1/chat/completions and /v1/completions, whole and streamed.
#pragma once

#include "server/answer_writer.h"

namespace nanovllm::server {

std::unique_ptr<AnswerWriter> make_completions_writer(const WriterContext& context);

}  // namespace nanovllm::server
