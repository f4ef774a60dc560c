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

/// The spellings of one character of a set.
std::vector<Expr> spelled_ways(const CharSet& set) {
  std::vector<Expr> ways = escapes_of(set);
  CharSet raw = set.without(kEscaped);
  if (!raw.ranges().empty()) ways.insert(ways.begin(), one_of(std::move(raw)));
  return ways;
}

}  // namespace

Expr spelled_in_json(const Expr& e) {
  if (e.kind == Expr::Kind::set) return choice(spelled_ways(e.set));
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
  return shared(space_, [] { return optional(text(" ")); });
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

// The rest of a key, with its closing quote. One rule that calls itself at its end, as string().
Expr JsonRules::key_rest() {
  return shared(key_rest_, [this] {
    std::vector<Expr> choices{text("\"")};
    for (Expr& way : spelled_ways(CharSet::any()))
      choices.push_back(sequence({std::move(way), rule(*key_rest_)}));
    return choice(std::move(choices));
  });
}

// The names branch character by character: `rests` are what is left of each behind the characters
// so far, sorted. What leaves the tree is another key. Names that end alike share their ends: each
// place costs a mask of its own.
Expr JsonRules::rest_except(const std::vector<std::u32string>& rests) {
  if (const auto known = rest_except_.find(rests); known != rest_except_.end())
    return rule(known->second);
  std::vector<Expr> choices;
  std::map<char32_t, std::vector<std::u32string>> next;
  CharSet letters;
  for (const std::u32string& rest : rests)
    if (!rest.empty()) {
      next[rest[0]].push_back(rest.substr(1));
      letters.add(rest[0], rest[0]);
    }
  if (!rests.front().empty()) choices.push_back(text("\""));
  for (Expr& way : spelled_ways(letters.complement()))
    choices.push_back(sequence({std::move(way), key_rest()}));
  for (const auto& [c, below] : next)
    choices.push_back(sequence({text(spell(c)), rest_except(below)}));
  const int made = rules_.add(choice(std::move(choices)));
  rest_except_.emplace(rests, made);
  return rule(made);
}

Expr JsonRules::key_except(const std::vector<std::string>& names) {
  std::vector<std::u32string> decoded;
  for (const std::string& name : names) decoded.push_back(to_utf32(name));
  std::ranges::sort(decoded);
  return sequence({text("\""), decoded.empty() ? key_rest() : rest_except(decoded)});
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
