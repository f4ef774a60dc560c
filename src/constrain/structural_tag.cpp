#include "constrain/structural_tag.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "constrain/ebnf_check.h"
#include "constrain/limits.h"
#include "core/check.h"
#include "io/json.h"
#include "io/json_object.h"

namespace nanovllm {
namespace {

struct Field {
  std::string_view name;
  enum class Value { text, texts, number, flag, format, formats, token, tokens, marks } value;
  bool required = false;
};
using V = Field::Value;

struct Format {
  std::string_view type;
  std::vector<Field> fields;
};

// Compiled parts (json_schema, regex, grammar) are handled on their own.
std::optional<Format> find_format(std::string_view type) {
  const std::vector<Format> formats = {
      {"const_string", {{"value", V::text, true}}},
      {"any_text", {{"excludes", V::texts}}},
      {"sequence", {{"elements", V::formats, true}}},
      {"or", {{"elements", V::formats, true}}},
      {"optional", {{"content", V::format, true}}},
      {"plus", {{"content", V::format, true}}},
      {"star", {{"content", V::format, true}}},
      {"repeat",
       {{"content", V::format, true}, {"min", V::number, true}, {"max", V::number, true}}},
      {"tag", {{"begin", V::marks, true}, {"content", V::format, true}, {"end", V::marks, true}}},
      {"triggered_tags",
       {{"triggers", V::texts, true},
        {"tags", V::formats, true},
        {"at_least_one", V::flag},
        {"stop_after_first", V::flag},
        {"excludes", V::texts}}},
      {"tags_with_separator",
       {{"tags", V::formats, true},
        {"separator", V::text, true},
        {"at_least_one", V::flag},
        {"stop_after_first", V::flag}}},
      {"token", {{"token", V::token, true}}},
      {"exclude_token", {{"exclude_tokens", V::tokens, true}}},
      {"any_tokens", {{"exclude_tokens", V::tokens}}},
      {"token_triggered_tags",
       {{"trigger_tokens", V::tokens, true},
        {"tags", V::formats, true},
        {"exclude_tokens", V::tokens},
        {"at_least_one", V::flag},
        {"stop_after_first", V::flag}}}};
  const auto found = std::ranges::find(formats, type, &Format::type);
  return found == formats.end() ? std::nullopt : std::optional(*found);
}

bool is_text(const Json& value) { return value.is_string(); }
bool is_token(const Json& value) { return value.is_string() || is_integer_in(value, 0, 1 << 30); }

class TagChecker {
 public:
  Json format(const Json& value, const std::string& path) {
    if (!value.is_object() || !value.contains("type") || !value["type"].is_string())
      refuse(path, "must be an object with a type");
    const std::string type = value["type"].get<std::string>();
    if (type == "json_schema") return compiled(schema(value, path));
    if (type == "regex") return compiled(regex(value, path));
    if (type == "grammar") {
      only_fields(value, path, {"grammar"});
      const std::string text = string_of(value, "grammar", path);
      check_ebnf(text, "structural_tag: " + path + "/grammar");
      return compiled(text);
    }
    const std::optional<Format> known = find_format(type);
    if (!known) refuse(path, "has the type " + quote(type) + ", which is not supported");
    Json out = Json::object();
    out["type"] = type;
    for (const Field& field : known->fields)
      if (field.required && !value.contains(field.name))
        refuse(path, "needs " + std::string(field.name));
    for (auto it = value.begin(); it != value.end(); ++it) {
      if (it.key() == "type") continue;
      const auto field = std::ranges::find(known->fields, it.key(), &Field::name);
      if (field == known->fields.end()) refuse(path + "/" + it.key(), "is not a field of " + type);
      out[it.key()] = checked(*it, field->value, path + "/" + it.key());
    }
    return out;
  }

  [[noreturn]] static void refuse(const std::string& path, const std::string& problem) {
    fail(ErrorKind::invalid_argument, "structural_tag: {} {}", path, problem);
  }

 private:
  static Json compiled(const std::string& ebnf) { return {{"type", "grammar"}, {"grammar", ebnf}}; }

  static std::string string_of(const Json& value, const char* field, const std::string& path) {
    if (!value.contains(field) || !value[field].is_string())
      refuse(path, std::string("needs ") + field + ", a string");
    return value[field].get<std::string>();
  }
  static void only_fields(const Json& value, const std::string& path,
                          std::initializer_list<std::string_view> names) {
    for (auto it = value.begin(); it != value.end(); ++it)
      if (it.key() != "type" && std::ranges::count(names, it.key()) == 0)
        refuse(path + "/" + it.key(), "is not supported");
  }

  static std::string schema(const Json& value, const std::string& path) {
    if (!value.contains("json_schema")) refuse(path, "needs json_schema");
    for (auto it = value.begin(); it != value.end(); ++it) {
      const bool neutral = (it.key() == "style" && *it == "json") ||
                           (it.key() == "any_order" && *it == false) ||
                           (it.key() == "excludes" && it->empty());
      if (it.key() != "type" && it.key() != "json_schema" && !neutral)
        refuse(path + "/" + it.key(), "is not supported");
    }
    try {
      return schema_to_ebnf(value["json_schema"].dump());
    } catch (const Error& error) {
      refuse(path + "/json_schema", error.what());
    }
  }
  static std::string regex(const Json& value, const std::string& path) {
    only_fields(value, path, {"pattern"});
    return regex_to_ebnf(string_of(value, "pattern", path), "structural_tag: " + path);
  }

  Json checked(const Json& value, V kind, const std::string& path) {
    const auto expect = [&](bool fits, const char* what) {
      if (!fits) refuse(path, std::string("must be ") + what + ", got " + describe(value));
    };
    switch (kind) {
      case V::text:
        expect(value.is_string(), "a string");
        return value;
      case V::texts:
        expect(value.is_array() && std::ranges::all_of(value, is_text), "a list of strings");
        return value;
      case V::number:
        expect(is_integer_in(value, 0, kMaxRepetitions), "a count up to kMaxRepetitions, 10000");
        return value;
      case V::flag:
        expect(value.is_boolean(), "true or false");
        return value;
      case V::token:
        expect(is_token(value), "a token or its id");
        return value;
      case V::tokens:
        expect(value.is_array() && std::ranges::all_of(value, is_token), "a list of tokens");
        return value;
      case V::marks:
        if (value.is_object()) return format(value, path);
        expect(value.is_string() || (value.is_array() && std::ranges::all_of(value, is_text)),
               "a string, a list of strings or a token");
        return value;
      case V::format:
        return format(value, path);
      case V::formats: {
        expect(value.is_array() && !value.empty(), "a list of formats");
        Json out = Json::array();
        for (size_t i = 0; i < value.size(); ++i)
          out.push_back(format(value[i], path + "/" + std::to_string(i)));
        return out;
      }
    }
    return value;
  }
};

// {"structures": [{"begin", "schema", "end"}], "triggers": [...]}: what vLLM took first.
Json of_structures(const Json& tag) {
  Json format = {{"type", "triggered_tags"}, {"tags", Json::array()}};
  if (tag.contains("triggers")) format["triggers"] = tag["triggers"];
  if (!tag["structures"].is_array()) TagChecker::refuse("/structures", "must be a list");
  for (const Json& structure : tag["structures"]) {
    if (!structure.is_object() || structure.size() != 3 || !structure.contains("begin") ||
        !structure.contains("schema") || !structure.contains("end"))
      TagChecker::refuse("/structures", "must hold objects with begin, schema and end");
    format["tags"].push_back(
        {{"type", "tag"},
         {"begin", structure["begin"]},
         {"content", {{"type", "json_schema"}, {"json_schema", structure["schema"]}}},
         {"end", structure["end"]}});
  }
  return format;
}

}  // namespace

std::string checked_structural_tag(const std::string& tag) {
  const JsonLimits limits{.max_bytes = kMaxStructureBytes,
                          .max_depth = static_cast<size_t>(kMaxStructureDepth),
                          .max_nodes = 200'000};
  Json json = parse_json(tag, "structural_tag", ErrorKind::invalid_argument, limits);
  if (!json.is_object()) TagChecker::refuse("#", "must be an object");
  const bool older = json.contains("structures");
  for (auto it = json.begin(); it != json.end(); ++it) {
    const bool known =
        older ? it.key() == "structures" || it.key() == "triggers" : it.key() == "format";
    if (!known && !(it.key() == "type" && *it == "structural_tag"))
      TagChecker::refuse("/" + it.key(), "is not a field of a structural tag");
  }
  if (!older && !json.contains("format")) TagChecker::refuse("#", "needs format");
  const Json format = older ? of_structures(json) : json["format"];
  Json out = {{"type", "structural_tag"}, {"format", TagChecker().format(format, "/format")}};
  std::string text = out.dump();
  check(text.size() <= kMaxGrammarBytes, ErrorKind::invalid_argument,
        "structural_tag: makes grammars of {} bytes, the limit kMaxGrammarBytes is {}", text.size(),
        kMaxGrammarBytes);
  return text;
}

}  // namespace nanovllm
