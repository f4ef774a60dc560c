#include "io/tokenizer/patterns/unicode.h"

#include <algorithm>

#include <utf8proc.h>

#include "core/check.h"
#include "io/tokenizer/patterns/unicode_newer.h"
#include "io/utf8.h"

namespace nanovllm {

uint32_t categories_named(std::string_view name) {
  static constexpr std::string_view kNames =
      "CnLuLlLtLmLoMnMcMeNdNlNoPcPdPsPePiPfPoSmScSkSoZsZlZpCcCfCsCo";
  uint32_t categories = 0;
  for (uint32_t i = 0; i < kNames.size() / 2; ++i) {
    const std::string_view category = kNames.substr(size_t{2} * i, 2);
    if (name == category || name == category.substr(0, 1)) categories |= uint32_t{1} << i;
  }
  if (categories & category_bit(Category::Cc)) categories |= category_bit(Category::NextLine);
  return categories;
}

CategoryTable::CategoryTable()
    : table_(kTableSize),
      word_categories_(categories_named("L") | categories_named("M") | categories_named("Nd") |
                       categories_named("Nl") | categories_named("Pc")) {
  for (char32_t c = 0; c < kTableSize; ++c)
    table_[c] = static_cast<Category>(utf8proc_category(static_cast<utf8proc_int32_t>(c)));
  for (const NewerRange& range : kNewerThanUnicode14)
    for (char32_t c = range.first; c <= range.last && c < kTableSize; ++c)
      table_[c] = range.category;
  table_[0x85] = Category::NextLine;
}

Category CategoryTable::look_up(char32_t character) {
  for (const NewerRange& range : kNewerThanUnicode14)
    if (character >= range.first && character <= range.last) return range.category;
  return static_cast<Category>(utf8proc_category(static_cast<utf8proc_int32_t>(character)));
}

bool CategoryTable::is_white_space(char32_t character) const {
  if (character < 0x80) return character == ' ' || (character >= '\t' && character <= '\r');
  constexpr uint32_t kSpaces = category_bit(Category::Zs) | category_bit(Category::Zl) |
                               category_bit(Category::Zp) | category_bit(Category::NextLine);
  return category_bit(category(character)) & kSpaces;
}

bool CategoryTable::is_word(char32_t character) const {
  if (category_bit(category(character)) & word_categories_) return true;
  // Join controls, and the circled or squared letters that count as alphabetic.
  constexpr std::array<std::array<char32_t, 2>, 5> kOthers = {{{0x200C, 0x200D},
                                                               {0x24B6, 0x24E9},
                                                               {0x1F130, 0x1F149},
                                                               {0x1F150, 0x1F169},
                                                               {0x1F170, 0x1F189}}};
  return std::any_of(kOthers.begin(), kOthers.end(), [character](const auto& range) {
    return character >= range[0] && character <= range[1];
  });
}

void append_lower(std::string& out, char32_t character) {
  if (character == 0x130) {  // the only unconditional mapping to two characters
    out += "i\xCC\x87";
    return;
  }
  for (const NewerLowerRange& range : kNewerLowerCase)
    if (character >= range.first && character <= range.last)
      return append_utf8(out, range.lower + (character - range.first));
  append_utf8(out,
              static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(character))));
}

namespace {

template <class Ranges>
bool in_sorted_ranges(const Ranges& ranges, char32_t character) {
  const auto at = std::upper_bound(ranges.begin(), ranges.end(), character,
                                   [](char32_t c, const auto& range) { return c < range.first; });
  return at != ranges.begin() && character <= std::prev(at)->last;
}

/// Characters that normalization must not touch, nor look across: those the reference library's
/// (older) tables do not know, and U+11A7, which lies before the Hangul final consonants and which
/// utf8proc composes with a syllable as if it were one.
bool is_inert(char32_t character) {
  return character == 0x11A7 || in_sorted_ranges(kInertInNormalization, character) ||
         in_sorted_ranges(kNewerThanUnicode14, character);
}

int combining_class(int32_t character) { return utf8proc_get_property(character)->combining_class; }

void append_decomposed(std::vector<int32_t>& out, char32_t character, utf8proc_option_t options) {
  std::array<int32_t, 32> buffer;  // the longest decomposition has 18 characters
  int last_boundary = 0;
  const auto count = utf8proc_decompose_char(
      static_cast<utf8proc_int32_t>(character), buffer.data(),
      static_cast<utf8proc_ssize_t>(buffer.size()), options, &last_boundary);
  check(count >= 0 && static_cast<size_t>(count) <= buffer.size(), "cannot decompose U+{:04X}",
        static_cast<uint32_t>(character));
  out.insert(out.end(), buffer.begin(), buffer.begin() + count);
}

/// Canonical ordering from `first` on. utf8proc's own is quadratic in the length of a run of marks.
void order_marks(std::vector<int32_t>& characters, size_t first) {
  for (auto at = characters.begin() + static_cast<std::ptrdiff_t>(first); at != characters.end();) {
    if (combining_class(*at) == 0) {
      ++at;
      continue;
    }
    const auto end =
        std::find_if(at, characters.end(), [](int32_t c) { return combining_class(c) == 0; });
    std::stable_sort(at, end,
                     [](int32_t a, int32_t b) { return combining_class(a) < combining_class(b); });
    at = end;
  }
}

}  // namespace

MarkedText normalize_unicode(const MarkedText& marked, NormalForm form) {
  const bool compose = form == NormalForm::nfc || form == NormalForm::nfkc;
  const bool compatibility = form == NormalForm::nfkc || form == NormalForm::nfkd;
  const auto options = static_cast<utf8proc_option_t>(
      (compatibility ? UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT : UTF8PROC_DECOMPOSE) |
      UTF8PROC_STABLE);
  const std::string_view text = marked.bytes;
  MarkedText out;
  out.bytes.reserve(text.size());
  std::string composed;
  std::vector<int32_t> characters;
  for (size_t at = 0; at < text.size();) {
    // ASCII stays as it is, but its last character may compose with the mark that follows.
    const size_t ascii = ascii_prefix(text.substr(at));
    const size_t keep = at + ascii == text.size() ? ascii : ascii - (ascii > 0);
    out.append(marked, at, at + keep);
    at += keep;
    const size_t begin = at;
    // An inert character begins a part of its own: as the first one it composes with nothing.
    characters.clear();
    bool starts_inert = false;
    for (bool first = true; at < text.size(); first = false) {
      const DecodedChar c = decode_utf8(text.data() + at);
      const bool inert = is_inert(c.value);
      if (!first && (c.value < 0x80 || inert)) break;
      if (inert) {
        characters.push_back(static_cast<int32_t>(c.value));
        starts_inert = true;
      } else {
        append_decomposed(characters, c.value, options);
      }
      at += c.length;
    }
    order_marks(characters, starts_inert);
    auto count = static_cast<utf8proc_ssize_t>(characters.size());
    if (compose) {
      const utf8proc_ssize_t inert = starts_inert;
      count = inert + utf8proc_normalize_utf32(
                          characters.data() + inert, count - inert,
                          static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
      check(count >= inert, "cannot compose a text of {} characters", characters.size());
    }
    for (utf8proc_ssize_t i = 0; i < count; ++i)
      append_utf8(composed, static_cast<char32_t>(characters[static_cast<size_t>(i)]));
    out.append(composed, marked.has_mark(begin, at));
    composed.clear();
  }
  return out;
}

}  // namespace nanovllm
