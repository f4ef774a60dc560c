// Pre-tokenizers: cut a normalized text into the pieces that the model encodes one by one.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/tokenizer/byte_level.h"
#include "io/tokenizer/entry.h"
#include "io/tokenizer/patterns/pattern.h"

namespace nanovllm {

/// A text and its pieces. A step that changes the text keeps the new one in `storage`.
struct Pieces {
  std::string_view text;
  std::string storage;
  std::vector<Span> spans;   // none empty
  bool starts_input = true;  // the text begins where the user's input begins
};

/// One step; immutable and thread-safe.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual void apply(Pieces& pieces, SearchBudget& budget) const = 0;
};

struct PreTokenizerChain {
  std::vector<std::unique_ptr<PreTokenizer>> steps;
  /// The last step turns pieces into the byte alphabet. It is left out of `steps`: the model reads
  /// the bytes themselves.
  bool byte_level = false;
};

/// Throws Error(model) for a kind that is not known. `categories` and `alphabet` must outlive the
/// chain.
PreTokenizerChain make_pre_tokenizers(const Entry& entry, const CategoryTable& categories,
                                      const ByteAlphabet& alphabet);

}  // namespace nanovllm
