// Lists of modules as quantised checkpoints have them: names, parts of names, expressions.
#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "io/json_object.h"

struct pcre2_real_code_8;

namespace nanovllm {

/// Names of modules, and expressions that begin at their first character ("re:..." in
/// compressed-tensors, Python's re.match).
class ModuleRules {
 public:
  /// Throws Error(model), by the name of the list `key` of `in`, for an expression that is not
  /// understood, too long or one too many.
  void add(const JsonObject& in, const char* key, const std::string& text);
  /// Throws Error(model) where an expression takes too long.
  bool matches(const std::string& module) const;

  std::unordered_set<std::string> names;
  bool all_linear = false;  ///< a target "Linear"
  bool parts_too = false;   ///< a name also stands for modules that have it among their parts

 private:
  struct FreeCode {
    void operator()(pcre2_real_code_8* code) const;
  };
  bool has_part(const std::string& module) const;

  std::vector<std::unique_ptr<pcre2_real_code_8, FreeCode>> expressions_;
};

}  // namespace nanovllm
