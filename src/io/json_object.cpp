#include "io/json_object.h"

#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace nanovllm {

std::string describe(const Json& value) {
  if (value.is_string()) return quote(value.get_ref<const std::string&>());
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  return value.dump();
}

bool is_integer_in(const Json& value, int64_t min, int64_t max) {
  // A number beyond int64_t stays unsigned in Json, and would turn negative.
  if (value.is_number_unsigned() && !std::in_range<int64_t>(value.get<uint64_t>())) return false;
  return value.is_number_integer() && value.get<int64_t>() >= min && value.get<int64_t>() <= max;
}

JsonObject::JsonObject(const Json& json, std::string what, ErrorKind kind)
    : json_(&json), what_(std::move(what)), kind_(kind) {
  check(json.is_object(), kind_, "{}: must be a JSON object, got {}", what_, describe(json));
}

const Json* JsonObject::find(std::string_view key) const {
  for (const auto& [name, value] : json_->get_ref<const Json::object_t&>())
    if (name == key) return value.is_null() ? nullptr : &value;
  return nullptr;
}

bool JsonObject::contains(std::string_view key) const {
  for (const auto& [name, value] : json_->get_ref<const Json::object_t&>())
    if (name == key) return true;
  return false;
}

std::string JsonObject::path(std::string_view key) const {
  return fmt::format("{}{}", prefix_, key);
}

void JsonObject::refuse(std::string_view key, std::string_view expected, const Json& found) const {
  fail(kind_, "{}: {} must be {}, got {}", what_, path(key), expected, describe(found));
}

void JsonObject::refuse(std::string_view message) const { fail(kind_, "{}: {}", what_, message); }

int64_t JsonObject::to_integer(std::string_view key, const Json& value, int64_t min,
                               int64_t max) const {
  // Programs that write requests may make 10.0 of 10: where a double is a whole number for sure, it
  // is that number. Model files have no such excuse.
  if (const auto* real = value.get_ptr<const Json::number_float_t*>();
      real && kind_ == ErrorKind::invalid_argument && std::abs(*real) <= 0x1p53 &&
      *real == std::floor(*real))
    return to_integer(key, static_cast<int64_t>(*real), min, max);
  if (!is_integer_in(value, min, max))
    refuse(key, fmt::format("an integer from {} to {}", min, max), value);
  return value.get<int64_t>();
}

std::optional<int64_t> JsonObject::optional_integer(std::string_view key, int64_t min,
                                                    int64_t max) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  return to_integer(key, *value, min, max);
}

int64_t JsonObject::integer(std::string_view key, int64_t min, int64_t max) const {
  const Json* value = find(key);
  check(value != nullptr, kind_, "{}: {} is missing: an integer from {} to {}", what_, path(key),
        min, max);
  return to_integer(key, *value, min, max);
}

std::optional<double> JsonObject::optional_number(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_number() || !std::isfinite(value->get<double>())) refuse(key, "a number", *value);
  return value->get<double>();
}

std::optional<bool> JsonObject::optional_bool(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_boolean()) refuse(key, "true or false", *value);
  return value->get<bool>();
}

std::optional<std::string> JsonObject::optional_string(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_string()) refuse(key, "a string", *value);
  return value->get<std::string>();
}

std::optional<std::vector<std::string>> JsonObject::optional_strings(std::string_view key) const {
  const Json* list = find(key);
  if (!list) return std::nullopt;
  if (!list->is_array()) refuse(key, "a list of strings", *list);
  std::vector<std::string> strings;
  strings.reserve(list->size());
  for (const Json& value : *list) {
    if (!value.is_string()) refuse(key, "a list of strings", value);
    strings.push_back(value.get<std::string>());
  }
  return strings;
}

std::optional<std::vector<int64_t>> JsonObject::optional_integers(std::string_view key, int64_t min,
                                                                  int64_t max) const {
  const Json* list = find(key);
  if (!list) return std::nullopt;
  if (!list->is_array()) return std::vector<int64_t>{to_integer(key, *list, min, max)};
  std::vector<int64_t> integers;
  integers.reserve(list->size());
  for (const Json& value : *list) integers.push_back(to_integer(key, value, min, max));
  return integers;
}

std::optional<JsonObject> JsonObject::optional_object(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_object()) refuse(key, "an object", *value);
  JsonObject nested(*value, what_, kind_);
  nested.prefix_ = path(key) + ".";
  return nested;
}

}  // namespace nanovllm
