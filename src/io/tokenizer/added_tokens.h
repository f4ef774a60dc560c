// Added tokens: texts that are found before the model sees the rest, such as "<|im_end|>".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/tokenizer/entry.h"
#include "io/tokenizer/patterns/string_matcher.h"
#include "io/tokenizer/stages/normalizer.h"
#include "io/tokenizer/vocabulary.h"

namespace nanovllm {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  std::string decoded;       // what it decodes to: as the reference library, the normalized content
  bool single_word = false;  // only where no letter or digit is its neighbour
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;   // looked for in the normalized text
  bool special = false;
};

class AddedTokens {
 public:
  /// A part of the text: an added token or, without an id, text for the model.
  struct Part {
    std::string_view text;
    std::optional<int32_t> id;
  };

  /// Reads the list `added_tokens`. Throws Error(model) for ids or texts that contradict each other
  /// or `vocabulary`. `categories` must outlive the object; `normalizer` may be null.
  AddedTokens(const std::vector<Entry>& entries, const Vocabulary& vocabulary,
              const Normalizer* normalizer, const CategoryTable& categories);

  const std::vector<AddedToken>& tokens() const { return tokens_; }

  /// Appends the parts of a raw text, then of a normalized one; none is empty. No special token is
  /// found in literal bytes. Linear.
  void split_raw(std::string_view text, const ByteMarks& literal, bool parse_special,
                 std::vector<Part>& parts) const {
    split(raw_, text, literal, parse_special, parts);
  }
  void split_normalized(std::string_view text, const ByteMarks& literal, bool parse_special,
                        std::vector<Part>& parts) const {
    split(normalized_, text, literal, parse_special, parts);
  }
  bool has_normalized() const { return !normalized_.tokens.empty(); }

 private:
  struct Group {
    StringMatcher matcher;
    std::vector<size_t> tokens;  // by the matcher's index: index into tokens_
  };
  void add(const Entry& entry, const Vocabulary& vocabulary, Vocabulary& seen);
  void split(const Group& group, std::string_view text, const ByteMarks& literal,
             bool parse_special, std::vector<Part>& parts) const;
  bool stands_alone(std::string_view text, const Span& span) const;
  size_t spaces_before(std::string_view text, size_t begin, size_t limit) const;
  size_t spaces_after(std::string_view text, size_t end) const;

  const CategoryTable& categories_;
  std::vector<AddedToken> tokens_;
  Group raw_;
  Group normalized_;
};

}  // namespace nanovllm
