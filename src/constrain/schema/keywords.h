// The keywords of JSON Schema: enforced by a grammar, harmless, or refused.
#pragma once

#include <string>
#include <string_view>

#include "io/json.h"

namespace nanovllm {

/// A keyword that is refused, and the way out; empty where `value` may be there. `schema` is the
/// object that has it.
std::string refusal_of(std::string_view keyword, const Json& value, const Json& schema);

/// Whether `schema`, under the keyword, holds texts only for readers.
bool is_annotation(std::string_view keyword);

}  // namespace nanovllm
