#include "constrain/schema/keywords.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "io/json_object.h"

namespace nanovllm {
namespace {

constexpr std::string_view kAnnotations[] = {"$anchor",
                                             "$comment",
                                             "$defs",
                                             "$dynamicAnchor",
                                             "$schema",
                                             "contentEncoding",
                                             "contentMediaType",
                                             "contentSchema",
                                             "default",
                                             "definitions",
                                             "deprecated",
                                             "description",
                                             "discriminator",
                                             "example",
                                             "examples",
                                             "externalDocs",
                                             "maxContains",
                                             "minContains",
                                             "readOnly",
                                             "title",
                                             "writeOnly",
                                             "xml"};

constexpr std::string_view kApplicators[] = {"$ref", "allOf", "anyOf", "oneOf", "if"};

struct Keyword {
  std::string_view name;
  enum class Value {
    integer,
    number,
    string,
    strings,
    values,
    any,
    schema,
    schemas,
    named,
    types
  } value;
};
using V = Keyword::Value;
constexpr Keyword kEnforced[] = {{"$ref", V::string},
                                 {"additionalProperties", V::schema},
                                 {"allOf", V::schemas},
                                 {"anyOf", V::schemas},
                                 {"const", V::any},
                                 {"enum", V::values},
                                 {"exclusiveMaximum", V::number},
                                 {"exclusiveMinimum", V::number},
                                 {"format", V::string},
                                 {"items", V::schema},
                                 {"maxItems", V::integer},
                                 {"maxLength", V::integer},
                                 {"maxProperties", V::integer},
                                 {"maximum", V::number},
                                 {"minItems", V::integer},
                                 {"minLength", V::integer},
                                 {"minProperties", V::integer},
                                 {"minimum", V::number},
                                 {"multipleOf", V::number},
                                 {"oneOf", V::schemas},
                                 {"pattern", V::string},
                                 {"patternProperties", V::named},
                                 {"prefixItems", V::schemas},
                                 {"properties", V::named},
                                 {"propertyNames", V::schema},
                                 {"required", V::strings},
                                 {"type", V::types},
                                 {"unevaluatedItems", V::schema},
                                 {"unevaluatedProperties", V::schema}};

struct Hint {
  std::string_view name, hint;
};
constexpr Hint kHints[] = {
    {"additionalItems", "write prefixItems and items"},
    {"dependencies", "a grammar cannot follow what other keys are there"},
    {"dependentRequired", "a grammar cannot follow what other keys are there"},
    {"dependentSchemas", "a grammar cannot follow what other keys are there"},
    {"else", "write anyOf with the cases spelled out"},
    {"if", "write anyOf with the cases spelled out"},
    {"then", "write anyOf with the cases spelled out"},
    {"not", "write what may be there"},
    {"nullable", "write \"type\": [..., \"null\"]"},
    {"contains", "write items"},
    {"uniqueItems", "a grammar cannot compare items"},
    {"$id", "only the root may have one"},
    {"id", "write $defs and $ref"},
    {"$dynamicRef", "write $ref"},
    {"$recursiveRef", "write $ref"}};

bool is_schema(const Json& value) { return value.is_object() || value.is_boolean(); }

bool is_type(const Json& value) {
  constexpr std::string_view kTypes[] = {"null",   "boolean", "string", "integer",
                                         "number", "array",   "object"};
  return value.is_string() && std::ranges::count(kTypes, value.get_ref<const std::string&>()) > 0;
}

/// The kind of value that should be here; empty where it is.
std::string_view wrong_value(V kind, const Json& value) {
  const auto all = [&](auto predicate) { return std::ranges::all_of(value, predicate); };
  const auto is_string = [](const Json& item) { return item.is_string(); };
  switch (kind) {
    case V::integer:
      return is_integer_in(value, 0, int64_t{1} << 53) ? "" : "an integer from 0 on";
    case V::number:
      return value.is_number() ? "" : "a number";
    case V::string:
      return value.is_string() ? "" : "a string";
    case V::strings:
      return value.is_array() && all(is_string) ? "" : "a list of strings";
    case V::values:
      return value.is_array() ? "" : "a list";
    case V::any:
      return "";
    case V::schema:
      return is_schema(value) ? "" : "a schema";
    case V::schemas:
      return value.is_array() && all(is_schema) ? "" : "a list of schemas";
    case V::named:
      return value.is_object() && all(is_schema) ? "" : "an object of schemas";
    case V::types:
      return is_type(value) || (value.is_array() && !value.empty() && all(is_type))
                 ? ""
                 : "a type's name, or a list of such";
  }
  return "";
}

/// Values of refused keywords that ask for nothing.
bool asks_for_nothing(std::string_view keyword, const Json& value, const Json& schema) {
  if (keyword == "uniqueItems" || keyword == "nullable") return value == false;
  if (keyword == "then" || keyword == "else") return !schema.contains("if");
  if (keyword == "if") return !schema.contains("then") && !schema.contains("else");
  return false;
}

}  // namespace

bool is_annotation(std::string_view keyword) {
  return keyword.starts_with("x-") || std::ranges::count(kAnnotations, keyword) > 0;
}

std::string refusal_of(std::string_view keyword, const Json& value, const Json& schema) {
  if (is_annotation(keyword) || asks_for_nothing(keyword, value, schema)) return "";
  const auto* const known = std::ranges::find(kEnforced, keyword, &Keyword::name);
  if (known == std::end(kEnforced)) {
    const auto* const hint = std::ranges::find(kHints, keyword, &Hint::name);
    return hint == std::end(kHints) ? "is not a keyword that can be enforced"
                                    : fmt::format("is not supported: {}", hint->hint);
  }
  if (const std::string_view expected = wrong_value(known->value, value); !expected.empty())
    return fmt::format("must be {}, got {}", expected, describe(value));
  if (keyword == "multipleOf" && !(value.get<double>() > 0)) return "must be more than 0";
  // Evaluation by in-place applicators is not followed; without any, this is what the other
  // keyword says.
  const bool unevaluated = keyword.starts_with("unevaluated");
  if (unevaluated && value != true && value != Json::object())
    for (const std::string_view name : kApplicators)
      if (schema.contains(name))
        return fmt::format("is not supported beside {}: write {}", name,
                           keyword == "unevaluatedItems" ? "items" : "additionalProperties");
  return "";
}

}  // namespace nanovllm
