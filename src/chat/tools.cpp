#include "chat/tools.h"

#include <algorithm>
#include <optional>

#include <nlohmann/json.hpp>

#include "chat/calls/call_reader.h"
#include "core/check.h"
#include "io/json_object.h"

namespace nanovllm {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;
constexpr size_t kMaxTools = 512, kMaxSchemaBytes = size_t{1} << 20;

/// OpenAI's rule, with Anthropic's and MCP's length: OpenAI's 64 is less than Claude Code's names
/// of servers and their tools.
bool is_tool_name(const std::string& name) {
  return !name.empty() && name.size() <= 128 && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  });
}

/// The object that has the name: {"function": {...}}, or the flat object itself.
const Json& function_of(const Json& json, const std::string& place) {
  check(json.is_object(), kBad, "{} must be an object", place);
  const JsonObject o(json, place, kBad);
  const auto type = o.optional_string("type");
  check(!type || *type == "function", kBad,
        "{} has the type {}: this server knows tools of type function alone", place,
        quote(type.value_or("")));
  const Json* function = o.find("function");
  return function ? *function : json;
}

}  // namespace

std::vector<Tool> read_tools(const Json& list) {
  check(list.is_array(), kBad, "tools must be a list");
  check(list.size() <= kMaxTools, kBad, "tools has {} entries: at most {} are allowed", list.size(),
        kMaxTools);
  std::vector<Tool> tools;
  size_t bytes = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string place = fmt::format("tools[{}]", i);
    const Json& json = function_of(list[i], place);
    const JsonObject o(json, place, kBad);
    Tool tool;
    tool.name = o.optional_string("name").value_or("");
    check(is_tool_name(tool.name), kBad,
          "{} must have a name of 1 to 128 letters, digits, dots, dashes and underscores", place);
    check(!has_tool(tools, tool.name), kBad, "{} has the name {} of another tool", place,
          tool.name);
    tool.description = o.optional_string("description").value_or("");
    if (const auto parameters = o.optional_object("parameters"))
      tool.parameters = parameters->json().dump();
    tool.strict = o.optional_bool("strict").value_or(false);
    bytes += tool.parameters.size();
    check(bytes <= kMaxSchemaBytes, kBad, "tools have more than {} bytes of parameters",
          kMaxSchemaBytes);
    tool.definition = Json{{"type", "function"}, {"function", json}}.dump();
    tools.push_back(std::move(tool));
  }
  return tools;
}

namespace {

std::string read_choice_name(const Json& choice, const std::vector<Tool>& tools) {
  const JsonObject o(function_of(choice, "tool_choice"), "tool_choice", kBad);
  std::string name = o.optional_string("name").value_or("");
  check(has_tool(tools, name), kBad, "tool_choice names {}, which is not among the tools",
        quote(name));
  return name;
}

ToolChoice read_allowed_tools(const JsonObject& o, const std::vector<Tool>& tools) {
  const auto nested = o.optional_object("allowed_tools");
  const Json& allowed = nested ? nested->json() : o.json();
  const Json mode = allowed.value("mode", Json()), list = allowed.value("tools", Json());
  check(mode == "auto" || mode == "required", kBad,
        "tool_choice: the mode must be auto or required");
  check(list.is_array() && !list.empty() && list.size() <= kMaxTools, kBad,
        "tool_choice: the allowed tools must be a list of 1 to {}", kMaxTools);
  ToolChoice result = read_tool_choice(mode, tools);
  for (const Json& tool : list) result.allowed.push_back(read_choice_name(tool, tools));
  return result;
}

}  // namespace

ToolChoice read_tool_choice(const Json& choice, const std::vector<Tool>& tools) {
  ToolChoice result;
  if (choice == "none") {
    result.kind = ToolChoice::none;
  } else if (choice == "required") {
    result.kind = ToolChoice::required;
  } else if (choice.is_object() && choice.value("type", Json()) == "allowed_tools") {
    return read_allowed_tools(JsonObject(choice, "tool_choice", kBad), tools);
  } else if (choice.is_object()) {
    result.kind = ToolChoice::named;
    result.name = read_choice_name(choice, tools);
  } else {
    check(choice == "auto", kBad,
          "tool_choice must be none, auto, required or {{\"type\": \"function\", \"function\": "
          "{{\"name\": ...}}}}, got {}",
          describe(choice));
  }
  const bool must = result.kind == ToolChoice::required || result.kind == ToolChoice::named;
  check(!must || !tools.empty(), kBad, "tool_choice asks for a call, but there are no tools");
  return result;
}

Json parameters_of(const Tool& tool, Json absent) {
  return tool.parameters.empty() ? std::move(absent) : parse_json(tool.parameters, "tools", kBad);
}

Tool with_names_alone(Tool tool) {
  const Json schema = parameters_of(tool, Json::object());
  const Json required = schema.value("required", Json()),
             others = schema.value("additionalProperties", Json());
  Json names = {{"type", "object"}}, properties = schema.value("properties", Json());
  for (Json& property : properties) property = Json::object();
  if (properties.is_object()) names["properties"] = std::move(properties);
  if (required.is_array()) names["required"] = required;
  if (others.is_boolean()) names["additionalProperties"] = others;
  tool.parameters = names.dump();
  return tool;
}

Json tools_for_template(const std::vector<Tool>& tools) {
  Json list = Json::array();
  for (const Tool& tool : tools) {
    if (!tool.definition.empty()) {
      list.push_back(parse_json(tool.definition, "tools", kBad));
      continue;
    }
    Json function = {{"name", tool.name}, {"description", tool.description}};
    function["parameters"] =
        parameters_of(tool, {{"type", "object"}, {"properties", Json::object()}});
    list.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return list;
}

namespace {

/// OpenAI's other names for a part that is text, which templates do not know.
void name_text_parts(Json& content) {
  for (Json& part : content) {
    const Json type = part.is_object() ? part.value("type", Json()) : Json();
    if (type == "input_text" || type == "output_text") part["type"] = "text";
    if (type == "refusal") part = {{"type", "text"}, {"text", part.value("refusal", Json())}};
  }
}

/// A content's texts; none if it has anything else.
std::optional<std::string> text_of(const Json& content) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) return std::nullopt;
  std::string text;
  for (const Json& part : content) {
    if (!part.is_object() || !part.contains("text") || !part["text"].is_string())
      return std::nullopt;
    text += (text.empty() ? "" : "\n") + part["text"].get<std::string>();
  }
  return text;
}

/// A call's arguments as templates take them. Those that a model wrote wrongly or that were cut off
/// come back with every later turn: as in vLLM the conversation goes on, with none in their place.
Json as_object(Json arguments) {
  if (arguments.is_string()) {
    try {
      arguments = parse_json(arguments.get<std::string>(), "arguments", kBad);
    } catch (const Error&) {
      arguments = Json::object();
    }
  }
  return arguments.is_object() ? std::move(arguments) : Json::object();
}

/// The developer is OpenAI's newer name for the system, which few templates know. As in vLLM all of
/// the system's words are one message then, the first: many templates take no other.
void merge_developer(Json& messages) {
  const auto is_from = [](const Json& m, const char* role) {
    return m.is_object() && m.value("role", Json()) == role;
  };
  bool has_developer = false;
  for (Json& message : messages)
    if (is_from(message, "developer")) {
      message["role"] = "system";
      has_developer = true;
    }
  if (!has_developer) return;
  std::string text;
  Json others = Json::array();
  for (const Json& message : messages) {
    if (!is_from(message, "system")) {
      others.push_back(message);
      continue;
    }
    const auto more = text_of(message.value("content", Json()));
    if (!more) return;  // the renderer says what is wrong with it
    if (!more->empty()) text += (text.empty() ? "" : "\n\n") + *more;
  }
  others.insert(others.begin(), Json{{"role", "system"}, {"content", text}});
  messages = std::move(others);
}

}  // namespace

void complete_messages(Json& messages) {
  if (!messages.is_array()) return;
  for (size_t i = 0; i < messages.size(); ++i) {
    Json& message = messages[i];
    const Json role = message.is_object() ? message.value("role", Json()) : Json();
    if ((role == "assistant" || role == "tool") &&
        (!message.contains("content") || message["content"].is_null()))
      message["content"] = "";  // as vLLM does: templates look into it
    if (message.is_object() && message.contains("content") && message["content"].is_array())
      name_text_parts(message["content"]);
    if (!message.is_object() || !message.contains("tool_calls")) continue;
    Json& calls = message["tool_calls"];
    if (calls.is_null() || calls.empty()) {  // templates ask whether there is the key
      message.erase("tool_calls");
      continue;
    }
    check(calls.is_array(), kBad, "messages[{}].tool_calls must be a list", i);
    for (size_t k = 0; k < calls.size(); ++k) {
      const std::string place = fmt::format("messages[{}].tool_calls[{}]", i, k);
      check(calls[k].is_object() && calls[k].contains("function") &&
                calls[k]["function"].is_object() && calls[k]["function"].contains("name") &&
                calls[k]["function"]["name"].is_string(),
            kBad, "{} must have a function with a name", place);
      Json& arguments = calls[k]["function"]["arguments"];
      arguments = as_object(std::move(arguments));
    }
  }
  merge_developer(messages);
}

bool has_tool(std::span<const Tool> tools, std::string_view name) {
  return std::ranges::find(tools, name, &Tool::name) != tools.end();
}

std::string json_escaped(std::string_view text) {
  std::string json;
  append_json(json, text);
  return json.substr(1, json.size() - 2);
}

}  // namespace nanovllm
