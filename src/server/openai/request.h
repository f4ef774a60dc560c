// The bodies of /v1/chat/completions and /v1/completions, read and checked.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nanovllm/llm.h"

#include "api/chat_prompts.h"
#include "chat/chat_parser.h"
#include "io/json_object.h"
#include "server/openai/fields.h"

namespace nanovllm::server {

/// Messages and what the chat template is told beside them.
struct Conversation {
  Json messages{}, template_options{};
  std::vector<Tool> tools{};
  std::shared_ptr<const ChatPrompts> chat{};  ///< the template
  bool add_special_tokens = false;            ///< beside those that the template spells out

  /// To be called once: messages may be long. Throws Error(invalid_argument) as
  /// LLM::chat_prompt() does.
  Prompt take_prompt();
};

/// A tool's name of /v1/responses, where tools may lie in a namespace.
struct NamespacedName {
  std::string space, name;
};

struct GenerationRequest {
  bool is_chat = false;
  std::string model;            ///< as the client wrote it
  std::vector<Prompt> prompts;  ///< of completions, as given; of a chat, its one rendering
  Conversation conversation;    ///< of a chat
  SamplingParams params;
  std::optional<int64_t> max_tokens;  ///< where the client named one
  bool stream = false, include_usage = false, continuous_usage = false;
  bool echo = false, return_token_ids = false;
  bool prompt_alone = false;  ///< an echo and no tokens
  ChatFormat format;          ///< of a chat: how its answers are read
  ChatParserOptions parser;   ///< likewise; known in full once the prompt is
  ToolChoice tool_choice;
  bool parallel_tool_calls = true;
  bool include_reasoning = true;
  bool tokens_as_ids = false;  ///< log probabilities name tokens as "token_id:5"
  std::string echo_json;       ///< of a response: what it repeats of its request
  std::map<std::string, NamespacedName> namespaced;  ///< of a response: its tools, by a call's name
  std::vector<std::string> ignored;  ///< fields that change nothing, and those that we do not know
};

/// The server's values that a body's fields are read against.
struct RequestDefaults {
  std::vector<std::string> model_names;  ///< the first is ours; an empty `model` is that one
  SamplingParams params;                 ///< with the model's generation_config.json
  int64_t max_model_len = 0;
  std::optional<int64_t> chat_max_tokens;   ///< generation_config.json's, of a chat that names none
  std::shared_ptr<const ChatPrompts> chat;  ///< the chat template
  bool trust_request_chat_template = false;
  ChatFormat format;
  std::string chat_template_kwargs = "{}";  ///< of requests that do not say otherwise
  bool force_include_usage = false;         ///< in each chunk, and at the stream's end
  bool enforce_auto_tool_arguments = true;  ///< a call that has begun is forced to be valid
};

/// 404 rather than 400.
struct UnknownModel : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The model that the body names, or ours. Throws UnknownModel.
std::string read_model(const JsonObject& o, const RequestDefaults& defaults);

/// Throws Error(invalid_argument) with a message that begins with the field at fault, and
/// UnknownModel.
GenerationRequest read_chat(const Json& body, const RequestDefaults& defaults);
GenerationRequest read_completion(const Json& body, const RequestDefaults& defaults);

/// The messages of a body and the fields that say how they are rendered. Throws
/// Error(invalid_argument) as above.
Conversation read_conversation(const JsonObject& o, const RequestDefaults& defaults);

/// `body`, an object, without the fields named: what another API's body has in common with a
/// chat's.
Json without_fields(const Json& body, std::span<const Field> fields);

/// A text that `object`, which lies at `place` of a body, must have. Throws
/// Error(invalid_argument).
std::string text_field(const Json& object, const char* name, const std::string& place);

/// The field of `body` that an error's message begins with; empty where it names none.
std::string field_at_fault(const Json& body, std::string_view message);

}  // namespace nanovllm::server
