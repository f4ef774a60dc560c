#include "server/openapi.h"

#include <span>

#include <nlohmann/json.hpp>

#include "core/sampling_fields.h"
#include "io/request_json.h"
#include "server/openai/fields.h"

namespace nanovllm::server {
namespace {

/// Facts of a path beside its method.
struct Description {
  std::string_view path, summary;
  std::span<const Field> fields{};
  std::string_view required{};
  bool takes_chat_fields = false, takes_sampling = false, may_stream = false;
};

constexpr Description kDescriptions[] = {
    {"/v1/chat/completions", "An answer to a conversation", kChatFields, "messages", false, true,
     true},
    {"/v1/completions", "The continuation of a text", kCompletionFields, "prompt", false, true,
     true},
    {"/v1/responses", "OpenAI's Responses, without a store", kResponseFields, "input", true, true,
     true},
    {"/v1/responses/input_tokens", "The length of a response's prompt", kResponseFields, "input",
     true},
    {"/v1/messages", "Anthropic's Messages", kMessageFields, "messages", true, true, true},
    {"/v1/messages/count_tokens", "The length of a message's prompt", kMessageFields, "messages",
     true},
    {"/v1/chat/completions/render", "The tokens and parameters of a chat", kChatFields, "messages",
     false, true},
    {"/v1/completions/render", "The tokens and parameters of completions", kCompletionFields,
     "prompt", false, true},
    {"/v1/messages/render", "The tokens and parameters of a message", kMessageFields, "messages",
     true, true},
    {"/tokenize", "Token ids of a text, or of messages", kTokenizeFields},
    {"/detokenize", "The text of token ids", kDetokenizeFields, "tokens"},
    {"/tokenizer_info", "The special tokens and the chat template"},
    {"/v1/models", "The names of the model"},
    {"/v1/models/{id}", "One of them"},
    {"/health", "Whether requests are served"},
    {"/ping", "Whether requests are served"},
    {"/livez", "Whether the process is to be kept alive"},
    {"/metrics", "Prometheus' text format"},
    {"/version", "The version of the program"},
    {"/load", "The number of requests in work"},
    {"/openapi.json", "This document"},
    {"/engine/live", "What the scheduler and the KV cache look like, as events"},
    {"/abort_requests", "Ends the requests of these ids, or all", kAbortFields},
    {"/reset_prefix_cache", "Forgets all cached prefixes"},
};

std::string_view sampling_schema(std::string_view name) {
  for (const NumberField& field : kNumberFields)
    if (field.name == name) return R"({"type": "number", "nullable": true})";
  for (const std::string_view integer :
       {"top_k", "seed", "max_tokens", "min_tokens", "n", "logprobs", "prompt_logprobs",
        "truncate_prompt_tokens", "priority", "stream_interval"})
    if (integer == name) return R"({"type": "integer", "nullable": true})";
  for (const std::string_view flag :
       {"ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"})
    if (flag == name) return schemas::kBool;
  if (name == "stop")
    return R"({"anyOf": [{"type": "string"}, {"type": "array",
    "items": {"type": "string"}}], "nullable": true})";
  if (name == "cache_salt") return schemas::kText;
  if (name == "bad_words") return schemas::kTexts;
  if (name == "logit_bias" || name == "structured_outputs" || name == "response_format")
    return schemas::kObject;
  if (name == "stop_token_ids" || name == "allowed_token_ids")
    return R"({"type": "array", "items": {"type": "integer"}, "nullable": true})";
  return "{}";
}

Json request_schema(const Description& description) {
  Json properties = Json::object();
  const auto add = [&](std::string_view name, std::string_view schema) {
    if (!properties.contains(name)) properties[std::string(name)] = Json::parse(schema);
  };
  for (const Field& field : description.fields) add(field.name, field.schema);
  if (description.takes_chat_fields || description.takes_sampling)
    for (const Field& field : kCommonFields) add(field.name, field.schema);
  if (description.takes_chat_fields)
    for (const Field& field : kChatFields)
      if (field.name != "messages") add(field.name, field.schema);
  if (description.takes_sampling)
    for (const std::string& name : sampling_params_names()) add(name, sampling_schema(name));
  Json schema = {{"type", "object"}, {"properties", std::move(properties)}};
  if (!description.required.empty()) schema["required"] = {description.required};
  return schema;
}

}  // namespace

Json openapi(const std::vector<Operation>& operations, const std::string& version,
             const std::string& root_path) {
  Json paths = Json::object();
  const Json any = {{"application/json", {{"schema", Json::object()}}}};
  for (const auto& [method, path, is_open] : operations) {
    Description known{};
    for (const Description& description : kDescriptions)
      if (description.path == path) known = description;
    Json success = any;
    if (known.may_stream) success["text/event-stream"] = {{"schema", {{"type", "string"}}}};
    if (path == "/engine/live")
      success = {{"text/event-stream", {{"schema", {{"type", "string"}}}}}};
    if (path == "/metrics") success = {{"text/plain", {{"schema", {{"type", "string"}}}}}};
    Json operation = {
        {"summary", known.summary},
        {"responses",
         {{"200", {{"description", "The answer"}, {"content", std::move(success)}}},
          {"4XX", {{"description", "What is wrong with the request"}, {"content", any}}},
          {"503", {{"description", "Not now"}, {"content", any}}}}}};
    if (!known.fields.empty())
      operation["requestBody"] = {
          {"required", true},
          {"content", {{"application/json", {{"schema", request_schema(known)}}}}}};
    if (path.ends_with("{id}"))
      operation["parameters"] = Json::array(
          {{{"name", "id"}, {"in", "path"}, {"required", true}, {"schema", {{"type", "string"}}}}});
    if (is_open) operation["security"] = Json::array();
    paths[path][method == "GET" ? "get" : "post"] = std::move(operation);
  }
  return {{"openapi", "3.0.3"},
          {"info", {{"title", "nano-vllm.cpp"}, {"version", version}}},
          {"servers", Json::array({{{"url", root_path.empty() ? "/" : root_path}}})},
          {"security", Json::array({{{"bearer", Json::array()}}, {{"key", Json::array()}}})},
          {"components",
           {{"securitySchemes",
             {{"bearer", {{"type", "http"}, {"scheme", "bearer"}}},
              {"key", {{"type", "apiKey"}, {"in", "header"}, {"name", "X-Api-Key"}}}}}}},
          {"paths", std::move(paths)}};
}

}  // namespace nanovllm::server
