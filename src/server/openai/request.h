// The bodies of /v1/chat/completions and /v1/completions, read and checked.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nanovllm/llm.h"

#include "io/json.h"

namespace nanovllm::server {

struct GenerationRequest {
  bool is_chat = false;
  std::string model;            ///< as the client wrote it
  std::vector<Prompt> prompts;  ///< of completions, as given; of a chat, its one rendering
  std::string messages, template_options;  ///< JSON, of a chat
  SamplingParams params;
  std::optional<int64_t> max_tokens;  ///< where the client named one
  bool stream = false, include_usage = false, continuous_usage = false;
  bool echo = false, return_token_ids = false;
  std::vector<std::string> ignored;  ///< fields that we do not know
};

/// What a body's fields are read against.
struct RequestDefaults {
  std::vector<std::string> model_names;  ///< the first is ours; an empty `model` is that one
  SamplingParams params;                 ///< with the model's generation_config.json
  int64_t max_model_len = 0;
};

/// Throws Error(invalid_argument) with a message that begins with the field at fault, and
/// UnknownModel.
GenerationRequest read_chat(const Json& body, const RequestDefaults& defaults);
GenerationRequest read_completion(const Json& body, const RequestDefaults& defaults);

/// 404 rather than 400.
struct UnknownModel : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The field of `body` that an error's message begins with; empty where it names none.
std::string field_at_fault(const Json& body, std::string_view message);

}  // namespace nanovllm::server
