// The fields that endpoints read, each with its JSON schema: what the readers know, and what
// /openapi.json says.
#pragma once

#include <span>
#include <string_view>

namespace nanovllm::server {

struct Field {
  std::string_view name, schema;
};

inline bool has_field(std::span<const Field> fields, std::string_view name) {
  for (const Field& field : fields)
    if (field.name == name) return true;
  return false;
}

namespace schemas {
inline constexpr std::string_view kBool = R"({"type": "boolean", "nullable": true})";
inline constexpr std::string_view kText = R"({"type": "string", "nullable": true})";
inline constexpr std::string_view kObject = R"({"type": "object", "nullable": true})";
inline constexpr std::string_view kCount = R"({"type": "integer", "minimum": 1, "nullable": true})";
inline constexpr std::string_view kTexts =
    R"({"type": "array", "items": {"type": "string"}, "nullable": true})";
inline constexpr std::string_view kObjects =
    R"({"type": "array", "items": {"type": "object"}, "nullable": true})";
inline constexpr std::string_view kMessages = R"({"type": "array", "minItems": 1,
  "items": {"type": "object", "required": ["role"], "properties": {
    "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
    "content": {"anyOf": [{"type": "string"},
      {"type": "array", "items": {"type": "object"}}]}}}})";
inline constexpr std::string_view kPrompt = R"({"anyOf": [{"type": "string", "minLength": 1},
  {"type": "array", "minItems": 1, "items": {"type": "string"}},
  {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
  {"type": "array", "minItems": 1, "items":
    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}}]})";
inline constexpr std::string_view kStreamOptions = R"({"type": "object", "nullable": true,
  "properties": {"include_usage": {"type": "boolean"},
    "continuous_usage_stats": {"type": "boolean"}}})";
}  // namespace schemas

/// Of both endpoints below.
inline constexpr Field kCommonFields[] = {{"model", schemas::kText},
                                          {"stream", schemas::kBool},
                                          {"stream_options", schemas::kStreamOptions},
                                          {"max_tokens", schemas::kCount},
                                          {"return_token_ids", schemas::kBool},
                                          {"return_tokens_as_token_ids", schemas::kBool},
                                          {"add_special_tokens", schemas::kBool}};

inline constexpr Field kChatFields[] = {
    {"messages", schemas::kMessages},
    {"max_completion_tokens", schemas::kCount},
    {"logprobs", schemas::kBool},
    {"top_logprobs", R"({"type": "integer", "minimum": 0, "maximum": 20})"},
    {"chat_template", schemas::kText},
    {"chat_template_kwargs", schemas::kObject},
    {"reasoning_effort", schemas::kText},
    {"documents", schemas::kObjects},
    {"add_generation_prompt", schemas::kBool},
    {"continue_final_message", schemas::kBool},
    {"thinking_token_budget", R"({"type": "integer", "minimum": -1, "nullable": true})"},
    {"tools", schemas::kObjects},
    {"tool_choice", "{}"},
    {"parallel_tool_calls", schemas::kBool},
    {"include_reasoning", schemas::kBool},
    {"modalities", schemas::kTexts}};

inline constexpr Field kCompletionFields[] = {
    {"prompt", schemas::kPrompt},
    {"logprobs", R"({"type": "integer", "minimum": 0, "maximum": 20})"},
    {"echo", schemas::kBool}};

// Fields that /v1/responses reads itself; all others are a chat's.
inline constexpr Field kResponseFields[] = {
    {"input", R"({"anyOf": [{"type": "string"},
      {"type": "array", "minItems": 1, "items": {"type": "object"}}]})"},
    {"instructions", schemas::kText},
    {"max_output_tokens", schemas::kCount},
    {"text", schemas::kObject},
    {"reasoning", schemas::kObject},
    {"include", schemas::kTexts},
    {"truncation", R"({"type": "string", "enum": ["disabled"]})"},
    {"max_tool_calls", schemas::kCount},
    {"background", R"({"type": "boolean", "enum": [false]})"},
    {"previous_response_id", R"({"nullable": true, "enum": [null]})"},
    {"conversation", R"({"nullable": true, "enum": [null]})"},
    {"prompt", R"({"nullable": true, "enum": [null]})"}};

// Fields that /v1/messages reads itself.
inline constexpr Field kMessageFields[] = {
    {"messages", R"({"type": "array", "minItems": 1, "items": {"type": "object",
      "required": ["role", "content"], "properties": {
        "role": {"type": "string", "enum": ["user", "assistant"]},
        "content": {"anyOf": [{"type": "string"},
          {"type": "array", "items": {"type": "object"}}]}}}})"},
    {"system", R"({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object",
      "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}}}}]})"},
    {"stop_sequences", schemas::kTexts},
    {"tools", schemas::kObjects},
    {"tool_choice", schemas::kObject},
    {"thinking", schemas::kObject},
    {"output_config", schemas::kObject}};

inline constexpr Field kTokenizeFields[] = {{"model", schemas::kText},
                                            {"prompt", schemas::kText},
                                            {"messages", schemas::kMessages},
                                            {"tools", schemas::kObjects},
                                            {"add_special_tokens", schemas::kBool},
                                            {"return_token_strs", schemas::kBool},
                                            {"chat_template", schemas::kText},
                                            {"chat_template_kwargs", schemas::kObject},
                                            {"add_generation_prompt", schemas::kBool},
                                            {"continue_final_message", schemas::kBool}};

inline constexpr Field kDetokenizeFields[] = {
    {"model", schemas::kText},
    {"tokens", R"({"type": "array", "items": {"type": "integer", "minimum": 0}})"}};

inline constexpr Field kAbortFields[] = {{"request_ids", schemas::kTexts}};

}  // namespace nanovllm::server
