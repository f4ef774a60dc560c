#include "chat/calls/python_literal.h"

#include <charconv>

#include "chat/calls/json_scanner.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

/// JSON's spelling of a number that may have a plus, or a point without digits on one side; empty
/// if it is none.
std::string number(std::string_view word) {
  std::string text(word.substr(word.starts_with('+') ? 1 : 0));
  const size_t point = text.find('.');
  const auto is_digit_at = [&](size_t i) {
    return i < text.size() && text[i] >= '0' && text[i] <= '9';
  };
  if (point != text.npos && is_digit_at(point - 1) != is_digit_at(point + 1))
    text.insert(is_digit_at(point + 1) ? point : point + 1, 1, '0');
  JsonScanner scanner;
  for (const char c : text)
    if (is_space(c) || scanner.take(c) != CallReader::Step::more) return {};
  return scanner.take(' ') == CallReader::Step::past ? text : std::string();
}

/// Recursive descent over one text. Every method returns false where the text is no literal.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  std::optional<std::string> read() {
    if (!value(0)) return std::nullopt;
    skip_space();
    if (at_ < text_.size()) return std::nullopt;
    return std::move(json_);
  }

 private:
  static constexpr int kMaxDepth = 64;

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void skip_space() {
    while (at_ < text_.size() && is_space(text_[at_])) ++at_;
  }

  bool value(int depth) {
    skip_space();
    const char c = peek();
    if (c == '\'' || c == '"') return string();
    if (c == '[' || c == '{') return depth < kMaxDepth && container(depth, c == '[' ? ']' : '}');
    if (c == '(') return depth < kMaxDepth && container(depth, ')');
    return word();
  }

  /// A tuple is a list; one value in parentheses, without a comma, is itself.
  bool container(int depth, char close) {
    const size_t begin = json_.size();
    bool has_comma = false, is_first = true;
    ++at_;
    json_ += close == '}' ? '{' : '[';
    for (;; is_first = false) {
      skip_space();
      if (peek() == close) break;  // behind a last comma too, as in Python
      if (!is_first) json_ += ", ";
      if (close == '}') {
        if ((peek() != '\'' && peek() != '"') || !string()) return false;
        skip_space();
        if (peek() != ':') return false;
        ++at_;
        json_ += ": ";
      }
      if (!value(depth + 1)) return false;
      skip_space();
      if (peek() == ',') {
        ++at_;
        has_comma = true;
      } else if (peek() != close) {
        return false;
      }
    }
    ++at_;
    if (close == ')' && !has_comma && !is_first)
      json_.erase(begin, 1);
    else
      json_ += close == '}' ? '}' : ']';
    return true;
  }

  bool word() {
    const size_t end = std::min(text_.find_first_of(",]}): \n\r\t", at_), text_.size());
    const std::string_view word = text_.substr(at_, end - at_);
    at_ = end;
    const std::string json = word == "True" || word == "true"     ? "true"
                             : word == "False" || word == "false" ? "false"
                             : word == "None" || word == "null"   ? "null"
                                                                  : number(word);
    json_ += json;
    return !json.empty();
  }

  bool string() {
    const std::string_view rest = text_.substr(at_);
    const size_t quotes = rest.starts_with(std::string(3, rest.front())) ? 3 : 1;
    at_ += quotes;
    std::string text;
    while (at_ < text_.size() && !text_.substr(at_).starts_with(rest.substr(0, quotes))) {
      if (text_[at_] != '\\')
        text += text_[at_++];
      else if (!escape(text))
        return false;
    }
    if (at_ == text_.size()) return false;
    at_ += quotes;
    json_ += '"' + json_escaped(text) + '"';
    return true;
  }

  std::optional<uint32_t> hexadecimal(size_t digits) {
    uint32_t value = 0;
    const std::string_view text = text_.substr(at_, digits);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
    if (text.size() < digits || error != std::errc() || end != text.data() + digits)
      return std::nullopt;
    at_ += digits;
    return value;
  }

  bool escape(std::string& text) {
    if (++at_ == text_.size()) return false;
    const char c = text_[at_++];
    constexpr std::string_view kShort = "n\nt\tr\rb\bf\fa\av\v\\\\''\"\"//";
    for (size_t i = 0; i < kShort.size(); i += 2) {
      if (kShort[i] != c) continue;
      text += kShort[i + 1];
      return true;
    }
    if (c == '\n') return true;
    if (c >= '0' && c <= '7') {  // up to three octal digits
      uint32_t code = 0;
      for (size_t end = --at_ + 3; at_ < end && peek() >= '0' && peek() <= '7'; ++at_)
        code = code * 8 + static_cast<uint32_t>(peek() - '0');
      append_utf8(text, code);
      return true;
    }
    if (c == 'x' || c == 'u' || c == 'U') {
      auto code = hexadecimal(c == 'x' ? 2 : c == 'u' ? 4 : 8);
      if (code && *code >= 0xD800 && *code < 0xDC00 && text_.substr(at_).starts_with("\\u")) {
        at_ += 2;
        const auto low = hexadecimal(4);
        if (!low || *low < 0xDC00 || *low >= 0xE000) return false;
        code = 0x10000 + ((*code & 0x3FF) << 10 | (*low & 0x3FF));
      }
      if (!code || *code > 0x10FFFF || (*code >= 0xD800 && *code < 0xE000)) return false;
      append_utf8(text, *code);
      return true;
    }
    text += '\\';  // Python keeps what it does not know
    text += c;
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
  std::string json_;
};

}  // namespace

std::optional<std::string> python_literal_as_json(std::string_view text) {
  return Reader(text).read();
}

}  // namespace nanovllm
