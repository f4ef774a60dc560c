#include "constrain/regex.h"

#include <algorithm>
#include <optional>

#include "constrain/limits.h"
#include "core/check.h"
#include "io/json.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

const CharSet kDigit{{'0', '9'}};
const CharSet kWord{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const CharSet kSpace{{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                     {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                     {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
const CharSet kLineEnd{{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

std::optional<unsigned> hex_digit(char c) {
  if (c >= '0' && c <= '9') return static_cast<unsigned>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<unsigned>(c - 'a' + 10);
  if (c >= 'A' && c <= 'F') return static_cast<unsigned>(c - 'A' + 10);
  return std::nullopt;
}

class RegexParser {
 public:
  RegexParser(std::string_view pattern, std::string_view what) : pattern_(pattern), what_(what) {
    if (pattern.size() > kMaxPatternBytes)
      refuse("has {} bytes, the limit kMaxPatternBytes is {}", pattern.size(), kMaxPatternBytes);
    if (find_invalid_utf8(pattern) != std::string_view::npos) refuse("is not valid UTF-8");
  }

  Expr parse() {
    Expr e = alternatives(0);
    if (at_ < pattern_.size()) refuse("has a ) without its ( at byte {}", at_);
    return e;
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorKind::invalid_argument, "{}: the regular expression {} {}", what_, quote(pattern_),
         fmt::format(format, std::forward<Args>(args)...));
  }

  bool more() const { return at_ < pattern_.size(); }
  char peek() const { return more() ? pattern_[at_] : '\0'; }
  bool take(std::string_view expected) {
    if (pattern_.substr(at_, expected.size()) != expected) return false;
    at_ += expected.size();
    return true;
  }
  char32_t next_char() {
    if (!more()) refuse("ends too early");
    const DecodedChar c = decode_utf8(pattern_.data() + at_);
    at_ += c.length;
    return c.value;
  }

  Expr alternatives(int depth) {
    if (depth > kMaxStructureDepth)
      refuse("nests groups deeper than kMaxStructureDepth, {}", kMaxStructureDepth);
    std::vector<Expr> branches;
    do {
      std::vector<Expr> parts;
      while (more() && peek() != '|' && peek() != ')') parts.push_back(quantified(depth));
      branches.push_back(sequence(std::move(parts)));
    } while (take("|"));
    return choice(std::move(branches));
  }

  Expr quantified(int depth) {
    Expr e = atom(depth);
    bool counted = false;
    while (true) {
      int64_t min = 0, max = kUnbounded;
      if (take("*")) {
      } else if (take("+")) {
        min = 1;
      } else if (take("?")) {
        max = 1;
      } else if (peek() == '{') {
        read_counts(min, max);
      } else {
        return e;
      }
      if (counted || e.kind == Expr::Kind::begin || e.kind == Expr::Kind::end)
        refuse("has nothing to repeat at byte {}", at_);
      counted = true;
      if (peek() == '+') refuse("has a possessive quantifier at byte {}", at_);
      take("?");  // which of several matches it is does not change the texts that match
      // (a*)* is a*
      if (min == 0 && max == kUnbounded && e.kind == Expr::Kind::repeat && e.min <= 1 &&
          e.max == kUnbounded)
        e.min = 0;
      else
        e = repeat(std::move(e), min, max);
    }
  }

  void read_counts(int64_t& min, int64_t& max) {
    const size_t begin = at_++;
    const auto number = [&]() -> std::optional<int64_t> {
      if (peek() < '0' || peek() > '9') return std::nullopt;
      int64_t value = 0;
      while (peek() >= '0' && peek() <= '9') {
        value = value * 10 + (pattern_[at_++] - '0');
        if (value > kMaxRepetitions)
          refuse("repeats more often than kMaxRepetitions, {}", kMaxRepetitions);
      }
      return value;
    };
    const auto least = number();
    if (!least) refuse("has a {{ at byte {} that is no count: write \\{{ for the character", begin);
    min = max = *least;
    if (take(",")) max = number().value_or(kUnbounded);
    if (!take("}")) refuse("has a count without its }} at byte {}", begin);
    if (max != kUnbounded && max < min) refuse("has a count whose limits are in the wrong order");
  }

  Expr atom(int depth) {
    const char c = peek();
    if (take("^")) return {.kind = Expr::Kind::begin};
    if (take("$")) return {.kind = Expr::Kind::end};
    if (take(".")) return one_of(kLineEnd.complement());
    if (take("(")) {
      open_group();
      Expr e = alternatives(depth + 1);
      if (!take(")")) refuse("has a ( without its )");
      return e;
    }
    if (take("[")) return one_of(char_class());
    if (c == '*' || c == '+' || c == '?' || c == '{')
      refuse("has nothing to repeat at byte {}", at_);
    if (c == '\\') {
      CharSet set;
      escape(set, false);
      return one_of(std::move(set));
    }
    const char32_t value = next_char();
    return one_of({{value, value}});
  }

  void open_group() {
    if (!take("?")) return;
    if (take(":")) return;
    for (const char* look : {"=", "!", "<=", "<!"})
      if (take(look)) refuse("looks around with (?{}, which a grammar cannot", look);
    if (!take("<") && !take("P<")) refuse("has a group (? of an unknown kind at byte {}", at_);
    while (more() && peek() != '>' && peek() != ')') ++at_;
    if (!take(">")) refuse("has a group whose name does not end");
  }

  CharSet char_class() {
    const bool negated = take("^");
    CharSet set;
    while (!take("]")) {
      if (!more()) refuse("has a [ without its ]");
      const auto first = class_member(set);
      if (peek() != '-' || pattern_.substr(at_, 2) == "-]") {
        if (first) set.add(*first, *first);
        continue;
      }
      take("-");
      if (!more()) refuse("has a [ without its ]");
      const auto last = class_member(set);
      if (!first || !last || *last < *first)
        refuse("has a range in [] that is none, before byte {}", at_);
      set.add(*first, *last);
    }
    return negated ? set.complement() : set;
  }

  // A character, or nothing where an escape like \d was added to the set.
  std::optional<char32_t> class_member(CharSet& set) {
    if (peek() == '\\') return escape(set, true);
    if (pattern_.substr(at_, 2) == "[:") refuse("has a POSIX class [: at byte {}", at_);
    return next_char();
  }

  // Adds what an escape stands for to `set`; in a class one character is returned instead.
  std::optional<char32_t> escape(CharSet& set, bool in_class) {
    const size_t begin = at_++;
    const char32_t c = next_char();
    const auto character = [&](char32_t value) -> std::optional<char32_t> {
      if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF))
        refuse("has an escape of no character at byte {}", begin);
      if (in_class) return value;
      set.add(value, value);
      return std::nullopt;
    };
    const auto add = [&](const CharSet& known, bool others) -> std::optional<char32_t> {
      set.add(others ? known.complement() : known);
      return std::nullopt;
    };
    switch (c) {
      case 'd':
      case 'D':
        return add(kDigit, c == 'D');
      case 'w':
      case 'W':
        return add(kWord, c == 'W');
      case 's':
      case 'S':
        return add(kSpace, c == 'S');
      case 't':
        return character('\t');
      case 'n':
        return character('\n');
      case 'r':
        return character('\r');
      case 'f':
        return character('\f');
      case 'v':
        return character('\v');
      case 'x':
        return character(hex(2));
      case 'u':
        return character(unicode());
      case '0':
        if (peek() < '0' || peek() > '9') return character(0);
        break;
      case 'c': {
        const char32_t letter = next_char();
        if ((letter | 0x20) >= 'a' && (letter | 0x20) <= 'z') return character(letter & 0x1F);
        break;
      }
      case 'b':
        if (in_class) return character('\b');
        break;
      default:
        if (c < 0x80 && !kWord.contains(c)) return character(c);
    }
    refuse("has {} at byte {}, which is not supported", quote(pattern_.substr(begin, at_ - begin)),
           begin);
  }

  char32_t hex(int digits) {
    char32_t value = 0;
    for (int i = 0; i < digits; ++i) {
      const auto digit = hex_digit(peek());
      if (!digit) refuse("has a hexadecimal escape that ends early, at byte {}", at_);
      value = value * 16 + *digit;
      ++at_;
    }
    return value;
  }

  char32_t unicode() {
    if (take("{")) {
      char32_t value = 0;
      while (const auto digit = hex_digit(peek())) {
        value = std::min<char32_t>(value * 16 + *digit, 0x110000);
        ++at_;
      }
      if (!take("}")) refuse("has a \\u{{ without its }}");
      return value;
    }
    const char32_t value = hex(4);
    if (value < 0xD800 || value > 0xDBFF || !take("\\u")) return value;
    const char32_t low = hex(4);
    if (low < 0xDC00 || low > 0xDFFF) refuse("has half a surrogate pair");
    return 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00);
  }

  const std::string_view pattern_, what_;
  size_t at_ = 0;
};

bool has_anchor(const Expr& e) {
  return e.kind == Expr::Kind::begin || e.kind == Expr::Kind::end ||
         std::ranges::any_of(e.parts, has_anchor);
}

/// The size that counts expand to.
int64_t expanded_size(const Expr& e) {
  int64_t size = e.parts.empty() ? 1 : 0;
  for (const Expr& part : e.parts) size = std::min(size + expanded_size(part), kMaxRepetitions + 1);
  if (e.kind == Expr::Kind::repeat) size *= std::max<int64_t>({e.min, e.max, 1});
  return std::min(size, kMaxRepetitions + 1);
}

struct Branch {
  bool from_begin = false, to_end = false;
  Expr body{};
};

// One branch for each way through the choices that hold anchors.
void split(const Expr& e, bool from_begin, bool to_end, std::vector<Branch>& into) {
  check(into.size() < kMaxAlternatives, ErrorKind::invalid_argument,
        "the regular expression has more than kMaxAlternatives, {}, branches with ^ or $",
        kMaxAlternatives);
  if (!has_anchor(e)) return into.push_back({from_begin, to_end, e});
  if (e.kind == Expr::Kind::begin) return into.push_back({true, to_end, {}});
  if (e.kind == Expr::Kind::end) return into.push_back({from_begin, true, {}});
  if (e.kind == Expr::Kind::choice) {
    for (const Expr& part : e.parts) split(part, from_begin, to_end, into);
    return;
  }
  check(e.kind == Expr::Kind::sequence, ErrorKind::invalid_argument,
        "the regular expression repeats ^ or $, which a grammar cannot");
  const auto with = [&](size_t place, const Expr& part) {
    std::vector<Expr> parts = e.parts;
    parts[place] = part;
    return parts;
  };
  const auto split_at = [&](size_t place, const Expr& parent) {
    for (const Expr& part : parent.parts)
      split({.kind = Expr::Kind::sequence, .parts = with(place, part)}, from_begin, to_end, into);
  };
  // Sequences in sequences become one.
  for (size_t i = 0; i < e.parts.size(); ++i) {
    if (e.parts[i].kind != Expr::Kind::sequence || !has_anchor(e.parts[i])) continue;
    std::vector<Expr> parts(e.parts.begin(), e.parts.begin() + static_cast<std::ptrdiff_t>(i));
    parts.insert(parts.end(), e.parts[i].parts.begin(), e.parts[i].parts.end());
    parts.insert(parts.end(), e.parts.begin() + static_cast<std::ptrdiff_t>(i) + 1, e.parts.end());
    return split({.kind = Expr::Kind::sequence, .parts = std::move(parts)}, from_begin, to_end,
                 into);
  }
  for (size_t i = 0; i < e.parts.size(); ++i)
    if (e.parts[i].kind == Expr::Kind::choice && has_anchor(e.parts[i]))
      return split_at(i, e.parts[i]);
  std::vector<Expr> parts = e.parts;
  if (parts.front().kind == Expr::Kind::begin) {
    from_begin = true;
    parts.erase(parts.begin());
  }
  if (!parts.empty() && parts.back().kind == Expr::Kind::end) {
    to_end = true;
    parts.pop_back();
  }
  if (parts.size() < e.parts.size())
    return split(sequence(std::move(parts)), from_begin, to_end, into);
  fail(ErrorKind::invalid_argument,
       "the regular expression has ^ or $ in its middle, which a grammar cannot");
}

Expr whole_text(Expr e, std::string_view what, bool search) {
  check(expanded_size(e) <= kMaxRepetitions, ErrorKind::invalid_argument,
        "{}: the regular expression's counts expand to more than kMaxRepetitions, {}", what,
        kMaxRepetitions);
  std::vector<Branch> branches;
  split(e, !search, !search, branches);
  std::vector<Expr> choices;
  for (Branch& branch : branches) {
    const Expr any = repeat(one_of(CharSet::any()), 0, kUnbounded);
    std::vector<Expr> parts;
    if (!branch.from_begin) parts.push_back(any);
    parts.push_back(std::move(branch.body));
    if (!branch.to_end) parts.push_back(any);
    choices.push_back(sequence(std::move(parts)));
  }
  return choice(std::move(choices));
}

}  // namespace

Expr parse_regex(std::string_view pattern, std::string_view what) {
  return whole_text(RegexParser(pattern, what).parse(), what, false);
}

Expr parse_regex_search(std::string_view pattern, std::string_view what) {
  return whole_text(RegexParser(pattern, what).parse(), what, true);
}

}  // namespace nanovllm
