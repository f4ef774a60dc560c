// A JSON schema, taken apart: what must hold together, and in which alternatives.
//
// The place in an instance is described by a conjunction, the schemas that all apply there: `$ref`
// and `allOf` add to it, `anyOf` and `oneOf` branch. alternatives() multiplies that out, so that
// each alternative is a list of schema objects whose own keywords all hold. Everything that makes
// a grammar of a schema works on those; keywords that nobody enforces are refused here.
#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/json.h"

namespace nanovllm {

/// Schemas that all apply, in the order in which they were met.
using Conjunction = std::vector<const Json*>;

/// Types as bits. `integer` and `fraction` are the numbers that are whole and those that are not.
enum Types : unsigned {
  kNull = 1,
  kBoolean = 2,
  kString = 4,
  kArray = 8,
  kObject = 16,
  kInteger = 32,
  kFraction = 64,
  kAllTypes = 127,
};

class SchemaReader {
 public:
  /// Checks sizes: nesting, properties, values of enums. Throws Error(invalid_argument). `root`
  /// must outlive the reader.
  explicit SchemaReader(const Json& root);

  const Json& root() const { return root_; }

  /// The ways in which all of `schemas` can hold; none: never. Throws Error(invalid_argument)
  /// naming the path of a keyword that is not enforced.
  const std::vector<Conjunction>& alternatives(const Conjunction& schemas);
  bool is_never(const Conjunction& schemas) { return alternatives(schemas).empty(); }

  /// The types that all members allow.
  static unsigned types(const Conjunction& flat);
  /// Whether a value is as all of `schemas` ask.
  bool is_valid(const Json& value, const Conjunction& schemas);

  /// The schemas of the property `name`, and of item `index`, of values that a flat conjunction
  /// describes.
  Conjunction property(const Conjunction& flat, const std::string& name);
  static Conjunction item(const Conjunction& flat, size_t index);
  /// The schemas of all further properties (no pattern's), and of all further items.
  static Conjunction free_property(const Conjunction& flat);
  static size_t num_prefix_items(const Conjunction& flat);

  /// Throws Error(invalid_argument): where the schema lies, and `problem`.
  [[noreturn]] void refuse(const Json& schema, const std::string& keyword,
                           const std::string& problem) const;

 private:
  struct Pending {
    const Json* schema;
    Conjunction within;  // the schemas that led here in place
  };
  struct Expansion {
    std::vector<Pending> pending{};
    std::vector<std::pair<std::vector<const Json*>, Conjunction>> branches{};
    Conjunction flat{};
  };

  void measure(const Json& value, const Json* parent, const std::string& key, int depth);
  void expand(Expansion at, std::vector<Conjunction>& into);
  bool take(const Pending& next, Expansion& at);
  const Json& target_of(const Json& schema, const std::string& reference);
  void check_disjoint(const Json& schema);
  bool are_disjoint(const Conjunction& a, const Conjunction& b, int depth);
  bool has_no_common_value(const Conjunction& a, const Conjunction& b, unsigned type, int depth);
  bool is_valid_flat(const Json& value, const Conjunction& flat);
  bool has_valid_members(const Json& value, const Conjunction& flat);

  struct Place {
    const Json* parent;
    std::string key;
  };
  const Json& root_;
  std::unordered_map<const Json*, Place> places_;
  std::map<Conjunction, std::vector<Conjunction>> memo_;
  int64_t num_properties_ = 0, num_enum_values_ = 0;
};

/// The values of `enum` and `const`, or nothing where a flat conjunction has neither.
const Json* finite_values(const Conjunction& flat, Json& storage);

}  // namespace nanovllm
