// The loaded model as requests and clients see it.
#pragma once

#include <string>
#include <vector>

#include "nanovllm/llm.h"
#include "nanovllm/tokenizer.h"

#include "io/json.h"
#include "server/openai/request.h"
#include "server/server.h"

namespace nanovllm::server {

/// The names by which clients call the model; at least one.
std::vector<std::string> model_names(const ServerOptions& options);

/// The values that requests are read against. Throws Error(invalid_argument) for an unknown parser,
/// and as LLM does for generation_config.json or a broken template of the operator's.
RequestDefaults request_defaults(const ServerOptions& options, const LLM& llm);

/// An entry of /v1/models, with the fields of OpenAI's and of Anthropic's: clients of both read the
/// list under the same path. `created` is in seconds since 1970.
Json model_card(const ServerOptions& options, const std::string& name, const LLM& llm,
                int64_t created);

/// /tokenizer_info, as vLLM has it for clients without the model's files: the special tokens by
/// their names ("eos_token"), and the chat template.
Json tokenizer_info(const ServerOptions& options, const Tokenizer& tokenizer);

}  // namespace nanovllm::server
