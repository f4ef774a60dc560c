// Normalizers: what tokenizer.json does to a text before splitting it.
#pragma once

#include <memory>
#include <string>

#include "io/tokenizer/entry.h"
#include "io/tokenizer/patterns/unicode.h"

namespace nanovllm {

/// Immutable and thread-safe.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  /// `text` and the result are valid UTF-8.
  virtual std::string normalize(std::string text) const = 0;
};

/// Throws Error(model) for a kind that is not known. `categories` must outlive the normalizer.
std::unique_ptr<Normalizer> make_normalizer(const Entry& entry, const CategoryTable& categories);

}  // namespace nanovllm
