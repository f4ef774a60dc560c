// Any bytes as a schema, a regular expression, a grammar, choices or a structural tag, up to what
// the helper process would get: what is refused is an Error of one line, what is accepted is a
// grammar within the limits, and the guard in front of grammars can read it.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "nanovllm/error.h"

#include "constrain/ebnf_check.h"
#include "constrain/grammar_compiler.h"
#include "constrain/limits.h"
#include "constrain/structural_tag.h"

namespace {

using namespace nanovllm;

void require(bool condition) {
  if (!condition) std::abort();
}

/// A grammar that is made may exceed what one that is written may have.
void require_readable(const std::string& ebnf) {
  try {
    check_ebnf(ebnf, "source");
  } catch (const Error& error) {
    require(std::string_view(error.what()).find("kMax") != std::string_view::npos);
  }
}

/// The first letter says which; choices are lines.
StructuredOutputs asked_for(char kind, std::string text) {
  switch (kind) {
    case 'j':
      return {.json = std::move(text)};
    case 'r':
      return {.regex = std::move(text)};
    case 'g':
      return {.grammar = std::move(text)};
    case 't':
      return {.structural_tag = std::move(text)};
    default:
      break;
  }
  StructuredOutputs asked;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    asked.choice.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return asked;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const char* bytes = reinterpret_cast<const char*>(data);
  GrammarSource source;
  try {
    source = grammar_source(asked_for(bytes[0], std::string(bytes + 1, size - 1)));
  } catch (const Error& error) {
    const std::string_view message = error.what();
    require(error.kind() == ErrorKind::invalid_argument);
    require(message.size() < 4096 && message.find('\n') == message.npos);
    return 0;
  }
  if (source.kind == GrammarSource::Kind::structural_tag) {
    (void)checked_structural_tag(source.text);
  } else {
    require(source.text.size() <= kMaxGrammarBytes);
    require_readable(source.text);
  }
  return 0;
}
