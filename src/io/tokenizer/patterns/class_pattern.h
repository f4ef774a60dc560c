// A matcher for the regular expressions that published pre-tokenizers use (GPT-2, Llama 3, Qwen,
// DeepSeek, GPT-4o ...).
//
// They all are alternatives of short sequences of items, where an item is a character class with a
// quantifier, a choice of fixed strings such as (?i:'s|'t), or a negative look-ahead at one
// character. Matching is backtracking as Perl and Oniguruma define it, but over a handful of items
// in a fixed array: no recursion, no allocation, bounded work.
#pragma once

#include <array>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "io/tokenizer/patterns/char_class.h"
#include "io/tokenizer/patterns/pattern.h"

namespace nanovllm {

class ClassPattern final : public Pattern {
 public:
  /// Null where the expression uses more than this matcher knows. `categories` must outlive the
  /// pattern.
  static std::unique_ptr<ClassPattern> parse(std::string_view regex,
                                             const CategoryTable& categories);

  void find_all(std::string_view text, std::vector<Span>& matches,
                SearchBudget& budget) const override;

 private:
  friend class ClassPatternParser;

  static constexpr size_t kMaxItems = 16;
  static constexpr size_t kMaxAlternatives = 32;
  static constexpr size_t kUnbounded = std::numeric_limits<size_t>::max();

  enum class ItemKind { repeat, choice, not_ahead };
  struct Item {
    ItemKind kind = ItemKind::repeat;
    CharClass char_class;  // repeat, not_ahead
    size_t min = 1;        // repeat; for a choice 0 makes it optional
    size_t max = 1;        // repeat
    bool possessive = false;
    std::vector<std::vector<CharClass>> options;  // choice: fixed strings, tried in order
  };
  using Sequence = std::vector<Item>;

  /// Where an item stands while its sequence is being matched.
  struct Frame {
    size_t shortest;  // repeat: the end after `min` characters
    size_t end;
    size_t option;  // choice
  };

  explicit ClassPattern(const CategoryTable& categories) : categories_(categories) {}
  void index_first_characters();
  bool can_start_with(const Sequence& sequence, size_t character) const;
  bool can_be_empty(const Sequence& sequence) const;

  /// End of the match of `sequence` at `begin`, or npos.
  size_t match(const Sequence& sequence, std::string_view text, size_t begin,
               SearchBudget& budget) const;
  bool enter(const Item& item, std::string_view text, size_t at, Frame& frame) const;
  bool retreat(const Item& item, std::string_view text, size_t begin, Frame& frame) const;
  bool enter_choice(const Item& item, std::string_view text, size_t at, size_t first_option,
                    Frame& frame) const;

  const CategoryTable& categories_;
  std::vector<Sequence> alternatives_;
  /// Bit i of [c]: alternative i can start with ASCII character c; the last entry is for all
  /// others.
  std::array<uint32_t, 129> starts_{};
};

}  // namespace nanovllm
