// XGrammar's structural tags: free text with structured parts in it. The parts are checked and
// compiled as on their own, and handed on as grammars.
#pragma once

#include <string>

namespace nanovllm {

/// The tag with every schema and regular expression replaced by its grammar. Takes the older
/// spelling {"structures", "triggers"} too. Throws Error(invalid_argument) with the path of what is
/// not known.
std::string checked_structural_tag(const std::string& tag);

}  // namespace nanovllm
