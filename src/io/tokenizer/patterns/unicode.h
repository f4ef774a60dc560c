// Unicode character properties, as the reference library's regular expressions see them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/tokenizer/marked_text.h"

namespace nanovllm {

/// Unicode's general categories, and one of our own: U+0085, the only control character outside
/// ASCII that is white space.
enum class Category : uint8_t {
  // clang-format off
  Cn, Lu, Ll, Lt, Lm, Lo, Mn, Mc, Me, Nd, Nl, No, Pc, Pd, Ps, Pe, Pi, Pf, Po,
  Sm, Sc, Sk, So, Zs, Zl, Zp, Cc, Cf, Cs, Co, NextLine,
  // clang-format on
};

constexpr uint32_t category_bit(Category category) {
  return uint32_t{1} << static_cast<uint32_t>(category);
}

/// The set of categories a property name stands for ("L", "Lu", "N" ...); 0 for an unknown name.
uint32_t categories_named(std::string_view name);

/// General categories of Unicode 16.0, which the reference library's regular expressions use,
/// whatever version the installed utf8proc knows (14.0 or newer).
class CategoryTable {
 public:
  CategoryTable();
  Category category(char32_t character) const {
    return character < kTableSize ? table_[character] : look_up(character);
  }
  bool is_white_space(char32_t character) const;
  /// Letters, marks, decimal digits, connectors: what `\w` means to the reference library.
  bool is_word(char32_t character) const;

 private:
  static constexpr char32_t kTableSize = 0x20000;
  static Category look_up(char32_t character);
  std::vector<Category> table_;
  uint32_t word_categories_;
};

/// Full lower case of one character, appended to `out` (U+0130 becomes two characters).
void append_lower(std::string& out, char32_t character);

enum class NormalForm { nfc, nfd, nfkc, nfkd };

/// Unicode normalization in O(n log n), also for long runs of combining marks. Where a character is
/// literal, so is what becomes of it and of the characters beside it outside ASCII.
MarkedText normalize_unicode(const MarkedText& text, NormalForm form);

}  // namespace nanovllm
