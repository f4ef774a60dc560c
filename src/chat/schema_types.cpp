#include "chat/schema_types.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

namespace nanovllm {
namespace {

/// JSON Schema's name of a type that was written as Python and others call it.
std::string standard_name(const std::string& type) {
  constexpr std::pair<std::string_view, const char*> kNames[] = {
      {"str", "string"},   {"int", "integer"}, {"float", "number"}, {"double", "number"},
      {"bool", "boolean"}, {"dict", "object"}, {"list", "array"}};
  for (const auto& [name, standard] : kNames)
    if (type == name) return standard;
  return type;
}

/// `steps` bounds the work.
std::set<std::string> types_of(const Json& schema, const Json& root, int& steps) {
  std::set<std::string> types;
  const Json& s = resolved_schema(schema, root);
  if (!s.is_object() || --steps < 0) return types;
  if (s.contains("type")) {
    const Json& type = s["type"];
    if (type.is_string()) types.insert(standard_name(type.get<std::string>()));
    if (type.is_array())
      for (const Json& one : type)
        if (one.is_string()) types.insert(standard_name(one.get<std::string>()));
    return types;
  }
  for (const char* list : {"anyOf", "oneOf"}) {
    if (!s.contains(list) || !s[list].is_array()) continue;
    for (const Json& one : s[list]) {
      const auto more = types_of(one, root, steps);
      if (more.empty()) return {};
      types.insert(more.begin(), more.end());
    }
  }
  const bool strings = s.contains("enum") && s["enum"].is_array() &&
                       std::ranges::all_of(s["enum"], [](const Json& v) { return v.is_string(); });
  if (strings || (s.contains("const") && s["const"].is_string())) types.insert("string");
  return types;
}

}  // namespace

const Json& resolved_schema(const Json& schema, const Json& root) {
  const Json* found = &schema;
  for (int i = 0; i < 8 && found->is_object(); ++i) {
    if (const auto all = found->find("allOf");
        all != found->end() && all->is_array() && all->size() == 1 && !found->contains("type")) {
      found = &all->front();
      continue;
    }
    if (!found->contains("$ref")) break;
    const Json& reference = (*found)["$ref"];
    if (!reference.is_string()) break;
    const std::string path = reference.get<std::string>();
    const size_t slash = path.rfind('/');
    if (path != "#/$defs/" + path.substr(slash + 1) &&
        path != "#/definitions/" + path.substr(slash + 1))
      break;
    const auto group = root.find(path.substr(2, slash - 2));
    if (group == root.end() || !group->is_object() || !group->contains(path.substr(slash + 1)))
      break;
    found = &(*group)[path.substr(slash + 1)];
  }
  return *found;
}

std::set<std::string> types_of_schema(const Json& schema, const Json& root) {
  int steps = 200;
  return types_of(schema, root, steps);
}

}  // namespace nanovllm
