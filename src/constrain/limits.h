// Limits of a structure that a client sends. Every limit is checked before anything is
// compiled, and its name is in the error.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nanovllm {

constexpr size_t kMaxStructureBytes = 1 << 20;  ///< of a schema, a grammar, a structural tag
constexpr size_t kMaxPatternBytes = 1 << 14;    ///< of one regular expression
constexpr int kMaxStructureDepth = 64;          ///< nesting: of JSON, groups, parentheses
constexpr int64_t kMaxProperties = 2000;        ///< of all objects of a schema together
constexpr int64_t kMaxEnumValues = 5000;        ///< of all enums of a schema together; of choice
constexpr int64_t kMaxRepetitions = 10000;      ///< what counts like {m,n} expand to
constexpr size_t kMaxAlternatives = 256;        ///< that anyOf and types make of one schema
constexpr size_t kMaxRules = 20000;             ///< of the grammar made of a schema
constexpr size_t kMaxGrammarBytes = 4 << 20;    ///< of that grammar's text

/// Processor time of all its threads: the same structures are accepted on a busy machine.
constexpr double kMaxCompileSeconds = 5;
constexpr size_t kMaxCompileBytes = size_t{2} << 30;  ///< of the helper process, all together

}  // namespace nanovllm
