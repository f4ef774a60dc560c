// Patterns that pre-tokenizers and normalizers search for: a literal string or a regular
// expression.
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

/// The work that the searches of one encode() may take together: characters looked at, and places
/// tried. Published patterns take some ten a byte; a pattern that is quadratic on a text, or worse,
/// runs out.
class SearchBudget {
 public:
  explicit SearchBudget(size_t text_bytes) : left_(1'000'000 + 500 * text_bytes) {}
  /// False where it is used up.
  bool spend(size_t work) {
    const bool enough = work <= left_;
    left_ = enough ? left_ - work : 0;
    return enough;
  }

 private:
  size_t left_;
};

/// Immutable; any number of threads may search with one object.
class Pattern {
 public:
  virtual ~Pattern() = default;
  /// Appends all matches from left to right, without overlap. `text` is valid UTF-8.
  /// Throws Error(invalid_argument) where the search exceeds its bound on work or memory.
  virtual void find_all(std::string_view text, std::vector<Span>& matches,
                        SearchBudget& budget) const = 0;

 protected:
  [[noreturn]] static void refuse_work(std::string_view text);
};

/// Regular expressions of published pre-tokenizers run on our own matcher (class_pattern.h), which
/// is fast and has the reference library's Unicode version; all others run on PCRE2.
/// `where` names the entry in errors. Throws Error(model) for an expression that neither takes.
std::unique_ptr<Pattern> make_regex_pattern(std::string_view regex, const CategoryTable& categories,
                                            const std::string& where);

/// Throws Error(model) for an empty string.
std::unique_ptr<Pattern> make_literal_pattern(std::string_view literal, const std::string& where);

}  // namespace nanovllm
