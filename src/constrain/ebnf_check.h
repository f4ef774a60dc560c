// The guard in front of grammars that clients write: sizes, nesting, what counts expand to, and the
// parts of XGrammar's EBNF that are refused.
#pragma once

#include <string>
#include <string_view>

#include "constrain/expr.h"

namespace nanovllm {

/// Throws Error(invalid_argument); `what` names the text in it.
void check_ebnf(std::string_view ebnf, std::string_view what);

// The text of what is made of rules; checked against the limits likewise.
std::string rules_to_ebnf(Rules rules, std::string_view what);
std::string schema_to_ebnf(const std::string& schema);
std::string regex_to_ebnf(const std::string& pattern, std::string_view what);

}  // namespace nanovllm
