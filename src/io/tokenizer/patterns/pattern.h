// What pre-tokenizers and normalizers search for: a literal string or a regular expression.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/tokenizer/patterns/unicode.h"

namespace nanovllm {

/// A part [begin, end) of a text, in bytes.
struct Span {
  size_t begin;
  size_t end;
  size_t size() const { return end - begin; }
};

/// Immutable; any number of threads may search with one object.
class Pattern {
 public:
  virtual ~Pattern() = default;
  /// Appends all matches from left to right, without overlap. `text` is valid UTF-8.
  /// Throws Error(invalid_argument) where the search exceeds its bound on work or memory.
  virtual void find_all(std::string_view text, std::vector<Span>& matches) const = 0;
};

/// Regular expressions of published pre-tokenizers run on our own matcher (class_pattern.h), which
/// is fast and has the reference library's Unicode version; all others run on PCRE2.
/// `where` names the entry in errors. Throws Error(model) for an expression that neither takes.
std::unique_ptr<Pattern> make_regex_pattern(std::string_view regex, const CategoryTable& categories,
                                            const std::string& where);

/// Throws Error(model) for an empty string.
std::unique_ptr<Pattern> make_literal_pattern(std::string_view literal, const std::string& where);

}  // namespace nanovllm
