// Typed, checked access to the fields of a JSON object; every error names the file, the field and
// the value found: "config.json: hidden_size must be an integer from 1 to 1048576, got "abc"".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"

namespace nanovllm {

/// A view of a JSON object. A field that is null counts as absent, as it does in Hugging Face
/// configurations. The Json must outlive the view.
class JsonObject {
 public:
  /// `what` names the file in errors. Throws Error(kind) unless `json` is an object.
  JsonObject(const Json& json, std::string what, ErrorKind kind);

  /// The value, or null if the field is absent or null.
  const Json* find(std::string_view key) const;
  /// Whether the field is there at all, be it null.
  bool contains(std::string_view key) const;

  /// Integers in [min, max]; a float, even a whole one, is refused.
  int64_t integer(std::string_view key, int64_t min, int64_t max) const;
  std::optional<int64_t> optional_integer(std::string_view key, int64_t min, int64_t max) const;
  /// A finite number, written as integer or float.
  std::optional<double> optional_number(std::string_view key) const;
  std::optional<bool> optional_bool(std::string_view key) const;
  std::optional<std::string> optional_string(std::string_view key) const;
  std::optional<std::vector<std::string>> optional_strings(std::string_view key) const;
  /// A list of integers in [min, max]; one integer counts as a list of one.
  std::optional<std::vector<int64_t>> optional_integers(std::string_view key, int64_t min,
                                                        int64_t max) const;
  /// A nested object, whose fields errors call "key.field".
  std::optional<JsonObject> optional_object(std::string_view key) const;

  /// Another object of the same file, for defaults that have no place in it. `json` must outlive
  /// the view.
  JsonObject another(const Json& json) const { return JsonObject(json, what_, kind_); }

  const Json& json() const { return *json_; }
  /// "key", or "parent.key" in a nested object.
  std::string path(std::string_view key) const;
  /// Throws "<file>: <field> must be <expected>, got <value>".
  [[noreturn]] void refuse(std::string_view key, std::string_view expected,
                           const Json& found) const;
  /// Throws "<file>: <message>".
  [[noreturn]] void refuse(std::string_view message) const;

 private:
  int64_t to_integer(std::string_view key, const Json& value, int64_t min, int64_t max) const;

  const Json* json_;
  std::string what_;
  std::string prefix_;  // "rope_scaling." in a nested object
  ErrorKind kind_;
};

/// A value as an error message shows it: scalars in full up to 80 bytes, containers by their kind.
std::string describe(const Json& value);

/// Whether a value is an integer in [min, max]; a float, even a whole one, is none.
bool is_integer_in(const Json& value, int64_t min, int64_t max);

}  // namespace nanovllm
