// Regular expressions as JSON Schema has them (ECMA-262 with the flag u), read into the trees that
// grammars are made of. What a grammar cannot say (look-around, word boundaries, back references)
// is refused by name.
#pragma once

#include <string_view>

#include "constrain/expr.h"

namespace nanovllm {

/// The texts that `pattern` matches as a whole. `what` names it in errors. Throws
/// Error(invalid_argument).
Expr parse_regex(std::string_view pattern, std::string_view what);

/// The texts in which `pattern` matches somewhere, as JSON Schema's `pattern` asks.
Expr parse_regex_search(std::string_view pattern, std::string_view what);

}  // namespace nanovllm
