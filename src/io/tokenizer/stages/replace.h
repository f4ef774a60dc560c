// "Replace", which tokenizer.json has as a normalizer and as a decoder.
#pragma once

#include <memory>
#include <string>

#include "io/tokenizer/entry.h"
#include "io/tokenizer/marked_text.h"
#include "io/tokenizer/patterns/pattern.h"

namespace nanovllm {

/// The pattern of an entry: {"String": "..."} or {"Regex": "..."} under the key "pattern".
std::unique_ptr<Pattern> make_pattern(const Entry& entry, const CategoryTable& categories);

class Replacement {
 public:
  /// Throws Error(model). `categories` must outlive the object.
  Replacement(const Entry& entry, const CategoryTable& categories);
  /// Replaces every match. Throws Error(invalid_argument) where more than `max_bytes` would come of
  /// it.
  void apply(MarkedText& text, SearchBudget& budget, size_t max_bytes) const;
  /// At most so many bytes come of one.
  double growth() const { return growth_; }

 private:
  std::unique_ptr<Pattern> pattern_;
  std::string content_;
  double growth_;
};

}  // namespace nanovllm
