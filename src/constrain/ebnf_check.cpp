#include "constrain/ebnf_check.h"

#include <algorithm>
#include <cctype>

#include <nlohmann/json.hpp>

#include "constrain/limits.h"
#include "constrain/regex.h"
#include "constrain/schema/schema_compiler.h"
#include "core/check.h"
#include "io/json.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

// XGrammar's functions would carry regular expressions and token ids past the checks.
constexpr std::string_view kFunctions[] = {"Regex",      "Substring",    "TagDispatch",
                                           "Token",      "ExcludeToken", "TokenTagDispatch",
                                           "JSONSchema", "Lark"};

class EbnfGuard {
 public:
  EbnfGuard(std::string_view ebnf, std::string_view what) : text_(ebnf), what_(what) {
    if (ebnf.size() > kMaxStructureBytes)
      refuse("has {} bytes, the limit kMaxStructureBytes is {}", ebnf.size(), kMaxStructureBytes);
    if (find_invalid_utf8(ebnf) != std::string_view::npos) refuse("is not valid UTF-8");
  }

  void run() {
    (void)elements(0);
    if (at_ < text_.size()) refuse("has a ) without its ( at byte {}", at_);
    if (extra_ > kMaxRepetitions)
      refuse("has counts that expand to more than kMaxRepetitions, {}", kMaxRepetitions);
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorKind::invalid_argument, "{}: {}", what_,
         fmt::format(format, std::forward<Args>(args)...));
  }

  static constexpr uint64_t kNoCharacter = 0x110000;
  static uint64_t digit_of(char c) {
    return static_cast<uint64_t>(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
  }
  bool more() const { return at_ < text_.size(); }
  static bool is_name(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           c == '-' || c == '.';
  }
  bool follows(std::string_view token) const { return text_.substr(at_, token.size()) == token; }

  void skip_space() {
    while (more()) {
      if (text_[at_] == '#')
        at_ = std::min(text_.find('\n', at_), text_.size());
      else if (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r')
        ++at_;
      else
        return;
    }
  }

  // The number of elements up to the end of the group, and of all rules on the outside. Each counts
  // as often as it is repeated.
  int64_t elements(int depth) {
    if (depth > kMaxStructureDepth)
      refuse("nests groups deeper than kMaxStructureDepth, {}", kMaxStructureDepth);
    int64_t sum = 0, last = 0;
    while (true) {
      skip_space();
      if (!more() || text_[at_] == ')') return std::min(sum, kMaxRepetitions + 1);
      if (text_[at_] == '{') {
        const int64_t times = count();
        extra_ = std::min(extra_ + last * std::max<int64_t>(times - 1, 0), kMaxRepetitions + 1);
        sum += last * std::max<int64_t>(times - 1, 0);
        last = 0;
      } else {
        last = element(depth);
        sum += last;
      }
      sum = std::min(sum, kMaxRepetitions + 1);
    }
  }

  int64_t element(int depth) {
    const char c = text_[at_];
    if (c == '(') {
      ++at_;
      if (follows("=")) refuse("looks ahead with (= at byte {}, which is not supported", at_ - 1);
      const int64_t size = elements(depth + 1);
      if (!more()) refuse("has a ( without its )");
      ++at_;
      return std::max<int64_t>(size, 1);
    }
    if (c == '"' || c == '[') {
      quoted(c == '"' ? '"' : ']');
      return 1;
    }
    if (!is_name(c)) {
      const bool defines = follows("::=");
      if (c == ':' && !defines)
        refuse(
            "has a : at byte {}, as Lark's rules have: write name ::= ..., from the rule root on",
            at_);
      at_ += defines ? 3 : 1;
      return 0;
    }
    const size_t begin = at_;
    while (more() && is_name(text_[at_])) ++at_;
    const std::string_view name = text_.substr(begin, at_ - begin);
    if (std::ranges::count(kFunctions, name) > 0)
      refuse("uses {} at byte {}, which is not supported", name, begin);
    return 1;
  }

  void quoted(char end) {
    const size_t begin = at_++;
    while (more() && text_[at_] != end && text_[at_] != '\n') {
      if (text_[at_] == '\\')
        escape();
      else
        ++at_;
    }
    if (!more() || text_[at_] != end)
      refuse("has a {} at byte {} that does not end", text_[begin], begin);
    ++at_;
    if (end != ']') return;
    const size_t after = at_;
    skip_space();
    if (follows("::=")) refuse("has options of a rule at byte {}, which are not supported", begin);
    at_ = after;
  }

  // \x has as many digits as follow. A surrogate's bytes are no UTF-8.
  void escape() {
    const size_t begin = at_, digits = begin + 2;
    const std::string_view kind = text_.substr(begin + 1, 1);
    at_ = std::min(digits, text_.size());
    const size_t most = kind == "u" ? 4 : kind == "U" ? 8 : kind == "x" ? text_.size() : 0;
    uint64_t value = 0;
    for (; more() && at_ - digits < most && std::isxdigit(static_cast<unsigned char>(text_[at_]));
         ++at_)
      value = std::min<uint64_t>(value << 4 | digit_of(text_[at_]), kNoCharacter);
    if (value >= 0xD800 && value <= 0xDFFF) refuse("names half a surrogate pair at byte {}", begin);
  }

  int64_t count() {
    const size_t begin = at_++;
    int64_t most = 0, number = 0;
    while (more() && text_[at_] != '}') {
      const char c = text_[at_++];
      if (c == ',') number = 0;
      if (c >= '0' && c <= '9') number = std::min(number * 10 + (c - '0'), kMaxRepetitions + 1);
      most = std::max(most, number);
    }
    if (!more()) refuse("has a {{ at byte {} that does not end", begin);
    ++at_;
    if (most > kMaxRepetitions)
      refuse("repeats more often than kMaxRepetitions, {}, at byte {}", kMaxRepetitions, begin);
    return most;
  }

  const std::string_view text_, what_;
  size_t at_ = 0;
  int64_t extra_ = 0;  // elements that counts add
};

}  // namespace

void check_ebnf(std::string_view ebnf, std::string_view what) { EbnfGuard(ebnf, what).run(); }

std::string rules_to_ebnf(Rules rules, std::string_view what) {
  check(rules.size() <= kMaxRules, ErrorKind::invalid_argument,
        "{}: makes {} rules, the limit kMaxRules is {}", what, rules.size(), kMaxRules);
  check(rules.prune(), ErrorKind::invalid_argument, "{}: no text can satisfy it", what);
  std::string ebnf = rules.to_ebnf();
  check(ebnf.size() <= kMaxGrammarBytes, ErrorKind::invalid_argument,
        "{}: makes a grammar of {} bytes, the limit kMaxGrammarBytes is {}", what, ebnf.size(),
        kMaxGrammarBytes);
  return ebnf;
}

std::string schema_to_ebnf(const std::string& schema) {
  const JsonLimits limits{.max_bytes = kMaxStructureBytes,
                          .max_depth = static_cast<size_t>(kMaxStructureDepth),
                          .max_nodes = 200'000};
  const Json json = parse_json(schema, "json", ErrorKind::invalid_argument, limits);
  Rules rules;
  const int root = rules.reserve();
  SchemaCompiler compiler(json, rules);
  rules.define(root, compiler.compile());
  return rules_to_ebnf(std::move(rules), "json");
}

std::string regex_to_ebnf(const std::string& pattern, std::string_view what) {
  Rules rules;
  rules.add(parse_regex(pattern, what));
  return rules_to_ebnf(std::move(rules), what);
}

}  // namespace nanovllm
