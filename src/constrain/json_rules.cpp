#include "constrain/json_rules.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "io/utf8.h"

namespace nanovllm {
namespace {

const CharSet kEscaped{{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
const CharSet kDigits{{'0', '9'}};

std::string spell(char32_t c) {
  switch (c) {
    case '"':
      return "\\\"";
    case '\\':
      return "\\\\";
    case '\b':
      return "\\b";
    case '\f':
      return "\\f";
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default:
      break;
  }
  if (c < 0x20) return fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
  std::string raw;
  append_utf8(raw, c);
  return raw;
}

/// The characters of a set that JSON escapes: short escapes by their letters, the others by number.
std::vector<Expr> escapes_of(const CharSet& set) {
  CharSet letters, first_row, second_row;  // \n, \u000b, \u001f
  for (char32_t c = 0; c <= '\\'; ++c) {
    if (!kEscaped.contains(c) || !set.contains(c)) continue;
    const std::string spelled = spell(c);
    const auto last = static_cast<char32_t>(spelled.back());
    if (spelled.size() == 2)
      letters.add(last, last);
    else
      (c < 0x10 ? first_row : second_row).add(last, last);
  }
  std::vector<Expr> choices;
  const auto add = [&](const char* before, CharSet& after) {
    if (!after.ranges().empty()) choices.push_back(sequence({text(before), one_of(after)}));
  };
  add("\\", letters);
  add("\\u000", first_row);
  add("\\u001", second_row);
  return choices;
}

Expr spelled_set(const CharSet& set) {
  std::vector<Expr> choices = escapes_of(set);
  CharSet raw = set.without(kEscaped);
  if (!raw.ranges().empty()) choices.insert(choices.begin(), one_of(std::move(raw)));
  return choice(std::move(choices));
}

}  // namespace

Expr spelled_in_json(const Expr& e) {
  if (e.kind == Expr::Kind::set) return spelled_set(e.set);
  if (e.kind == Expr::Kind::text) {
    std::string out;
    for (const char32_t c : to_utf32(e.text)) out += spell(c);
    return text(out);
  }
  Expr copy = e;
  for (Expr& part : copy.parts) part = spelled_in_json(part);
  return copy;
}

template <class Make>
Expr JsonRules::shared(std::optional<int>& index, Make make) {
  if (!index) {
    index = rules_.reserve();  // first: the rule may need itself
    rules_.define(*index, make());
  }
  return rule(*index);
}

Expr JsonRules::space() {
  return shared(space_, [] {
    return choice(
        {Expr{}, text(" "),
         sequence({text("\n"), repeat(one_of({{' ', ' '}, {'\t', '\t'}}), 0, kUnbounded)})});
  });
}

// The rest of an escape, behind the backslash.
Expr JsonRules::escape() {
  return shared(escape_, [] {
    const CharSet hex{{'0', '9'}, {'A', 'F'}, {'a', 'f'}};
    const CharSet d{{'D', 'D'}, {'d', 'd'}};
    const CharSet high{{'8', '9'}, {'A', 'B'}, {'a', 'b'}}, low{{'C', 'F'}, {'c', 'f'}};
    const auto unit = [&](const CharSet& first, const CharSet& second) {
      return sequence({one_of(first), one_of(second), one_of(hex), one_of(hex)});
    };
    return choice(
        {one_of({{'"', '"'},
                 {'\\', '\\'},
                 {'/', '/'},
                 {'b', 'b'},
                 {'f', 'f'},
                 {'n', 'n'},
                 {'r', 'r'},
                 {'t', 't'}}),
         sequence({text("u"), choice({unit(hex.without(d), hex), unit(d, {{'0', '7'}}),
                                      sequence({unit(d, high), text("\\u"), unit(d, low)})})})});
  });
}

Expr JsonRules::character() {
  return shared(character_, [this] {
    return choice({one_of(kEscaped.complement()), sequence({text("\\"), escape()})});
  });
}

// One rule that calls itself at its end: of the ways to write this, XGrammar makes masks of this
// one fastest.
Expr JsonRules::string() {
  return shared(string_, [this] {
    const int rest = rules_.reserve();
    rules_.define(rest, choice({text("\""), sequence({one_of(kEscaped.complement()), rule(rest)}),
                                sequence({text("\\"), escape(), rule(rest)})}));
    return sequence({text("\""), rule(rest)});
  });
}

Expr JsonRules::integer() {
  return choice({text("0"), sequence({optional(text("-")), one_of({{'1', '9'}}),
                                      repeat(one_of(kDigits), 0, kUnbounded)})});
}

// A number with an exponent has one digit before the point and an exponent below 308: every reader
// has a finite double for it.
Expr JsonRules::number() {
  return shared(number_, [] {
    const Expr digits = repeat(one_of(kDigits), 1, kUnbounded);
    const Expr fraction = optional(sequence({text("."), digits}));
    const Expr exponent =
        sequence({one_of({{'E', 'E'}, {'e', 'e'}}), optional(one_of({{'+', '+'}, {'-', '-'}})),
                  choice({repeat(one_of(kDigits), 1, 2),
                          sequence({one_of({{'0', '2'}}), repeat(one_of(kDigits), 2, 2)}),
                          sequence({text("30"), one_of({{'0', '7'}})})})});
    return sequence(
        {optional(text("-")),
         choice({sequence({choice({text("0"), sequence({one_of({{'1', '9'}}),
                                                        repeat(one_of(kDigits), 0, kUnbounded)})}),
                           fraction}),
                 sequence({one_of(kDigits), fraction, exponent})})});
  });
}

Expr JsonRules::comma() { return sequence({text(","), space()}); }

Expr JsonRules::enclosed(const char* open, Expr parts, const char* close) {
  return sequence({text(open), space(), std::move(parts), space(), text(close)});
}

Expr JsonRules::listed(const Expr& part, int64_t min, int64_t max) {
  const int64_t more = max == kUnbounded ? max : max - 1;
  if (max == 0) return {};
  const Expr list =
      sequence({part, repeat(sequence({comma(), part}), std::max<int64_t>(min - 1, 0), more)});
  return min == 0 ? optional(list) : list;
}

Expr JsonRules::value() {
  return shared(value_, [this] {
    return choice(
        {string(), number(), object(), array(), text("true"), text("false"), text("null")});
  });
}

Expr JsonRules::array() {
  return shared(array_, [this] { return enclosed("[", listed(value(), 0, kUnbounded), "]"); });
}

Expr JsonRules::object() {
  return shared(object_, [this] {
    const Expr member = sequence({string(), text(":"), space(), value()});
    return enclosed("{", listed(member, 0, kUnbounded), "}");
  });
}

// The names branch character by character: `names` share their first `depth` characters. What
// leaves the tree is another key.
Expr JsonRules::trie(const std::vector<std::u32string>& names, size_t depth) {
  const Expr more = rule(*key_rest_);
  std::vector<Expr> choices;
  CharSet next;
  bool is_name = false;
  for (const std::u32string& name : names) {
    if (name.size() == depth)
      is_name = true;
    else
      next.add(name[depth], name[depth]);
  }
  if (!is_name) choices.emplace_back();
  choices.push_back(sequence({spelled_set(next.complement()), more}));
  for (const CharSet::Range& range : next.ranges())
    for (char32_t c = range.first; c <= range.last; ++c) {
      std::vector<std::u32string> below;
      for (const std::u32string& name : names)
        if (name.size() > depth && name[depth] == c) below.push_back(name);
      choices.push_back(sequence({text(spell(c)), rule(rules_.add(trie(below, depth + 1)))}));
    }
  return choice(std::move(choices));
}

Expr JsonRules::key_except(const std::vector<std::string>& names) {
  (void)shared(key_rest_, [] { return repeat(spelled_set(CharSet::any()), 0, kUnbounded); });
  std::vector<std::u32string> decoded;
  for (const std::string& name : names) decoded.push_back(to_utf32(name));
  const Expr key = decoded.empty() ? rule(*key_rest_) : trie(decoded, 0);
  return sequence({text("\""), rule(rules_.add(key)), text("\"")});
}

Expr JsonRules::literal(const Json& value) {
  if (value.is_string()) {
    const Expr body = spelled_in_json(text(value.get_ref<const std::string&>()));
    return text("\"" + body.text + "\"");
  }
  if (value.is_number_float()) {
    const double number = value.get<double>();
    const bool whole =
        std::abs(number) < 9e15 && number == static_cast<double>(static_cast<int64_t>(number));
    return text(whole ? fmt::format("{}", static_cast<int64_t>(number)) : value.dump());
  }
  if (!value.is_structured()) return text(value.dump());
  std::vector<Expr> parts;
  for (auto it = value.begin(); it != value.end(); ++it) {
    if (it != value.begin()) parts.push_back(comma());
    if (value.is_object()) {
      parts.push_back(literal(it.key()));
      parts.push_back(text(":"));
      parts.push_back(space());
    }
    parts.push_back(literal(*it));
  }
  const bool object = value.is_object();
  return enclosed(object ? "{" : "[", sequence(std::move(parts)), object ? "}" : "]");
}

}  // namespace nanovllm
