// Parses the subset of regular expressions that ClassPattern matches. Whatever is not certainly in
// the subset is left to PCRE2: every function here says "no" by returning false or nothing.
#include <optional>
#include <string>

#include "io/tokenizer/patterns/class_pattern.h"
#include "io/utf8.h"

namespace nanovllm {

class ClassPatternParser {
 public:
  ClassPatternParser(std::string_view regex, ClassPattern& pattern)
      : rest_(regex), pattern_(pattern) {}

  bool parse() {
    do {
      ClassPattern::Sequence sequence;
      while (!rest_.empty() && rest_.front() != '|')
        if (!parse_item(sequence)) return false;
      if (sequence.size() > ClassPattern::kMaxItems || pattern_.can_be_empty(sequence))
        return false;
      pattern_.alternatives_.push_back(std::move(sequence));
    } while (take("|"));
    return rest_.empty() && pattern_.alternatives_.size() <= ClassPattern::kMaxAlternatives;
  }

 private:
  using Item = ClassPattern::Item;

  bool take(std::string_view prefix) {
    if (!rest_.starts_with(prefix)) return false;
    rest_.remove_prefix(prefix.size());
    return true;
  }

  char32_t take_char() {
    const DecodedChar c = decode_utf8(rest_.data());
    rest_.remove_prefix(c.length);
    return c.value;
  }

  bool parse_item(ClassPattern::Sequence& sequence) {
    Item item;
    if (take("(?!")) {
      item.kind = ClassPattern::ItemKind::not_ahead;
      if (!parse_class(item.char_class) || !take(")")) return false;
    } else if (rest_.front() == '(') {
      item.kind = ClassPattern::ItemKind::choice;
      if (!parse_choice(item)) return false;
      if (take("?")) item.min = 0;
      if (at_quantifier()) return false;
    } else {
      if (!parse_class(item.char_class) || !parse_quantifier(item)) return false;
    }
    sequence.push_back(std::move(item));
    return true;
  }

  bool at_quantifier() const {
    return !rest_.empty() && std::string_view("?*+{").find(rest_.front()) != std::string_view::npos;
  }

  bool parse_quantifier(Item& item) {
    if (!at_quantifier()) return true;
    const char symbol = rest_.front();
    rest_.remove_prefix(1);
    if (symbol == '{') return parse_counts(item) && !at_quantifier();
    item.min = symbol == '+' ? 1 : 0;
    item.max = symbol == '?' ? 1 : ClassPattern::kUnbounded;
    item.possessive = take("+");
    return !at_quantifier();
  }

  /// "2}", "1,3}" or "1,}"
  bool parse_counts(Item& item) {
    const auto min = parse_number();
    if (!min) return false;
    item.min = item.max = *min;
    if (take(",")) {
      const auto max = parse_number();
      item.max = max ? *max : ClassPattern::kUnbounded;
    }
    return item.max > 0 && item.max >= item.min && take("}");
  }

  std::optional<size_t> parse_number() {
    size_t value = 0, digits = 0;
    while (digits < rest_.size() && rest_[digits] >= '0' && rest_[digits] <= '9')
      value = value * 10 + static_cast<size_t>(rest_[digits++] - '0');
    if (digits == 0 || digits > 4) return std::nullopt;
    rest_.remove_prefix(digits);
    return value;
  }

  /// "(?:...)", "(?i:...)" or "(...)" around fixed strings.
  bool parse_choice(Item& item) {
    const bool fold = take("(?i:");
    if (!fold && !take("(?:") && (!take("(") || rest_.starts_with("?"))) return false;
    do {
      std::vector<CharClass> option;
      std::string spelled;  // ASCII letters in lower case
      while (!rest_.empty() && rest_.front() != '|' && rest_.front() != ')') {
        if (fold ? !parse_folded(option.emplace_back(), spelled)
                 : !parse_class(option.emplace_back()))
          return false;
        if (at_quantifier()) return false;
      }
      if (option.empty()) return false;
      // Without case, "ss" would also match U+00DF, "fi" a ligature, and so on.
      for (const char* pair : {"ss", "st", "ff", "fi", "fl"})
        if (spelled.find(pair) != std::string::npos) return false;
      item.options.push_back(std::move(option));
    } while (take("|"));
    return take(")");
  }

  /// One literal character of a case-insensitive string.
  bool parse_folded(CharClass& out, std::string& spelled) {
    const char c = rest_.front();
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!letter && c != '\'') return false;
    rest_.remove_prefix(1);
    const auto upper = static_cast<char32_t>(letter ? c & ~0x20 : c);
    const auto lower = static_cast<char32_t>(letter ? c | 0x20 : c);
    out.add(upper, upper);
    out.add(lower, lower);
    if (lower == 's') out.add(0x17F, 0x17F);    // long s
    if (lower == 'k') out.add(0x212A, 0x212A);  // Kelvin sign
    out.finish(pattern_.categories_);
    spelled.push_back(static_cast<char>(lower));
    return true;
  }

  /// A literal character, an escape, a property or a bracket expression.
  bool parse_class(CharClass& out) {
    if (rest_.empty()) return false;
    bool ok = false;
    if (take("[")) {
      ok = parse_bracket(out);
    } else if (rest_.front() == '\\') {
      ok = parse_escape(out, true).has_value();
    } else if (take(".")) {
      out.add('\n', '\n');
      out.negate();
      ok = true;
    } else if (std::string_view("^$()?*+{}|]").find(rest_.front()) == std::string_view::npos) {
      const char32_t c = take_char();
      out.add(c, c);
      ok = true;
    }
    out.finish(pattern_.categories_);
    return ok;
  }

  /// Parses the class that follows "[".
  bool parse_bracket(CharClass& out) {
    const bool negated = take("^");
    bool empty = true;
    while (!take("]")) {
      if (rest_.empty() || rest_.front() == '[' || rest_.starts_with("&&")) return false;
      const auto first = parse_member(out);
      if (!first) return false;
      empty = false;
      if (*first == kWholeClass || !rest_.starts_with("-") || rest_.starts_with("-]")) {
        if (*first != kWholeClass) out.add(*first, *first);
        continue;
      }
      rest_.remove_prefix(1);
      if (rest_.empty() || rest_.front() == '[') return false;
      const auto last = parse_member(out);
      if (!last || *last == kWholeClass || *last < *first) return false;
      out.add(*first, *last);
    }
    if (negated) out.negate();
    return !empty;
  }

  /// A character of a bracket expression, or kWholeClass where the member is a class and already
  /// added.
  std::optional<char32_t> parse_member(CharClass& out) {
    return rest_.front() == '\\' ? parse_escape(out, false) : take_char();
  }

  /// Parses the escape that follows a backslash. Outside brackets the character is added to `out`
  /// and a class may be negated.
  std::optional<char32_t> parse_escape(CharClass& out, bool alone) {
    rest_.remove_prefix(1);
    if (rest_.empty()) return std::nullopt;
    const char32_t c = take_char();
    if (c == 's' || (c == 'S' && alone)) {
      out.add_white_space();
      if (c == 'S') out.negate();
      return kWholeClass;
    }
    if (c == 'd') {
      out.add_categories(category_bit(Category::Nd));
      return kWholeClass;
    }
    if (c == 'p' || (c == 'P' && alone)) {
      const size_t close = rest_.find('}');
      if (!take("{") || close == std::string_view::npos) return std::nullopt;
      const uint32_t categories = categories_named(rest_.substr(0, close - 1));
      if (categories == 0) return std::nullopt;
      rest_.remove_prefix(close);
      out.add_categories(categories);
      if (c == 'P') out.negate();
      return kWholeClass;
    }
    const auto literal = literal_escape(c);
    if (literal && alone) out.add(*literal, *literal);
    return literal;
  }

  static std::optional<char32_t> literal_escape(char32_t c) {
    if (c == 'n') return U'\n';
    if (c == 'r') return U'\r';
    if (c == 't') return U'\t';
    const bool alphanumeric =
        (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (alphanumeric || c >= 0x80) return std::nullopt;
    return c;
  }

  static constexpr char32_t kWholeClass = 0xFFFFFFFF;

  std::string_view rest_;
  ClassPattern& pattern_;
};

std::unique_ptr<ClassPattern> ClassPattern::parse(std::string_view regex,
                                                  const CategoryTable& categories) {
  std::unique_ptr<ClassPattern> pattern(new ClassPattern(categories));
  if (regex.empty() || !ClassPatternParser(regex, *pattern).parse()) return nullptr;
  pattern->index_first_characters();
  return pattern;
}

}  // namespace nanovllm
