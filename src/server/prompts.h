// From a body to the tokens of its prompts: what generations begin with, and the endpoints that end
// there. All of it may be called from any thread.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "nanovllm/llm.h"

#include "server/http/error_body.h"
#include "server/openai/request.h"

namespace nanovllm::server {

struct ServerOptions;

/// The token ids of each of a request's prompts; of a chat, `request` then says all that its answer
/// asks of the engine and of the parser. Throws Error(invalid_argument) where one leaves no room
/// for the answer that was asked for, or the engine would refuse it.
std::vector<std::vector<int32_t>> tokenize_prompts(GenerationRequest& request,
                                                   const RequestDefaults& defaults, const LLM& llm);

/// The error that a reader threw, as an answer; `body` is what it read.
HttpResponse refusal(std::exception_ptr error, const Json& body, ErrorStyle style);

/// 32 hexadecimal digits.
std::string random_id();
/// Limits of a request's body; a million values are the ids of many long prompts.
JsonLimits body_limits(const ServerOptions& options);

HttpResponse json_response(const Json& json);

// The endpoints. Each throws as readers do.
HttpResponse tokenize(const Json& body, const RequestDefaults& defaults, const LLM& llm);
HttpResponse render_chat(const Json& body, const RequestDefaults& defaults, const LLM& llm);
HttpResponse render_completion(const Json& body, const RequestDefaults& defaults, const LLM& llm);
HttpResponse render_message(const Json& body, const RequestDefaults& defaults, const LLM& llm);
HttpResponse count_tokens(const Json& body, const RequestDefaults& defaults, const LLM& llm);
HttpResponse count_input_tokens(const Json& body, const RequestDefaults& defaults, const LLM& llm);
HttpResponse detokenize(const Json& body, const RequestDefaults& defaults, const LLM& llm);

}  // namespace nanovllm::server
