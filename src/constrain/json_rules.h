// JSON's own texts as expressions: white space, strings and their spelling, numbers, literals.
//
// A text that a schema names (a key, an enum's value, what a pattern matches) has one spelling:
// characters stand for themselves unless JSON asks for an escape. In other strings \u escapes are
// allowed too, never half a surrogate pair. White space is nothing or one
// space: where a model may write any, some write nothing else.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "constrain/expr.h"
#include "io/json.h"

namespace nanovllm {

class JsonRules {
 public:
  explicit JsonRules(Rules& rules) : rules_(rules) {}

  Expr space();
  /// One character inside a string, in any spelling.
  Expr character();
  Expr string();
  Expr integer();
  Expr number();
  /// Any value, array or object.
  Expr value();
  Expr array();
  Expr object();

  /// `min` to `max` times `part`, with commas between.
  Expr listed(const Expr& part, int64_t min, int64_t max);
  /// `parts` between marks, with white space where it may be.
  Expr enclosed(const char* open, Expr parts, const char* close);
  /// A comma and white space.
  Expr comma();
  /// Any key but these.
  Expr key_except(const std::vector<std::string>& names);
  Expr literal(const Json& value);

 private:
  template <class Make>
  Expr shared(std::optional<int>& index, Make make);
  Expr escape();
  Expr key_rest();
  Expr rest_except(const std::vector<std::u32string>& rests);

  Rules& rules_;
  std::optional<int> space_, character_, string_, number_, value_, object_, array_, key_rest_,
      escape_;
  std::map<std::vector<std::u32string>, int> rest_except_;
};

/// The texts of `e` as they are spelled inside a JSON string.
Expr spelled_in_json(const Expr& e);

}  // namespace nanovllm
