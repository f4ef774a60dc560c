// UTF-8 and Unicode character properties, as the reference library's regular expressions see them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nanovllm {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

struct DecodedChar {
  char32_t value;
  size_t length;  // bytes
};

/// Decodes the character at `at`; the text must be valid UTF-8.
inline DecodedChar decode_utf8(const char* at) {
  const auto byte = [at](int i) {
    return static_cast<char32_t>(static_cast<unsigned char>(at[i]));
  };
  const char32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xE0) return {(lead & 0x1F) << 6 | (byte(1) & 0x3F), 2};
  if (lead < 0xF0) return {(lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F), 3};
  return {(lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F),
          4};
}

inline bool is_utf8_continuation(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}

/// Length in bytes of the longest prefix that is ASCII.
size_t ascii_prefix(std::string_view text);

void append_utf8(std::string& out, char32_t character);

/// Offset of the first byte that is not part of a valid UTF-8 character; npos where all is valid.
size_t find_invalid_utf8(std::string_view text);

/// Appends `bytes` as UTF-8, with one U+FFFD for each maximal ill-formed part (the practice the
/// Unicode standard recommends in section 3.9, and what Rust's from_utf8_lossy does). Unless
/// `at_end`, an incomplete character at the end is left alone. Returns the number of bytes used.
size_t append_utf8_lossy(std::string& out, std::string_view bytes, bool at_end);

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

/// Unicode normalization in O(n log n), also for long runs of combining marks.
std::string normalize_unicode(std::string_view text, NormalForm form);

}  // namespace nanovllm
