// The contract between the library and libnanovllm-grammar.so, the one place where XGrammar lives.
// The module is looked for when the first structured output is asked for; without it everything
// else works.
//
// The module exports one C function. Whoever loads the module keeps it loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "constrain/grammar.h"

namespace nanovllm {

inline constexpr const char* kGrammarModuleFile = "libnanovllm-grammar.so";
inline constexpr const char* kGrammarModuleEntry = "nanovllm_open_grammar";
/// A constant text: the name and version of what it is made of.
inline constexpr const char* kGrammarModuleLibrary = "nanovllm_grammar_library";
inline constexpr const char* kGrammarCompilerFile = "nanovllm-grammar-compiler";

/// The tokens of a model, as bytes that they add to a text.
struct TokenTable {
  std::vector<std::string> texts{};  ///< by id; empty for control tokens and ids without a token
  std::vector<int32_t> stop_ids{};   ///< may come where a text ends, and only there
  std::string common_rules{};        ///< EBNF; their masks are kept for structures that have them
};

/// The source that the module compiles: EBNF from the rule `root` on, or a structural tag as JSON.
/// Both were checked.
struct GrammarSource {
  enum class Kind : uint8_t { ebnf, structural_tag } kind = Kind::ebnf;
  /// Up to two line ends may come before the text.
  bool after_reasoning = false;
  std::string text{};
};

struct CompiledGrammar {
  std::shared_ptr<const Grammar> grammar{};
  size_t bytes = 0;  ///< about
};

/// XGrammar for one vocabulary. Its methods may be called from any thread.
class GrammarModule {
 public:
  virtual ~GrammarModule() = default;
  /// Compiles in a helper process. Throws Error(invalid_argument): what is wrong with the source,
  /// or the limit that it exceeds.
  virtual CompiledGrammar compile(const GrammarSource& source) = 0;
};

/// Returns an object for the caller to `delete`, or null with one sentence in `error` (terminated,
/// cut to `error_size`), as where `version`, the caller's module_version(), is not the module's.
/// Never throws.
using OpenGrammarFunction = GrammarModule*(const char* version, const TokenTable& vocabulary,
                                           char* error, size_t error_size);

}  // namespace nanovllm
