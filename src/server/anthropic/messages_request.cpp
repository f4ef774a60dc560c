#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/json_object.h"
#include "server/anthropic/messages.h"

namespace nanovllm::server {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;

/// Claude Code puts a line with a hash of each request before its system prompt: with it no two
/// requests would share a prefix.
std::string without_billing_line(std::string text) {
  if (!text.starts_with("x-anthropic-billing-header:")) return text;
  const size_t end = text.find('\n');
  return end == text.npos ? "" : text.substr(end + 1);
}

/// The texts of a content that may have nothing else: a string, or blocks.
std::string text_of(const Json& content, const std::string& place, const char* between) {
  if (content.is_string()) return content.get<std::string>();
  check(content.is_array(), kBad, "{} must be a text or a list of blocks", place);
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string block = fmt::format("{}[{}]", place, i);
    check(content[i].is_object() && content[i].value("type", Json()) == "text", kBad,
          "{} must be a block of the type text: this server takes no other here", block);
    const std::string part = without_billing_line(text_field(content[i], "text", block));
    if (!text.empty() && !part.empty()) text += between;
    text += part;
  }
  return text;
}

/// A tool's result. References to tools, which a search for them gives, are their names: the
/// request has the tools themselves.
std::string result_of(const Json& block, const std::string& place) {
  Json content = block.value("content", Json());
  if (content.is_null()) return {};
  for (Json& part : content)
    if (part.is_object() && part.value("type", Json()) == "tool_reference")
      part = {{"type", "text"}, {"text", text_field(part, "tool_name", place)}};
  return text_of(content, place + ".content", "\n");
}

Json tool_call(const Json& block, const std::string& place) {
  const auto input = block.find("input");
  check(input != block.end() && input->is_object(), kBad, "{}.input must be an object", place);
  return {
      {"id", text_field(block, "id", place)},
      {"type", "function"},
      {"function", {{"name", text_field(block, "name", place)}, {"arguments", dump_json(*input)}}}};
}

/// Adds what one message says: itself, and before it the results of tools as messages of their own.
void add_blocks(Json& messages, const std::string& role, const Json& content,
                const std::string& place) {
  Json message = {{"role", role}}, parts = Json::array(), calls = Json::array();
  std::string reasoning;
  for (size_t i = 0; i < content.size(); ++i) {
    const Json& block = content[i];
    const std::string at = fmt::format("{}[{}]", place, i);
    check(block.is_object(), kBad, "{} must be an object", at);
    const std::string type = text_field(block, "type", at);
    if (type == "text") {
      parts.push_back({{"type", "text"}, {"text", text_field(block, "text", at)}});
    } else if (type == "tool_result" && role == "user") {
      messages.push_back({{"role", "tool"},
                          {"tool_call_id", text_field(block, "tool_use_id", at)},
                          {"content", result_of(block, at)}});
    } else if (type == "tool_use" && role == "assistant") {
      calls.push_back(tool_call(block, at));
    } else if (type == "thinking" && role == "assistant") {
      reasoning += text_field(block, "thinking", at);
    } else {
      check(type == "redacted_thinking" && role == "assistant", kBad,
            "{} has the type {}: this server takes text, and tool_use, tool_result and thinking "
            "where they belong",
            at, quote(type.substr(0, 64)));
    }
  }
  if (role == "user" && parts.empty() && !content.empty()) return;  // results of tools alone
  if (!reasoning.empty()) message["reasoning"] = std::move(reasoning);
  if (parts.size() == 1)
    message["content"] = parts[0]["text"];
  else
    message["content"] = parts.empty() ? Json("") : std::move(parts);
  if (!calls.empty()) message["tool_calls"] = std::move(calls);
  messages.push_back(std::move(message));
}

Json read_messages(const JsonObject& o) {
  const Json* given = o.find("messages");
  check(given != nullptr, kBad, "messages is missing: a list of at least one message");
  if (!given->is_array() || given->empty())
    o.refuse("messages", "a list of at least one message", *given);
  Json messages = Json::array();
  std::string system;
  if (const Json* text = o.find("system"))
    system = without_billing_line(text_of(*text, "system", ""));
  for (size_t i = 0; i < given->size(); ++i) {
    const std::string place = fmt::format("messages[{}]", i);
    const Json& message = (*given)[i];
    check(message.is_object(), kBad, "{} must be an object with a role", place);
    std::string role = text_field(message, "role", place);
    if (role == "ctx" || role == "msg") role = "user";  // Claude Code's own
    check(role == "user" || role == "assistant" || role == "system", kBad,
          "{} has the role {}: use user or assistant", place, quote(role.substr(0, 64)));
    const auto content = message.find("content");
    check(content != message.end(), kBad, "{} has no content", place);
    const std::string within = place + ".content";
    if (role == "system")
      system += text_of(*content, within, "");
    else if (content->is_array())
      add_blocks(messages, role, *content, within);
    else
      messages.push_back({{"role", role}, {"content", text_of(*content, within, "")}});
  }
  if (!system.empty())
    messages.insert(messages.begin(), Json{{"role", "system"}, {"content", system}});
  return messages;
}

Json read_tools(const JsonObject& o) {
  Json tools = Json::array();
  const Json* given = o.find("tools");
  if (!given) return tools;
  if (!given->is_array()) o.refuse("tools", "a list of tools", *given);
  for (size_t i = 0; i < given->size(); ++i) {
    const Json& tool = (*given)[i];
    const std::string place = fmt::format("tools[{}]", i);
    check(tool.is_object(), kBad, "{} must be an object", place);
    const Json type = tool.value("type", Json("custom"));
    check(type == "custom" || type.is_null(), kBad,
          "{} has a type of its own: this server runs no tools, leave it out", place);
    Json function = {{"name", text_field(tool, "name", place)}};
    for (const auto& [from, to] :
         {std::pair{"description", "description"}, std::pair{"input_schema", "parameters"},
          std::pair{"strict", "strict"}})
      if (tool.contains(from)) function[to] = tool[from];
    tools.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return tools;
}

void read_tool_choice(const JsonObject& choice, Json& chat) {
  const std::string type = choice.optional_string("type").value_or("");
  if (type == "tool")
    chat["tool_choice"] = {{"type", "function"},
                           {"function", {{"name", choice.optional_string("name").value_or("")}}}};
  else if (type == "any")
    chat["tool_choice"] = "required";
  else if (type == "auto" || type == "none")
    chat["tool_choice"] = type;
  else
    fail(kBad, "tool_choice.type must be auto, any, tool or none");
  if (choice.optional_bool("disable_parallel_tool_use") == true)
    chat["parallel_tool_calls"] = false;
}

void read_thinking(const JsonObject& o, Json& chat) {
  const auto thinking = o.optional_object("thinking");
  if (!thinking) return;
  const std::string type = thinking->optional_string("type").value_or("");
  check(type == "enabled" || type == "disabled" || type == "adaptive", kBad,
        "thinking.type must be enabled, disabled or adaptive");
  if (const auto budget = thinking->optional_integer("budget_tokens", 1, 1 << 30))
    chat["thinking_token_budget"] = *budget;
  Json& kwargs = chat["chat_template_kwargs"];
  if (kwargs.is_null()) kwargs = Json::object();
  if (type != "adaptive" && kwargs.is_object() && !kwargs.contains("enable_thinking"))
    kwargs["enable_thinking"] = type == "enabled";
}

void read_output_config(const JsonObject& o, Json& chat) {
  const auto config = o.optional_object("output_config");
  if (!config) return;
  if (const auto effort = config->optional_string("effort")) chat["reasoning_effort"] = *effort;
  const auto format = config->optional_object("format");
  if (!format) return;
  check(format->optional_string("type") == "json_schema" && format->find("schema"), kBad,
        "output_config.format must be {{\"type\": \"json_schema\", \"schema\": ...}}");
  chat["response_format"] = {
      {"type", "json_schema"},
      {"json_schema", {{"name", "answer"}, {"schema", *format->find("schema")}, {"strict", true}}}};
}

/// Whether a text of the assistant's stands last: the answer goes on with it.
bool ends_in_answer(const Json& messages) {
  if (messages.empty() || messages.back()["role"] != "assistant") return false;
  const Json& content = messages.back()["content"];
  return !messages.back().contains("tool_calls") && content.is_string() &&
         content.get_ref<const std::string&>().find_first_not_of(" \t\n\r") != std::string::npos;
}

/// The body as that of a chat; every field that the two have in common, and vLLM's, is left as it
/// is.
Json chat_of(const JsonObject& o) {
  // Left out, it would leave out the messages and tools of the requests before.
  check(!o.find("thread"), kBad,
        "thread is not supported: this server keeps no conversations, send all of it (in the SDK "
        "tool_runner(..., thread=False))");
  Json chat = without_fields(o.json(), kMessageFields);
  chat["messages"] = read_messages(o);
  if (ends_in_answer(chat["messages"])) chat.emplace("continue_final_message", true);
  if (const auto stop = o.optional_strings("stop_sequences")) chat["stop"] = *stop;
  if (Json tools = read_tools(o); !tools.empty()) chat["tools"] = std::move(tools);
  if (const auto choice = o.optional_object("tool_choice")) read_tool_choice(*choice, chat);
  read_thinking(o, chat);
  read_output_config(o, chat);
  return chat;
}

}  // namespace

GenerationRequest read_message_prompt(const Json& body, const RequestDefaults& defaults) {
  GenerationRequest request = read_chat(chat_of(JsonObject(body, "request body", kBad)), defaults);
  check(request.params.n == 1, kBad, "n is {}: a message has one answer", request.params.n);
  check(!request.params.prompt_logprobs, kBad, "prompt_logprobs: a message has no place for them");
  return request;
}

GenerationRequest read_message(const Json& body, const RequestDefaults& defaults) {
  GenerationRequest request = read_message_prompt(body, defaults);
  check(request.max_tokens.has_value(), kBad,
        "max_tokens is missing: the most tokens of the answer");
  return request;
}

}  // namespace nanovllm::server
