#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/json_object.h"
#include "server/openai/responses.h"

namespace nanovllm::server {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

void refuse_what_needs_a_store(const JsonObject& o) {
  for (const char* name : {"previous_response_id", "conversation", "prompt"})
    check(!o.find(name), kBad,
          "{} needs a store, and this server keeps none: send the whole conversation as input",
          name);
  check(o.optional_bool("background") != true, kBad,
        "background needs a store, and this server keeps none: leave it out");
  const auto truncation = o.optional_string("truncation").value_or("disabled");
  check(truncation == "disabled", kBad, "truncation may be disabled only, got {}",
        quote(truncation.substr(0, 64)));
}

/// The name of a namespace's tool in a chat, which knows no namespaces: vLLM's.
std::string name_in_chat(const std::string& space, const std::string& name) {
  return space + "__" + name;
}

/// A content as a chat has it: a text, or parts of the type text.
Json content_of(const Json& content, const std::string& place) {
  if (content.is_string()) return content;
  check(content.is_array(), kBad, "{} must be a text or a list of parts", place);
  Json parts = Json::array();
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", place, i);
    check(content[i].is_object(), kBad, "{} must be an object", at);
    const std::string type = text_field(content[i], "type", at);
    const bool is_refusal = type == "refusal";
    check(is_refusal || type == "input_text" || type == "output_text" || type == "text" ||
              type == "reasoning_text" || type == "summary_text",
          kBad, "{} has the type {}: this server takes text alone", at, quote(type.substr(0, 64)));
    parts.push_back(
        {{"type", "text"}, {"text", text_field(content[i], is_refusal ? "refusal" : "text", at)}});
  }
  return parts.size() == 1 ? parts[0]["text"] : parts;
}

std::string joined(const Json& content) {
  if (content.is_string()) return content.get<std::string>();
  std::string text;
  for (const Json& part : content) text += part["text"].get_ref<const std::string&>();
  return text;
}

/// The model's words stand in several items, and in one message of a chat.
class ChatMessages {
 public:
  void add_system(const std::string& text) {
    messages.push_back({{"role", "system"}, {"content", text}});
  }
  void add(const Json& item, const std::string& place) {
    check(item.is_object(), kBad, "{} must be an object", place);
    const std::string type =
        item.contains("type") ? text_field(item, "type", place) : std::string("message");
    if (type == "message")
      add_message(item, place);
    else if (type == "function_call")
      add_call(item, place);
    else if (type == "function_call_output")
      messages.push_back(
          {{"role", "tool"},
           {"tool_call_id", text_field(item, "call_id", place)},
           {"content", content_of(item.value("output", Json()), place + ".output")}});
    else if (type == "reasoning")
      add_reasoning(item, place);
    else if (type == "item_reference")
      fail(kBad,
           "{} refers to an item of a store, and this server keeps none: send the item itself "
           "(clients do that where they are told store: false)",
           place);
    else if (type != "additional_tools")  // read_tools() has them
      fail(kBad,
           "{} has the type {}: this server takes message, function_call, function_call_output, "
           "reasoning and additional_tools",
           place, quote(type.substr(0, 64)));
  }

  Json messages = Json::array();

 private:
  Json& assistant() {
    if (messages.empty() || messages.back()["role"] != "assistant")
      messages.push_back({{"role", "assistant"}, {"content", ""}});
    return messages.back();
  }
  void add_message(const Json& item, const std::string& place) {
    const std::string role = text_field(item, "role", place);
    Json content = content_of(item.value("content", Json()), place + ".content");
    if (role != "assistant" || assistant()["content"] != "")
      messages.push_back({{"role", role}, {"content", std::move(content)}});
    else
      assistant()["content"] = std::move(content);
  }
  void add_call(const Json& item, const std::string& place) {
    Json& calls = assistant()["tool_calls"];
    if (calls.is_null()) calls = Json::array();
    std::string name = text_field(item, "name", place);
    if (item.contains("namespace") && !item["namespace"].is_null())
      name = name_in_chat(text_field(item, "namespace", place), name);
    calls.push_back(
        {{"id", text_field(item, "call_id", place)},
         {"type", "function"},
         {"function",
          {{"name", std::move(name)}, {"arguments", text_field(item, "arguments", place)}}}});
  }
  // Models read what they thought, or a summary of it; what is encrypted nobody here can read.
  void add_reasoning(const Json& item, const std::string& place) {
    for (const char* name : {"content", "summary"}) {
      const auto found = item.find(name);
      if (found == item.end() || !found->is_array() || found->empty()) continue;
      assistant()["reasoning"] = joined(content_of(*found, place + "." + name));
      return;
    }
  }
};

/// Whether the answer goes on with the input's last item: a message of the model's that was cut.
bool is_unfinished(const Json& input) {
  if (!input.is_array()) return false;
  const Json& item = input.back();
  const Json status = item.value("status", Json());
  return item.value("type", "message") == "message" && item["role"] == "assistant" &&
         (status == "incomplete" || status == "in_progress");
}

Json read_input(const JsonObject& o) {
  ChatMessages chat;
  if (const auto text = o.optional_string("instructions"); text && !text->empty())
    chat.add_system(*text);
  const Json* input = o.find("input");
  check(input != nullptr, kBad, "input is missing: a text, or a list of items");
  if (input->is_string()) {
    chat.messages.push_back({{"role", "user"}, {"content", *input}});
    return std::move(chat.messages);
  }
  if (!input->is_array() || input->empty()) o.refuse("input", "a text or a list of items", *input);
  for (size_t i = 0; i < input->size(); ++i) chat.add((*input)[i], fmt::format("input[{}]", i));
  check(!chat.messages.empty(), kBad, "input has no message");
  return std::move(chat.messages);
}

/// The tools as a chat has them: those of a namespace stand under a name that has both. Tools that
/// are no functions are left out: OpenAI runs most of them itself, and Codex names some in every
/// request. Those that work on something of the client's stay, to be refused.
class ChatTools {
 public:
  void add(const Json& tools, const std::string& place) {
    check(tools.is_array(), kBad, "{} must be a list", place);
    for (size_t i = 0; i < tools.size(); ++i)
      add_one(tools[i], fmt::format("{}[{}]", place, i), nullptr);
  }
  bool replaces = false;  // a tool that comes takes the place of the one of its name
  Json list = Json::array();
  std::set<std::string> left_out;               // their types
  std::map<std::string, NamespacedName> names;  // of tools of namespaces, by the name in the chat

 private:
  void add_one(Json tool, const std::string& place, const std::string* space) {
    const Json type = tool.is_object() ? tool.value("type", Json()) : Json();
    if (type == "namespace" && !space) {
      const std::string name = text_field(tool, "name", place);
      const Json& tools = tool["tools"];
      check(tools.is_array(), kBad, "{}.tools must be a list", place);
      for (size_t i = 0; i < tools.size(); ++i)
        add_one(tools[i], fmt::format("{}.tools[{}]", place, i), &name);
      return;
    }
    const bool is_kept = !type.is_string() || type == "function" || type == "mcp" ||
                         type == "file_search" || type == "code_interpreter";
    if (!is_kept) {
      left_out.insert(type.get<std::string>());
      return;
    }
    if (space && type == "function") {
      const std::string name = text_field(tool, "name", place);
      tool["name"] = name_in_chat(*space, name);
      names[name_in_chat(*space, name)] = {*space, name};
    }
    const Json name = tool.is_object() ? tool.value("name", Json()) : Json();
    const auto [known, is_new] = places_.try_emplace(dump_json(name), list.size());
    if (replaces && !is_new)
      list[known->second] = std::move(tool);
    else
      list.push_back(std::move(tool));
  }

  std::map<std::string, size_t> places_;  // in the list, by name
};

ChatTools read_tools(const JsonObject& o) {
  ChatTools tools;
  if (const Json* given = o.find("tools")) tools.add(*given, "tools");
  tools.replaces = true;
  const Json& input = *o.find("input");
  for (size_t i = 0; input.is_array() && i < input.size(); ++i)
    if (input[i].value("type", Json()) == "additional_tools")
      tools.add(input[i].value("tools", Json()), fmt::format("input[{}].tools", i));
  return tools;
}

void read_text_format(const JsonObject& o, Json& chat) {
  const auto text = o.optional_object("text");
  const auto format = text ? text->optional_object("format") : std::nullopt;
  if (!format) return;
  const std::string type = format->optional_string("type").value_or("");
  if (type == "json_schema") {
    Json schema = format->json();
    schema.erase("type");
    chat["response_format"] = {{"type", type}, {"json_schema", std::move(schema)}};
  } else {
    chat["response_format"] = {{"type", type}};
  }
}

void read_include(const JsonObject& o, Json& chat) {
  const auto include = o.optional_strings("include");
  const bool shows_logprobs =
      include && std::ranges::count(*include, "message.output_text.logprobs") > 0;
  if (shows_logprobs || o.optional_integer("top_logprobs", 0, 20).value_or(0) > 0)
    chat["logprobs"] = true;
}

/// `object` with the fields of `defaults` that it lacks.
Json completed(Json object, const Json& defaults) {
  for (const auto& [name, value] : defaults.items())
    if (Json& field = object[name]; field.is_null()) field = value;
  return object;
}

/// The fields of its request that the answer repeats: all that the specification has
/// (openresponses.org, ResponseResource), for clients with types look for each.
std::string echo_of(const Json& body, const GenerationRequest& request) {
  const auto given = [&](const char* name, const Json& otherwise = Json()) {
    const auto found = body.find(name);
    return found == body.end() || found->is_null() ? otherwise : *found;
  };
  Json max_tokens;
  if (request.max_tokens) max_tokens = *request.max_tokens;
  Json tools = given("tools", Json::array());
  for (Json& tool : tools)
    if (tool.is_object() && tool.value("type", Json()) == "function")
      tool = completed(std::move(tool),
                       {{"description", nullptr}, {"parameters", nullptr}, {"strict", false}});
  Json text = completed(given("text", Json::object()), {{"format", {{"type", "text"}}}});
  if (Json& format = text["format"]; format["type"] == "json_schema")
    format = completed(std::move(format), {{"description", nullptr}, {"strict", true}});
  const Json no_reasoning = {{"effort", nullptr}, {"summary", nullptr}};
  return dump_json({{"instructions", given("instructions")},
                    {"max_output_tokens", max_tokens},
                    {"max_tool_calls", given("max_tool_calls")},
                    {"metadata", given("metadata", Json::object())},
                    {"parallel_tool_calls", given("parallel_tool_calls", true)},
                    {"previous_response_id", nullptr},
                    {"prompt_cache_key", given("prompt_cache_key")},
                    {"reasoning", completed(given("reasoning", Json::object()), no_reasoning)},
                    {"safety_identifier", given("safety_identifier")},
                    {"service_tier", "default"},
                    {"store", false},
                    {"background", false},
                    {"temperature", request.params.temperature},
                    {"presence_penalty", request.params.presence_penalty},
                    {"frequency_penalty", request.params.frequency_penalty},
                    {"text", std::move(text)},
                    {"tool_choice", given("tool_choice", "auto")},
                    {"tools", std::move(tools)},
                    {"top_logprobs", request.params.logprobs.value_or(0)},
                    {"top_p", request.params.top_p},
                    {"truncation", "disabled"},
                    {"user", given("user")}});
}

}  // namespace

GenerationRequest read_response(const Json& body, const RequestDefaults& defaults) {
  const JsonObject o(body, "request body", kBad);
  refuse_what_needs_a_store(o);
  Json chat = without_fields(body, kResponseFields);
  for (const char* name : {"messages", "max_tokens", "logprobs", "response_format"})
    chat.erase(name);
  chat["messages"] = read_input(o);
  if (is_unfinished(*o.find("input")) && !joined(chat["messages"].back()["content"]).empty())
    chat["continue_final_message"] = true;
  if (const auto most = o.optional_integer("max_output_tokens", 1, kMaxTokens))
    chat["max_tokens"] = *most;
  read_text_format(o, chat);
  read_include(o, chat);
  if (const auto reasoning = o.optional_object("reasoning"))
    if (const auto effort = reasoning->optional_string("effort"))
      chat["reasoning_effort"] = *effort;
  ChatTools tools = read_tools(o);
  chat["tools"] = std::move(tools.list);
  GenerationRequest request = read_chat(chat, defaults);
  for (const std::string& type : tools.left_out) request.ignored.push_back("tools: " + type);
  check(request.params.n == 1, kBad, "n is {}: a response has one answer", request.params.n);
  check(!request.params.prompt_logprobs, kBad, "prompt_logprobs: a response has no place for them");
  request.namespaced = std::move(tools.names);
  request.echo_json = echo_of(body, request);
  return request;
}

}  // namespace nanovllm::server
