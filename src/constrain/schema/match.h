// Whether one text is among those of an expression without rules. For keys and enum values, which a
// pattern beside them must match.
#pragma once

#include <string_view>

#include "constrain/expr.h"

namespace nanovllm {

/// `text` is UTF-8. Throws Error(invalid_argument) where that takes too many steps.
bool matches(const Expr& e, std::string_view text);

}  // namespace nanovllm
