// "Replace", which tokenizer.json has as a normalizer and as a decoder.
#pragma once

#include <memory>
#include <string>

#include "io/tokenizer/entry.h"
#include "io/tokenizer/patterns/pattern.h"

namespace nanovllm {

/// The pattern of an entry: {"String": "..."} or {"Regex": "..."} under the key "pattern".
std::unique_ptr<Pattern> make_pattern(const Entry& entry, const CategoryTable& categories);

class Replacement {
 public:
  /// Throws Error(model). `categories` must outlive the object.
  Replacement(const Entry& entry, const CategoryTable& categories);
  /// Replaces every match.
  std::string apply(std::string text) const;

 private:
  std::unique_ptr<Pattern> pattern_;
  std::string content_;
};

}  // namespace nanovllm
