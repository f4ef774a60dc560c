// Normalizers: what tokenizer.json does to a text before splitting it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/tokenizer/entry.h"
#include "io/tokenizer/marked_text.h"
#include "io/tokenizer/patterns/pattern.h"

namespace nanovllm {

/// The "normalizer" of tokenizer.json. Immutable and thread-safe.
class Normalizer {
 public:
  class Step;
  /// Throws Error(model) for a kind that is not known. `categories` must outlive the normalizer.
  Normalizer(const Entry& entry, const CategoryTable& categories);
  ~Normalizer();

  /// `text` is valid UTF-8, before and after. Throws Error(invalid_argument) where a step makes far
  /// more of a text than any published normalizer does, or exceeds `budget`.
  void normalize(MarkedText& text, SearchBudget& budget) const;
  std::string normalize(std::string text) const;

 private:
  std::vector<std::unique_ptr<const Step>> steps_;
};

}  // namespace nanovllm
