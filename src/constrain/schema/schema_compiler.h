// A JSON schema as the rules of a grammar. Every keyword is enforced exactly, harmless, or refused
// with its path: docs/structured-output.md has the list.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "constrain/expr.h"
#include "constrain/json_rules.h"
#include "constrain/schema/schema_reader.h"

namespace nanovllm {

class SchemaCompiler {
 public:
  /// Adds the rules of `schema` to `rules`. Both must outlive the compiler.
  SchemaCompiler(const Json& schema, Rules& rules);

  /// The texts that satisfy the schema. Throws Error(invalid_argument).
  Expr compile() { return value({&reader_.root()}); }

 private:
  Expr value(const Conjunction& schemas);
  Expr body(const Conjunction& schemas);
  Expr of_type(const Conjunction& flat, unsigned type);
  Expr number(const Conjunction& flat, bool whole);
  Expr string(const Conjunction& flat);
  Expr characters(const Conjunction& flat);
  Expr array(const Conjunction& flat);
  Expr object(const Conjunction& flat);
  Expr free_member(const Conjunction& flat, const std::vector<std::string>& names);
  Expr pattern_member(const Conjunction& flat, const std::vector<std::string>& names);

  // The least and most that a pair of keywords allows, and the schema that says so.
  struct Sizes {
    int64_t min = 0, max = kUnbounded;
    const Json* schema = nullptr;
  };
  static Sizes sizes(const Conjunction& flat, const char* min, const char* max);
  void check_sizes(const Sizes& sizes, const char* keyword) const;

  SchemaReader reader_;
  Rules& rules_;
  JsonRules json_;
  std::map<Conjunction, Expr> memo_;
};

}  // namespace nanovllm
