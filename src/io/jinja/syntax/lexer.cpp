#include "io/jinja/syntax/lexer.h"

#include <algorithm>
#include <cctype>
#include <charconv>

#include "core/check.h"
#include "io/jinja/runtime.h"
#include "io/jinja/text.h"
#include "io/utf8.h"

namespace nanovllm::jinja {

namespace {

bool is_digit_char(char c) { return c >= '0' && c <= '9'; }
bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}
bool is_name_char(char c) { return is_name_start(c) || is_digit_char(c); }

/// \r\n and \r become \n, as Jinja does everywhere in a template.
std::string normalize_newlines(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\r') {
      out += text[i];
    } else {
      out += '\n';
      if (i + 1 < text.size() && text[i + 1] == '\n') ++i;
    }
  }
  return out;
}

class Lexer {
 public:
  Lexer(std::string_view source, std::string_view template_name)
      : source_(normalize_newlines(source)), name_(template_name) {
    if (source_.ends_with('\n')) source_.pop_back();
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) lex_text();
    add(Token::Kind::end);
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void syntax_error(std::string message) const {
    fail(ErrorKind::model, "{}:{}: {}", name_, line_, one_line(std::move(message)));
  }

  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  bool looking_at(std::string_view text) const { return rest().starts_with(text); }

  void advance(size_t bytes) {
    const std::string_view passed = rest().substr(0, bytes);
    line_ += static_cast<int>(std::count(passed.begin(), passed.end(), '\n'));
    if (!passed.empty()) at_line_start_ = passed.back() == '\n';
    at_ += passed.size();
  }
  void skip_space() { advance(rest().size() - strip_left(rest()).size()); }

  Token& add(Token::Kind kind, std::string text = {}) {
    return tokens_.emplace_back(Token{kind, line_, std::move(text), 0, 0});
  }
  void add_data(std::string_view text) {
    if (!text.empty()) add(Token::Kind::data, std::string(text));
  }

  /// The text before a tag whose mark is `mark` ('-', '+' or 0), with the white space taken off
  /// that the tag eats.
  std::string_view trimmed_before(std::string_view text, char mark, bool is_variable) const {
    if (mark == '-') return strip_right(text);
    if (mark == '+' || is_variable) return text;
    // lstrip_blocks: a tag alone on its line eats the indentation.
    const size_t newline = text.rfind('\n');
    const size_t line_start = newline == std::string_view::npos ? 0 : newline + 1;
    if (line_start == 0 && !at_line_start_) return text;
    return strip(text.substr(line_start)).empty() ? text.substr(0, line_start) : text;
  }

  static char mark_of(std::string_view after_opening) {
    if (after_opening.empty()) return 0;
    return after_opening[0] == '-' || after_opening[0] == '+' ? after_opening[0] : char{0};
  }

  void lex_text() {
    size_t open = 0;
    const std::string_view text = rest();
    do {
      open = text.find('{', open);
      if (open == std::string_view::npos || open + 1 >= text.size()) {
        add_data(text);
        advance(text.size());
        return;
      }
      ++open;
    } while (text[open] != '%' && text[open] != '{' && text[open] != '#');
    --open;
    const char type = text[open + 1];
    const char mark = mark_of(text.substr(open + 2));
    add_data(trimmed_before(text.substr(0, open), mark, type == '{'));
    advance(open + 2 + (mark != 0 ? 1 : 0));
    if (type == '#') {
      lex_comment();
    } else if (type == '{') {
      add(Token::Kind::variable_begin);
      lex_tag(Token::Kind::variable_end, "}}");
    } else if (!lex_raw()) {
      add(Token::Kind::block_begin);
      lex_tag(Token::Kind::block_end, "%}");
    }
  }

  /// At the end of a block or comment: what follows it is trimmed by `-`, kept by `+`, else loses
  /// one newline.
  bool take_closing(std::string_view closing) {
    const bool minus = looking_at("-") && rest().substr(1).starts_with(closing);
    const bool plus = looking_at("+") && rest().substr(1).starts_with(closing);
    if (!minus && !plus && !looking_at(closing)) return false;
    advance(closing.size() + (minus || plus ? 1 : 0));
    if (minus) {
      skip_space();
    } else if (!plus && looking_at("\n")) {
      advance(1);
    }
    return true;
  }

  void lex_comment() {
    const size_t close = rest().find("#}");
    if (close == std::string_view::npos) syntax_error("missing end of comment tag");
    const char before = close > 0 ? rest()[close - 1] : char{0};
    advance(before == '-' || before == '+' ? close - 1 : close);
    take_closing("#}");
  }

  /// After `{%`: a raw block, if this is one.
  bool lex_raw() {
    std::string_view ahead = strip_left(rest());
    if (!ahead.starts_with("raw")) return false;
    ahead = strip_left(ahead.substr(3));
    const bool minus = ahead.starts_with("-%}");
    if (!minus && !ahead.starts_with("%}")) return false;
    advance(rest().size() - ahead.size() + (minus ? 3 : 2));
    if (minus) skip_space();
    const std::string_view text = rest();
    for (size_t open = text.find("{%"); open != std::string_view::npos;
         open = text.find("{%", open + 2)) {
      const char mark = mark_of(text.substr(open + 2));
      std::string_view tag = strip_left(text.substr(open + 2 + (mark != 0 ? 1 : 0)));
      if (!tag.starts_with("endraw")) continue;
      tag = strip_left(tag.substr(6));
      if (!tag.starts_with("%}") && !tag.starts_with("-%}") && !tag.starts_with("+%}")) continue;
      add_data(trimmed_before(text.substr(0, open), mark, false));
      advance(text.size() - tag.size());
      take_closing("%}");
      return true;
    }
    syntax_error("missing end of raw directive");
  }

  void lex_tag(Token::Kind closing_kind, std::string_view closing) {
    std::vector<char> brackets;
    while (true) {
      if (brackets.empty() && at_tag_end(closing_kind, closing)) return;
      skip_space();
      if (at_ >= source_.size())
        return;  // the parser reports the missing end with what it was looking for
      if (brackets.empty() && at_tag_end(closing_kind, closing)) return;
      const char c = source_[at_];
      if (is_digit_char(c)) {
        lex_number();
      } else if (is_name_start(c)) {
        const size_t start = at_;
        while (at_ < source_.size() && is_name_char(source_[at_])) ++at_;
        add(Token::Kind::name, source_.substr(start, at_ - start));
      } else if (c == '\'' || c == '"') {
        lex_string(c);
      } else {
        lex_operator(brackets);
      }
    }
  }

  bool at_tag_end(Token::Kind kind, std::string_view closing) {
    if (kind == Token::Kind::block_end) {
      const int line = line_;
      if (!take_closing(closing)) return false;
      add(kind).line = line;
      return true;
    }
    const bool minus = looking_at("-") && rest().substr(1).starts_with(closing);
    if (!minus && !looking_at(closing)) return false;
    add(kind);
    advance(closing.size() + (minus ? 1 : 0));
    if (minus) skip_space();
    return true;
  }

  /// Digits with single underscores between them.
  std::string take_digits(bool (*accept)(char)) {
    std::string digits;
    while (at_ < source_.size()) {
      if (accept(source_[at_])) {
        digits += source_[at_++];
      } else if (source_[at_] == '_' && at_ + 1 < source_.size() && accept(source_[at_ + 1])) {
        ++at_;
      } else {
        break;
      }
    }
    return digits;
  }

  void lex_number() {
    const bool after_dot = at_ > 0 && source_[at_ - 1] == '.';
    if (source_[at_] == '0' && at_ + 2 < source_.size()) {
      const char base = static_cast<char>(source_[at_ + 1] | 0x20);
      if (base == 'x')
        return lex_prefixed(
            [](char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; });
      if (base == 'o') return lex_prefixed([](char c) { return c >= '0' && c <= '7'; });
      if (base == 'b') return lex_prefixed([](char c) { return c == '0' || c == '1'; });
    }
    std::string digits = take_digits(is_digit_char);
    bool is_real = false;
    const auto digit_at = [this](size_t i) {
      return i < source_.size() && is_digit_char(source_[i]);
    };
    if (!after_dot && looking_at(".") && digit_at(at_ + 1)) {
      ++at_;
      digits += '.' + take_digits(is_digit_char);
      is_real = true;
    }
    if (!after_dot && at_ < source_.size() && (source_[at_] | 0x20) == 'e') {
      const bool sign =
          at_ + 1 < source_.size() && (source_[at_ + 1] == '+' || source_[at_ + 1] == '-');
      if (digit_at(at_ + (sign ? 2 : 1))) {
        digits += source_.substr(at_, sign ? 2 : 1);
        at_ += sign ? 2 : 1;
        digits += take_digits(is_digit_char);
        is_real = true;
      }
    }
    if (is_real) {
      add(Token::Kind::real).real = *parse_float(digits);
    } else {
      if (digits.size() > 1 && digits[0] == '0' &&
          digits.find_first_not_of('0') != std::string::npos) {
        syntax_error("an integer may not begin with 0");
      }
      add_integer(digits, 10);
    }
  }

  void lex_prefixed(bool (*accept)(char)) {
    const char base = static_cast<char>(source_[at_ + 1] | 0x20);
    at_ += 2;
    add_integer(take_digits(accept), base == 'x' ? 16 : (base == 'o' ? 8 : 2));
  }

  void add_integer(std::string_view digits, int base) {
    const auto value = parse_int(digits, base);
    if (!value)
      syntax_error(fmt::format("'{}' is not an integer of at most 128 bits", digits.substr(0, 60)));
    add(Token::Kind::integer).integer = *value;
  }

  void lex_operator(std::vector<char>& brackets) {
    static constexpr std::string_view kOperators[] = {
        "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
        "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};
    for (const std::string_view op : kOperators) {
      if (!looking_at(op)) continue;
      const char c = op[0];
      if (c == '(') brackets.push_back(')');
      if (c == '[') brackets.push_back(']');
      if (c == '{') brackets.push_back('}');
      if (c == ')' || c == ']' || c == '}') {
        if (brackets.empty()) syntax_error(fmt::format("unexpected '{}'", c));
        if (brackets.back() != c)
          syntax_error(fmt::format("unexpected '{}', expected '{}'", c, brackets.back()));
        brackets.pop_back();
      }
      add(Token::Kind::op, std::string(op));
      advance(op.size());
      return;
    }
    const CodePoint c = decode_at(source_, at_);
    syntax_error(fmt::format("unexpected character '{}'", rest().substr(0, c.size)));
  }

  void lex_string(char quote) {
    std::string value;
    size_t i = at_ + 1;
    while (i < source_.size() && source_[i] != quote) {
      if (source_[i] == '\\' && i + 1 < source_.size()) {
        i = lex_escape(i + 1, value);
      } else {
        value += source_[i++];
      }
    }
    if (i >= source_.size()) syntax_error("a string has no end");
    const bool readable = !std::exchange(named_escape_, false);
    add(readable ? Token::Kind::string : Token::Kind::unavailable,
        readable ? std::move(value) : "\\N escapes are not available: write the character or \\u");
    advance(i + 1 - at_);
  }

  /// The escape whose letter is at `i`; appends its value and returns the byte after it.
  size_t lex_escape(size_t i, std::string& value) {
    static constexpr std::string_view kLetters = "abfnrtv\\'\"";
    static constexpr std::string_view kValues = "\a\b\f\n\r\t\v\\'\"";
    const char c = source_[i];
    if (const size_t known = kLetters.find(c); known != std::string_view::npos) {
      value += kValues[known];
      return i + 1;
    }
    if (c == '\n') return i + 1;
    if (c >= '0' && c <= '7') {
      char32_t code = 0;
      const size_t limit = std::min(i + 3, source_.size());
      for (; i < limit && source_[i] >= '0' && source_[i] <= '7'; ++i) {
        code = code * 8 + static_cast<char32_t>(source_[i] - '0');
      }
      append_utf8(value, code);
      return i;
    }
    const size_t digits = c == 'x' ? 2 : (c == 'u' ? 4 : (c == 'U' ? 8 : 0));
    if (digits == 0) {  // Python keeps the backslash of an escape it does not know
      if (c == 'N') return lex_named_escape(i);
      value += '\\';
      return i;
    }
    uint32_t code = 0;
    const std::string hex = source_.substr(i + 1, digits);
    const auto [end, error] = std::from_chars(hex.data(), hex.data() + hex.size(), code, 16);
    const bool complete =
        error == std::errc() && end == hex.data() + hex.size() && hex.size() == digits;
    if (!complete || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) {
      syntax_error(fmt::format("'\\{}{}' is not a character", c, hex));
    }
    append_utf8(value, code);
    return i + 1 + digits;
  }

  /// \N{NAME}, whose N is at `i`: the names of characters are not known here.
  size_t lex_named_escape(size_t i) {
    const size_t close = source_.find_first_of("}'\"\\", i);
    if (source_.substr(i, 2) != "N{" || close == source_.npos || source_[close] != '}' ||
        close == i + 2)
      syntax_error("malformed \\N character escape");
    named_escape_ = true;
    return close + 1;
  }

  std::string source_;
  std::string_view name_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int line_ = 1;
  bool named_escape_ = false;  // in the string that is being read
  bool at_line_start_ = true;  // the end of a line lies before at_, or nothing at all
};

}  // namespace

std::vector<Token> tokenize(std::string_view source, std::string_view template_name) {
  check(find_invalid_utf8(source) == std::string_view::npos, ErrorKind::model,
        "{}: the chat template is not valid UTF-8", template_name);
  return Lexer(source, template_name).run();
}

}  // namespace nanovllm::jinja
