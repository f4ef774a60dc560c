#include "constrain/schema/schema_reader.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "constrain/limits.h"
#include "constrain/regex.h"
#include "constrain/schema/keywords.h"
#include "constrain/schema/match.h"
#include "core/check.h"

namespace nanovllm {
namespace {

constexpr std::string_view kDialects[] = {"https://json-schema.org/draft/2020-12/schema",
                                          "https://json-schema.org/draft/2019-09/schema",
                                          "http://json-schema.org/draft-07/schema"};

unsigned type_bits(const std::string& name) {
  if (name == "null") return kNull;
  if (name == "boolean") return kBoolean;
  if (name == "string") return kString;
  if (name == "array") return kArray;
  if (name == "object") return kObject;
  return name == "integer" ? kInteger : kInteger | kFraction;
}

/// One step of a JSON pointer, or of a reference, which spells some bytes as %XX.
std::string unescape(std::string_view step) {
  std::string out;
  for (size_t i = 0; i < step.size(); ++i) {
    const std::string_view two = step.substr(i, 2), three = step.substr(i, 3);
    if (two == "~0" || two == "~1") {
      out += two == "~0" ? '~' : '/';
      ++i;
    } else if (three.size() == 3 && step[i] == '%' && std::isxdigit(three[1]) &&
               std::isxdigit(three[2])) {
      out += static_cast<char>(std::stoi(std::string(three.substr(1)), nullptr, 16));
      i += 2;
    } else {
      out += step[i];
    }
  }
  return out;
}

const Json* member(const Json& schema, const char* keyword) {
  const auto found = schema.find(keyword);
  return found == schema.end() ? nullptr : &*found;
}

}  // namespace

SchemaReader::SchemaReader(const Json& root) : root_(root) {
  check(root.is_object() || root.is_boolean(), ErrorKind::invalid_argument,
        "json: a schema must be an object or a boolean");
  measure(root, nullptr, "", 0);
  if (!root.is_object()) return;
  if (const Json* dialect = member(root, "$schema")) {
    std::string name = dialect->is_string() ? dialect->get<std::string>() : "";
    if (name.ends_with('#')) name.pop_back();
    if (std::ranges::count(kDialects, name) == 0)
      refuse(root, "$schema", "is a dialect that is not known: write draft 2020-12");
  }
}

void SchemaReader::measure(const Json& value, const Json* parent, const std::string& key,
                           int depth) {
  if (!value.is_structured() && !value.is_boolean()) return;
  places_.emplace(&value, Place{parent, key});
  if (depth > kMaxStructureDepth)
    refuse(value, "",
           fmt::format("is nested deeper than kMaxStructureDepth, {}", kMaxStructureDepth));
  if (key == "properties" && value.is_object())
    num_properties_ += static_cast<int64_t>(value.size());
  if (key == "enum" && value.is_array()) num_enum_values_ += static_cast<int64_t>(value.size());
  if (num_properties_ > kMaxProperties)
    refuse(value, "",
           fmt::format("has property number {}, the limit kMaxProperties is {}", num_properties_,
                       kMaxProperties));
  if (num_enum_values_ > kMaxEnumValues)
    refuse(value, "",
           fmt::format("has enum value number {}, the limit kMaxEnumValues is {}", num_enum_values_,
                       kMaxEnumValues));
  if (value.is_boolean()) return;
  size_t index = 0;
  for (auto it = value.begin(); it != value.end(); ++it, ++index)
    measure(*it, &value, value.is_object() ? it.key() : std::to_string(index), depth + 1);
}

void SchemaReader::refuse(const Json& schema, const std::string& keyword,
                          const std::string& problem) const {
  std::vector<std::string> steps;
  if (!keyword.empty()) steps.push_back(keyword);
  for (const Json* at = &schema; at && at != &root_;) {
    const auto place = places_.find(at);
    if (place == places_.end()) break;
    steps.push_back(place->second.key);
    at = place->second.parent;
  }
  std::string path = "#";
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) path += "/" + *step;
  fail(ErrorKind::invalid_argument, "json: {} {}", path, problem);
}

const std::vector<Conjunction>& SchemaReader::alternatives(const Conjunction& schemas) {
  const auto known = memo_.find(schemas);
  if (known != memo_.end()) return known->second;
  Expansion at;
  for (auto schema = schemas.rbegin(); schema != schemas.rend(); ++schema)
    at.pending.push_back({*schema, {}});
  std::vector<Conjunction> found;
  expand(std::move(at), found);
  check(memo_.size() < kMaxRules, ErrorKind::invalid_argument,
        "json: the schema's combinations are more than kMaxRules, {}", kMaxRules);
  return memo_.emplace(schemas, std::move(found)).first->second;
}

void SchemaReader::expand(Expansion at, std::vector<Conjunction>& into) {
  while (!at.pending.empty()) {
    const Pending next = std::move(at.pending.back());
    at.pending.pop_back();
    if (!take(next, at)) return;
  }
  if (at.branches.empty()) {
    if (types(at.flat) == 0) return;
    if (into.size() >= kMaxAlternatives)
      refuse(*at.flat.front(), "",
             fmt::format("has more than kMaxAlternatives, {}, alternatives", kMaxAlternatives));
    return into.push_back(std::move(at.flat));
  }
  const auto [options, within] = std::move(at.branches.back());
  at.branches.pop_back();
  for (const Json* option : options) {
    Expansion branch = at;
    branch.pending.push_back({option, within});
    expand(std::move(branch), into);
  }
}

// False where nothing can satisfy the schema.
bool SchemaReader::take(const Pending& next, Expansion& at) {
  const Json& schema = *next.schema;
  if (schema.is_boolean()) return schema.get<bool>();
  if (std::ranges::count(next.within, &schema) > 0)
    refuse(schema, "", "refers to itself without anything between");
  if (std::ranges::count(at.flat, &schema) > 0) return true;
  for (auto it = schema.begin(); it != schema.end(); ++it) {
    if (it.key() == "$id" && &schema == &root_) continue;
    const std::string problem = refusal_of(it.key(), *it, schema);
    if (!problem.empty()) refuse(schema, it.key(), problem);
  }
  at.flat.push_back(&schema);
  Conjunction within = next.within;
  within.push_back(&schema);
  if (const Json* all = member(schema, "allOf"))
    for (auto part = all->rbegin(); part != all->rend(); ++part)
      at.pending.push_back({&*part, within});
  if (const Json* reference = member(schema, "$ref"))
    at.pending.push_back({&target_of(schema, reference->get<std::string>()), within});
  for (const char* keyword : {"anyOf", "oneOf"}) {
    const Json* options = member(schema, keyword);
    if (!options) continue;
    if (keyword == std::string_view("oneOf")) check_disjoint(schema);
    std::vector<const Json*> pointers;
    for (const Json& option : *options) pointers.push_back(&option);
    at.branches.emplace_back(std::move(pointers), within);
  }
  return true;
}

const Json& SchemaReader::target_of(const Json& schema, const std::string& reference) {
  if (!reference.starts_with("#"))
    refuse(schema, "$ref", "leads out of the schema: copy its target to $defs");
  const Json* at = &root_;
  std::string_view rest = std::string_view(reference).substr(1);
  const auto lost = [&] {
    refuse(schema, "$ref", fmt::format("leads nowhere: {}", quote(reference)));
  };
  if (!rest.empty() && rest[0] != '/') lost();
  while (!rest.empty()) {
    rest.remove_prefix(1);
    const size_t end = std::min(rest.find('/'), rest.size());
    // %25 is a %, which starts no other escape, but %7E1 is ~1.
    std::string step = unescape(rest.substr(0, end));
    if (rest.substr(0, end).find("%7") != std::string_view::npos) step = unescape(step);
    rest.remove_prefix(end);
    const Json* next = nullptr;
    if (at->is_object()) {
      next = member(*at, step.c_str());
    } else if (at->is_array() && !step.empty() && step.size() < 7 &&
               std::ranges::all_of(step, [](unsigned char c) { return std::isdigit(c); })) {
      const size_t index = std::stoul(step);
      if (index < at->size()) next = &(*at)[index];
    }
    if (!next) lost();
    at = next;
  }
  if (!at->is_object() && !at->is_boolean()) lost();
  // Where a schema lies that has a name of its own, references start there.
  for (const Json* parent = at; parent && parent != &root_;) {
    if (parent->is_object() && parent->contains("$id") && (*parent)["$id"].is_string())
      refuse(*parent, "$id", "is not supported: only the root may have one");
    const auto place = places_.find(parent);
    parent = place == places_.end() ? nullptr : place->second.parent;
  }
  return *at;
}

unsigned SchemaReader::types(const Conjunction& flat) {
  unsigned all = kAllTypes;
  for (const Json* schema : flat) {
    const Json* type = member(*schema, "type");
    if (!type) continue;
    unsigned allowed = 0;
    if (type->is_string())
      allowed = type_bits(type->get<std::string>());
    else
      for (const Json& name : *type) allowed |= type_bits(name.get<std::string>());
    all &= allowed;
  }
  return all;
}

Conjunction SchemaReader::property(const Conjunction& flat, const std::string& name) {
  Conjunction all;
  for (const Json* schema : flat) {
    bool declared = false;
    const Json* properties = member(*schema, "properties");
    if (properties && properties->contains(name)) {
      all.push_back(&(*properties)[name]);
      declared = true;
    }
    if (const Json* patterns = member(*schema, "patternProperties"))
      for (auto it = patterns->begin(); it != patterns->end(); ++it) {
        if (!matches(parse_regex_search(it.key(), "json: patternProperties"), name)) continue;
        all.push_back(&*it);
        declared = true;
      }
    const Json* further = member(*schema, "additionalProperties");
    if (!further) further = member(*schema, "unevaluatedProperties");
    if (!declared && further) all.push_back(further);
  }
  return all;
}

Conjunction SchemaReader::free_property(const Conjunction& flat) {
  Conjunction all;
  for (const Json* schema : flat) {
    const Json* further = member(*schema, "additionalProperties");
    if (!further) further = member(*schema, "unevaluatedProperties");
    if (further) all.push_back(further);
  }
  return all;
}

Conjunction SchemaReader::item(const Conjunction& flat, size_t index) {
  Conjunction all;
  for (const Json* schema : flat) {
    const Json* prefix = member(*schema, "prefixItems");
    if (prefix && index < prefix->size()) {
      all.push_back(&(*prefix)[index]);
      continue;
    }
    const Json* items = member(*schema, "items");
    if (!items) items = member(*schema, "unevaluatedItems");
    if (items) all.push_back(items);
  }
  return all;
}

size_t SchemaReader::num_prefix_items(const Conjunction& flat) {
  size_t most = 0;
  for (const Json* schema : flat)
    if (const Json* prefix = member(*schema, "prefixItems")) most = std::max(most, prefix->size());
  return most;
}

const Json* finite_values(const Conjunction& flat, Json& storage) {
  const Json* shortest = nullptr;
  for (const Json* schema : flat) {
    if (const Json* only = member(*schema, "const")) {
      storage = Json::array({*only});
      return &storage;
    }
    const Json* values = member(*schema, "enum");
    if (values && (!shortest || values->size() < shortest->size())) shortest = values;
  }
  return shortest;
}

}  // namespace nanovllm
