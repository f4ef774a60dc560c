#include "chat/structural_tag.h"

#include <algorithm>
#include <set>

#include <nlohmann/json.hpp>

#include "chat/schema_types.h"
#include "core/check.h"
#include "io/json.h"

namespace nanovllm {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;

std::string joined(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return text;
}

Json const_string(const std::string& text) { return {{"type", "const_string"}, {"value", text}}; }
Json json_schema(const Json& schema) { return {{"type", "json_schema"}, {"json_schema", schema}}; }
Json optional(Json content) { return {{"type", "optional"}, {"content", std::move(content)}}; }
Json sequence(Json elements) { return {{"type", "sequence"}, {"elements", std::move(elements)}}; }
Json tag(const std::string& begin, Json content, const std::string& end) {
  return {{"type", "tag"}, {"begin", begin}, {"content", std::move(content)}, {"end", end}};
}

/// One argument of a tool whose arguments are not one JSON object.
struct Argument {
  std::string name;
  Json schema;
  bool is_required = false;
};

/// References lead to the whole schema's definitions.
Json with_definitions(Json schema, const Json& root) {
  for (const char* group : {"$defs", "definitions"})
    if (schema.is_object() && root.contains(group)) schema[group] = root[group];
  return schema;
}

std::vector<Argument> arguments_of(const Json& schema) {
  std::vector<Argument> arguments;
  const auto properties = schema.find("properties");
  if (properties == schema.end() || !properties->is_object()) return arguments;
  const auto required = schema.find("required");
  for (const auto& [name, property] : properties->items()) {
    Argument argument{name, with_definitions(property, schema)};
    argument.is_required = required != schema.end() && required->is_array() &&
                           std::ranges::find(*required, Json(name)) != required->end();
    arguments.push_back(std::move(argument));
  }
  return arguments;
}

/// a=1, b="x": required arguments first, so that commas are simple.
Json keywords(const Json& schema) {
  std::vector<Argument> arguments = arguments_of(schema);
  std::stable_partition(arguments.begin(), arguments.end(),
                        [](const Argument& argument) { return argument.is_required; });
  const auto written = [](const Argument& argument, const char* before) {
    return sequence(
        Json::array({const_string(before + argument.name + "="), json_schema(argument.schema)}));
  };
  const auto rest = [&](Json& elements, size_t from) {
    for (size_t i = from; i < arguments.size(); ++i) {
      Json argument = written(arguments[i], ", ");
      elements.push_back(arguments[i].is_required ? argument : optional(std::move(argument)));
    }
  };
  if (arguments.empty()) return const_string("");
  Json ways = Json::array();
  const size_t firsts = arguments.front().is_required ? 1 : arguments.size();
  for (size_t first = 0; first < firsts; ++first) {
    Json elements = Json::array({written(arguments[first], "")});
    rest(elements, first + 1);
    ways.push_back(sequence(std::move(elements)));
  }
  if (firsts == 1 && arguments.front().is_required) return ways.front();
  return optional({{"type", "or"}, {"elements", std::move(ways)}});
}

/// One way of writing a bare value: a string as it is, anything else as JSON. The reader takes
/// quotes for a part of a string.
Json bare_way(const Json& way, const Argument& argument, const Tool& tool) {
  const Json& schema = resolved_schema(way, argument.schema);
  const std::set<std::string> types = types_of_schema(schema, argument.schema);
  if (!types.empty() && !types.contains("string"))
    return json_schema(with_definitions(schema, argument.schema));
  if (!schema.is_object()) return {{"type", "any_text"}};
  Json values = schema.value("enum", Json::array());
  if (schema.contains("const")) values = Json::array({schema["const"]});
  if (values.is_array() && !values.empty()) {
    for (Json& value : values)
      value = const_string(value.is_string() ? value.get<std::string>() : dump_json(value));
    return {{"type", "or"}, {"elements", std::move(values)}};
  }
  for (const auto& [keyword, value] : schema.items())
    for (const std::string_view free :
         {"pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf", "not", "$ref"})
      check(!tool.strict || keyword != free, kBad,
            "tools: {} is strict, and the {} of its argument {} cannot be enforced in the way that "
            "this model writes calls",
            tool.name, keyword, quote(argument.name));
  return {{"type", "any_text"}};
}

Json bare_value(const Argument& argument, const Tool& tool) {
  const Json& schema = resolved_schema(argument.schema, argument.schema);
  for (const char* list : {"anyOf", "oneOf"}) {
    if (!schema.is_object() || !schema.contains(list) || !schema[list].is_array()) continue;
    Json ways = Json::array();
    for (const Json& one : schema[list]) ways.push_back(bare_way(one, argument, tool));
    for (Json& way : ways)
      if (way["type"] == "any_text") return way;
    return {{"type", "or"}, {"elements", std::move(ways)}};
  }
  return bare_way(schema, argument, tool);
}

Json parameters(const Json& schema, const Tool& tool, bool has_lines) {
  Json elements = Json::array();
  const std::string line = has_lines ? "\n" : "";
  for (const Argument& argument : arguments_of(schema)) {
    Json parameter = tag("<parameter=" + argument.name + ">" + line, bare_value(argument, tool),
                         line + "</parameter>\n");
    elements.push_back(argument.is_required ? parameter : optional(std::move(parameter)));
  }
  return elements.empty() ? const_string("") : sequence(std::move(elements));
}

/// One tool's call. A tool without parameters takes none, as OpenAI's.
Json call_tag(const CallSyntax& syntax, const Tool& tool) {
  Json schema = parameters_of(tool, Json::object());
  if (schema.empty()) schema = {{"type", "object"}, {"additionalProperties", false}};
  Json content;
  switch (syntax.arguments) {
    case CallSyntax::json:
      content = json_schema(schema);
      break;
    case CallSyntax::keywords:
      content = keywords(schema);
      break;
    case CallSyntax::parameters:
    case CallSyntax::inline_parameters:
      content = parameters(schema, tool, syntax.arguments == CallSyntax::parameters);
      break;
  }
  return tag(joined({syntax.before_name, tool.name, syntax.after_name}), std::move(content),
             std::string(syntax.call_end));
}

/// Calls and nothing else.
Json forced(const CallSyntax& syntax, Json calls, bool parallel) {
  Json list = {{"type", "tags_with_separator"},
               {"tags", std::move(calls)},
               {"separator", syntax.separator},
               {"at_least_one", true},
               {"stop_after_first", !parallel}};
  if (syntax.block_begin.empty()) return list;
  return tag(std::string(syntax.block_begin), std::move(list), std::string(syntax.block_end));
}

/// Free text, and calls from their marks on.
Json triggered(const CallSyntax& syntax, std::span<const Tool> tools, Json calls, bool parallel) {
  Json triggers = Json::array();
  if (!syntax.trigger.empty())
    triggers.push_back(syntax.trigger);
  else
    for (const Tool& tool : tools)
      triggers.push_back(joined({syntax.before_name, tool.name, syntax.after_name}));
  if (!syntax.block_begin.empty())
    calls = Json::array({forced(syntax, std::move(calls), parallel)});
  return {{"type", "triggered_tags"},
          {"triggers", std::move(triggers)},
          {"tags", std::move(calls)},
          {"at_least_one", false},
          {"stop_after_first", !parallel}};
}

/// A block of reasoning, marks and, perhaps, the empty line behind it included, or nothing.
Json reasoning_block(const ReasoningFormat& reasoning) {
  return optional(
      sequence(Json::array({tag(std::string(reasoning.begin.front()), {{"type", "any_text"}},
                                std::string(reasoning.end.front())),
                            optional(const_string("\n\n"))})));
}

Json format_of(const StructuredOutputs& asked) {
  if (!asked.json.empty())
    return json_schema(parse_json(asked.json, "structured_outputs.json", kBad));
  if (!asked.regex.empty()) return {{"type", "regex"}, {"pattern", asked.regex}};
  if (!asked.grammar.empty()) return {{"type", "grammar"}, {"grammar", asked.grammar}};
  if (asked.json_object) return json_schema({{"type", "object"}});
  Json choices = Json::array();
  for (const std::string& text : asked.choice) choices.push_back(const_string(text));
  return {{"type", "or"}, {"elements", std::move(choices)}};
}

}  // namespace

std::string structure_after_reasoning(const StructuredOutputs& asked,
                                      const ReasoningFormat& reasoning) {
  const Json format = sequence(Json::array({reasoning_block(reasoning), format_of(asked)}));
  return Json{{"type", "structural_tag"}, {"format", format}}.dump();
}

std::string structural_tag(const ChatFormat& format, const CallConstraint& constraint) {
  const CallSyntax& syntax = format.tools->syntax;
  const bool is_automatic = constraint.choice.kind == ToolChoice::automatic;
  const bool is_free = is_automatic && !constraint.structure;
  if (is_free && syntax.trigger.empty() && !syntax.block_begin.empty()) {
    for (const Tool& tool : constraint.tools)
      check(!tool.strict, kBad,
            "tools: {} is strict, and no mark shows where this model's calls begin: ask for one "
            "with tool_choice, or leave strict out",
            tool.name);
    return {};
  }
  Json calls = Json::array();
  for (const Tool& tool : constraint.tools)
    if (constraint.choice.kind != ToolChoice::named || tool.name == constraint.choice.name)
      calls.push_back(call_tag(syntax, tool));
  const bool parallel = constraint.parallel && constraint.choice.kind != ToolChoice::named;
  Json answer = is_free ? triggered(syntax, constraint.tools, std::move(calls), parallel)
                        : forced(syntax, std::move(calls), parallel);
  if (is_automatic && constraint.structure)
    answer = {{"type", "or"},
              {"elements", Json::array({format_of(*constraint.structure), std::move(answer)})}};
  Json elements = Json::array();
  if (constraint.may_reason && format.reasoning)
    elements.push_back(reasoning_block(*format.reasoning));
  if (constraint.after_reasoning && !is_free) elements.push_back(optional(const_string("\n\n")));
  if (!elements.empty()) {
    elements.push_back(std::move(answer));
    answer = sequence(std::move(elements));
  }
  return Json{{"type", "structural_tag"}, {"format", std::move(answer)}}.dump();
}

}  // namespace nanovllm
