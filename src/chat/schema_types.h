// The types that a JSON schema allows a value whose text has no quotes.
#pragma once

#include <set>
#include <string>

#include "io/json.h"

namespace nanovllm {

/// The schema that a local reference, or an allOf of one schema, leads to, or `schema` itself.
const Json& resolved_schema(const Json& schema, const Json& root);

/// The types that a schema names; empty: any.
std::set<std::string> types_of_schema(const Json& schema, const Json& root);

}  // namespace nanovllm
