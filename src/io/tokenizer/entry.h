// Typed access to the entries of tokenizer.json, with errors that name the entry.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/json.h"

namespace nanovllm {

/// A value of tokenizer.json and its place in the file. What is not as it is asked for throws
/// Error(model) with the place.
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
    require(json_.is_object(), "an object");
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
    require(json_.is_array(), "an array");
    std::vector<Entry> result;
    for (size_t i = 0; i < json_.size(); ++i)
      result.emplace_back(json_[i], fmt::format("{}[{}]", place_, i));
    return result;
  }

  // The value itself, or a member's; a flag may be absent.
  const std::string& string() const {
    require(json_.is_string(), "a string");
    return json_.get_ref<const std::string&>();
  }
  const std::string& string(std::string_view key) const {
    const Json* value = find(key);
    check(value && value->is_string(), ErrorKind::model, "{} must be a string", place_of(key));
    return value->get_ref<const std::string&>();
  }
  bool flag(std::string_view key, bool absent) const {
    const Json* value = find(key);
    if (!value) return absent;
    check(value->is_boolean(), ErrorKind::model, "{} must be true or false", place_of(key));
    return value->get<bool>();
  }
  /// An integer in [0, max].
  int64_t integer(int64_t max) const {
    const bool fits =
        json_.is_number_unsigned()
            ? json_.get<uint64_t>() <= static_cast<uint64_t>(max)
            : json_.is_number_integer() && json_.get<int64_t>() >= 0 && json_.get<int64_t>() <= max;
    check(fits, ErrorKind::model, "{} must be an integer from 0 to {}", place_, max);
    return json_.get<int64_t>();
  }
  /// Which of its kinds the entry is; a kind that is not supported is refused by name.
  const std::string& type() const { return string("type"); }
  [[noreturn]] void refuse_type(std::string_view supported) const {
    fail(ErrorKind::model, "{}: type \"{}\" is not supported (supported: {})", place_, type(),
         supported);
  }

 private:
  void require(bool fits, std::string_view what) const {
    check(fits, ErrorKind::model, "{} must be {}", place_, what);
  }

  const Json& json_;
  std::string place_;
};

}  // namespace nanovllm
