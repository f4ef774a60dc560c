// Typed access to the entries of tokenizer.json and tokenizer_config.json, with errors that name
// the entry. JsonObject does that for the fields of one flat object; here lists of objects nest.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/json_object.h"

namespace nanovllm {

/// A value and its place in the file. What is not as it is asked for throws Error(model): place,
/// what was expected and what was found.
class Entry {
 public:
  /// `place` is what errors call the value: "tokenizer.json: decoder". The JSON must outlive the
  /// entry.
  Entry(const Json& json, std::string place) : json_(json), place_(std::move(place)) {}

  const Json& json() const { return json_; }
  const std::string& place() const { return place_; }
  /// The place of a member: "tokenizer.json: decoder.type".
  std::string place_of(std::string_view key) const {
    return fmt::format("{}{}{}", place_, place_.ends_with(':') ? ' ' : '.', key);
  }

  /// Null where the key is absent or its value is null.
  const Json* find(std::string_view key) const {
    if (!json_.is_object()) refuse("an object");
    const auto it = json_.find(std::string(key));
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  /// Nothing where find() gives null.
  std::optional<Entry> member(std::string_view key) const {
    const Json* value = find(key);
    return value ? std::optional(Entry(*value, place_of(key))) : std::nullopt;
  }
  /// A member that must be there.
  Entry required(std::string_view key) const {
    auto value = member(key);
    check(value.has_value(), ErrorKind::model, "{} is missing", place_of(key));
    return *value;
  }
  /// Of an array.
  std::vector<Entry> elements() const {
    if (!json_.is_array()) refuse("an array");
    std::vector<Entry> result;
    for (size_t i = 0; i < json_.size(); ++i)
      result.emplace_back(json_[i], fmt::format("{}[{}]", place_, i));
    return result;
  }

  // The value itself, or a member's; a flag may be absent.
  const std::string& string() const {
    if (!json_.is_string()) refuse("a string");
    return json_.get_ref<const std::string&>();
  }
  const std::string& string(std::string_view key) const { return required(key).string(); }
  bool flag(std::string_view key, bool absent) const {
    const auto value = member(key);
    if (!value) return absent;
    if (!value->json_.is_boolean()) value->refuse("true or false");
    return value->json_.get<bool>();
  }
  /// An integer in [0, max].
  int64_t integer(int64_t max) const {
    if (!is_integer_in(json_, 0, max)) refuse(fmt::format("an integer from 0 to {}", max));
    return json_.get<int64_t>();
  }
  /// The entry's kind; a kind that is not supported is refused by name.
  const std::string& type() const { return string("type"); }
  [[noreturn]] void refuse_type(std::string_view supported) const {
    fail(ErrorKind::model, "{}: type \"{}\" is not supported (supported: {})", place_, type(),
         supported);
  }

 private:
  [[noreturn]] void refuse(std::string_view expected) const {
    fail(ErrorKind::model, "{} must be {}, got {}", place_, expected, describe(json_));
  }

  const Json& json_;
  std::string place_;
};

}  // namespace nanovllm
