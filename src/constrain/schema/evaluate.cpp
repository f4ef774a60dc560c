// SchemaReader's judgement of values: which of an enum's fit the rest, and whether the branches of
// a oneOf can hold together.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "constrain/schema/formats.h"
#include "constrain/schema/match.h"
#include "constrain/schema/schema_reader.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

bool is_whole(const Json& value) {
  return value.is_number_integer() ||
         (value.is_number_float() && value.get<double>() == std::floor(value.get<double>()));
}

unsigned type_of(const Json& value) {
  if (value.is_null()) return kNull;
  if (value.is_boolean()) return kBoolean;
  if (value.is_string()) return kString;
  if (value.is_array()) return kArray;
  if (value.is_object()) return kObject;
  return is_whole(value) ? kInteger : kFraction;
}

int64_t num_chars(const std::string& text) {
  return std::ranges::count_if(text, [](char c) { return !is_utf8_continuation(c); });
}

bool has_number(const Json& schema, const char* keyword, auto accepts) {
  const auto bound = schema.find(keyword);
  return bound == schema.end() || accepts(*bound);
}

bool is_within(const Json& number, const Json& schema) {
  return has_number(schema, "minimum", [&](const Json& x) { return number >= x; }) &&
         has_number(schema, "maximum", [&](const Json& x) { return number <= x; }) &&
         has_number(schema, "exclusiveMinimum", [&](const Json& x) { return number > x; }) &&
         has_number(schema, "exclusiveMaximum", [&](const Json& x) { return number < x; }) &&
         has_number(schema, "multipleOf", [&](const Json& x) {
           const double parts = number.get<double>() / x.get<double>();
           return parts == std::floor(parts);
         });
}

bool has_size(int64_t size, const Json& schema, const char* min, const char* max) {
  return has_number(schema, min, [&](const Json& x) { return size >= x.get<int64_t>(); }) &&
         has_number(schema, max, [&](const Json& x) { return size <= x.get<int64_t>(); });
}

bool is_text(const std::string& value, const Json& schema) {
  if (!has_size(num_chars(value), schema, "minLength", "maxLength")) return false;
  const auto pattern = schema.find("pattern");
  if (pattern != schema.end())  // beside it a format is an annotation
    return matches(pattern_expr(pattern->get<std::string>()), value);
  const auto format = schema.find("format");
  if (format == schema.end()) return true;
  const auto known = format_expr(format->get<std::string>());
  return !known || matches(*known, value);
}

/// The largest lower and the smallest upper bound that a pair of keywords sets.
std::pair<double, double> bounds(const Conjunction& flat, const char* min, const char* max) {
  std::pair<double, double> all{-HUGE_VAL, HUGE_VAL};
  for (const Json* schema : flat) {
    if (const auto low = schema->find(min); low != schema->end())
      all.first = std::max(all.first, low->get<double>());
    if (const auto high = schema->find(max); high != schema->end())
      all.second = std::min(all.second, high->get<double>());
  }
  return all;
}

bool are_apart(const Conjunction& a, const Conjunction& b, const char* min, const char* max) {
  const auto in_a = bounds(a, min, max), in_b = bounds(b, min, max);
  return in_a.second < in_b.first || in_b.second < in_a.first;
}

bool is_required(const Conjunction& flat, const std::string& name) {
  return std::ranges::any_of(flat, [&](const Json* schema) {
    const auto required = schema->find("required");
    return required != schema->end() && std::ranges::count(*required, Json(name)) > 0;
  });
}

}  // namespace

bool SchemaReader::is_valid(const Json& value, const Conjunction& schemas) {
  const std::vector<Conjunction> ways = alternatives(schemas);
  return std::ranges::any_of(ways,
                             [&](const Conjunction& flat) { return is_valid_flat(value, flat); });
}

bool SchemaReader::is_valid_flat(const Json& value, const Conjunction& flat) {
  if ((type_of(value) & types(flat)) == 0) return false;
  const bool all = std::ranges::all_of(flat, [&](const Json* schema) {
    const auto only = schema->find("const"), values = schema->find("enum");
    if (only != schema->end() && *only != value) return false;
    if (values != schema->end() && std::ranges::count(*values, value) == 0) return false;
    if (value.is_number()) return is_within(value, *schema);
    if (value.is_string()) return is_text(value.get_ref<const std::string&>(), *schema);
    if (value.is_array()) return has_size(std::ssize(value), *schema, "minItems", "maxItems");
    if (value.is_object())
      return has_size(std::ssize(value), *schema, "minProperties", "maxProperties");
    return true;
  });
  return all && has_valid_members(value, flat);
}

bool SchemaReader::has_valid_members(const Json& value, const Conjunction& flat) {
  if (value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i)
      if (!is_valid(value[i], item(flat, i))) return false;
  }
  if (!value.is_object()) return true;
  for (const Json* schema : flat) {
    if (const auto required = schema->find("required"); required != schema->end())
      for (const Json& name : *required)
        if (!value.contains(name.get_ref<const std::string&>())) return false;
    if (const auto names = schema->find("propertyNames"); names != schema->end())
      for (auto it = value.begin(); it != value.end(); ++it)
        if (!is_valid(it.key(), {&*names})) return false;
  }
  for (auto it = value.begin(); it != value.end(); ++it)
    if (!is_valid(*it, property(flat, it.key()))) return false;
  return true;
}

// Exactly one branch holds where no two can hold together.
void SchemaReader::check_disjoint(const Json& schema) {
  const Json& options = schema["oneOf"];
  std::vector<std::vector<Conjunction>> ways;
  for (const Json& option : options) {
    ways.push_back(alternatives({&option}));
    for (Conjunction& flat : ways.back()) flat.push_back(&schema);  // for its own plain keywords
  }
  for (size_t i = 0; i < ways.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      for (const Conjunction& a : ways[i])
        for (const Conjunction& b : ways[j])
          if (!are_disjoint(a, b, 0))
            refuse(schema, "oneOf",
                   fmt::format("has branches {} and {}, which may hold together: write anyOf, or a "
                               "required property with another const in each",
                               j, i));
}

bool SchemaReader::are_disjoint(const Conjunction& a, const Conjunction& b, int depth) {
  Json storage;
  for (const auto& [finite, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    const Json* values = finite_values(*finite, storage);
    if (values)
      return std::ranges::none_of(*values, [&, left = finite, right = other](const Json& value) {
        return is_valid_flat(value, *left) && is_valid_flat(value, *right);
      });
  }
  const unsigned common = types(a) & types(b);
  for (unsigned type = 1; type < kAllTypes; type *= 2)
    if ((common & type) != 0 && !has_no_common_value(a, b, type, depth)) return false;
  return true;
}

bool SchemaReader::has_no_common_value(const Conjunction& a, const Conjunction& b, unsigned type,
                                       int depth) {
  constexpr int kMaxDepth = 4;
  if (type == kString) return are_apart(a, b, "minLength", "maxLength");
  if (type == kArray) return are_apart(a, b, "minItems", "maxItems");
  if (type == kInteger || type == kFraction) return are_apart(a, b, "minimum", "maximum");
  if (type != kObject || depth >= kMaxDepth) return false;
  // A key that one of them has to have, and whose values the other refuses.
  for (const Conjunction* side : {&a, &b})
    for (const Json* schema : *side) {
      const auto required = schema->find("required");
      if (required == schema->end()) continue;
      for (const Json& name : *required) {
        const std::string key = name.get<std::string>();
        const auto in_a = alternatives(property(a, key)), in_b = alternatives(property(b, key));
        const bool both = is_required(a, key) && is_required(b, key);
        if (!both && !(side == &a ? in_b : in_a).empty()) continue;
        const bool apart = std::ranges::all_of(in_a, [&](const Conjunction& x) {
          return std::ranges::all_of(
              in_b, [&](const Conjunction& y) { return are_disjoint(x, y, depth + 1); });
        });
        if (apart) return true;
      }
    }
  return false;
}

}  // namespace nanovllm
