// The formats and patterns of JSON Schema that are enforced, as expressions of a string's
// characters.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "constrain/expr.h"

namespace nanovllm {

/// Whether the format says what a text is for and leaves it as it is.
bool is_any_text(std::string_view format);
std::optional<Expr> format_expr(std::string_view name);
std::vector<std::string_view> format_names();
/// The expression of the keyword `pattern`. Throws Error(invalid_argument) as parse_regex_search()
/// does.
Expr pattern_expr(std::string_view pattern);

}  // namespace nanovllm
