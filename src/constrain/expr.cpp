#include "constrain/expr.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include "io/utf8.h"

namespace nanovllm {
namespace {

constexpr char32_t kLastChar = 0x10FFFF;

/// Whether `e` can come to an end, given the rules that can.
bool is_productive(const Expr& e, const std::vector<bool>& rules) {
  const auto productive = [&](const Expr& part) { return is_productive(part, rules); };
  switch (e.kind) {
    case Expr::Kind::rule:
      return rules[static_cast<size_t>(e.rule)];
    case Expr::Kind::sequence:
      return std::ranges::all_of(e.parts, productive);
    case Expr::Kind::choice:
      return std::ranges::any_of(e.parts, productive);
    case Expr::Kind::repeat:
      return e.min == 0 || productive(e.parts[0]);
    case Expr::Kind::set:
      return !e.set.ranges().empty();
    default:
      return true;
  }
}

/// `e`, which is productive, without the parts that are not.
void drop_dead(Expr& e, const std::vector<bool>& rules) {
  if (e.kind == Expr::Kind::choice)
    std::erase_if(e.parts, [&](const Expr& part) { return !is_productive(part, rules); });
  if (e.kind == Expr::Kind::repeat && !is_productive(e.parts[0], rules)) e = sequence({});
  for (Expr& part : e.parts) drop_dead(part, rules);
}

void collect(const Expr& e, std::vector<int>& found, std::vector<bool>& seen) {
  if (e.kind == Expr::Kind::rule && !seen[static_cast<size_t>(e.rule)]) {
    seen[static_cast<size_t>(e.rule)] = true;
    found.push_back(e.rule);
  }
  for (const Expr& part : e.parts) collect(part, found, seen);
}

void print_char(std::string& out, char32_t c) {
  const auto value = static_cast<uint32_t>(c);
  const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  if (plain)
    out += static_cast<char>(c);
  else
    out += value <= 0xFFFF ? fmt::format("\\u{:04x}", value) : fmt::format("\\U{:08x}", value);
}

void print_set(std::string& out, const CharSet& set) {
  out += '[';
  for (const auto& [first, last] : set.ranges()) {
    print_char(out, first);
    if (last == first) continue;
    out += '-';
    print_char(out, last);
  }
  out += ']';
}

void print_text(std::string& out, std::string_view bytes) {
  out += '"';
  for (const char32_t c : to_utf32(bytes)) print_char(out, c);
  out += '"';
}

std::string rule_name(int index) { return index == 0 ? "root" : fmt::format("r{}", index); }

void print(std::string& out, const Expr& e) {
  const auto print_all = [&](std::string_view between) {
    out += '(';
    for (size_t i = 0; i < e.parts.size(); ++i) {
      if (i > 0) out += between;
      print(out, e.parts[i]);
    }
    out += ')';
  };
  switch (e.kind) {
    case Expr::Kind::text:
      return print_text(out, e.text);
    case Expr::Kind::set:
      return print_set(out, e.set);
    case Expr::Kind::rule:
      out += rule_name(e.rule);
      return;
    case Expr::Kind::sequence:
      if (e.parts.empty())
        out += "\"\"";
      else
        print_all(" ");
      return;
    case Expr::Kind::choice:
      return print_all(" | ");
    case Expr::Kind::repeat: {
      const bool atom = e.parts[0].kind == Expr::Kind::set || e.parts[0].kind == Expr::Kind::rule;
      if (!atom) out += '(';
      print(out, e.parts[0]);
      if (!atom) out += ')';
      if (e.min == 0 && e.max == 1)
        out += '?';
      else if (e.min <= 1 && e.max == kUnbounded)
        out += e.min == 0 ? '*' : '+';
      else if (e.max == kUnbounded)
        out += fmt::format("{{{},}}", e.min);
      else
        out += fmt::format("{{{},{}}}", e.min, e.max);
      return;
    }
    default:
      return;  // anchors never come here
  }
}

}  // namespace

CharSet::CharSet(std::initializer_list<Range> ranges) {
  for (const Range& range : ranges) add(range.first, range.last);
}

CharSet CharSet::any() { return CharSet{{0, kLastChar}}; }

void CharSet::add(char32_t first, char32_t last) {
  if (first < 0xD800 && last > 0xDFFF) {
    add(first, 0xD7FF);
    return add(0xE000, last);
  }
  if (first >= 0xD800 && first <= 0xDFFF) first = 0xE000;
  if (last >= 0xD800 && last <= 0xDFFF) last = 0xD7FF;
  if (first > last) return;
  ranges_.push_back({first, last});
  std::ranges::sort(ranges_, {}, &Range::first);
  std::vector<Range> merged;
  for (const Range& range : ranges_) {
    if (!merged.empty() && range.first <= merged.back().last + 1)
      merged.back().last = std::max(merged.back().last, range.last);
    else
      merged.push_back(range);
  }
  ranges_ = std::move(merged);
}

void CharSet::add(const CharSet& other) {
  for (const Range& range : other.ranges_) add(range.first, range.last);
}

CharSet CharSet::complement() const {
  CharSet rest;
  char32_t next = 0;
  for (const Range& range : ranges_) {
    if (range.first > next) rest.add(next, range.first - 1);
    next = range.last + 1;
  }
  if (next <= kLastChar) rest.add(next, kLastChar);
  return rest;
}

CharSet CharSet::without(const CharSet& other) const {
  CharSet kept = complement();
  kept.add(other);
  return kept.complement();
}

bool CharSet::contains(char32_t c) const {
  return std::ranges::any_of(
      ranges_, [c](const Range& range) { return c >= range.first && c <= range.last; });
}

Expr text(std::string_view bytes) {
  if (bytes.empty()) return {};
  return {.kind = Expr::Kind::text, .text = std::string(bytes)};
}
Expr one_of(CharSet set) { return {.kind = Expr::Kind::set, .set = std::move(set)}; }
Expr rule(int index) { return {.kind = Expr::Kind::rule, .rule = index}; }
Expr never() { return {.kind = Expr::Kind::choice}; }

Expr sequence(std::vector<Expr> parts) {
  std::erase_if(parts, [](const Expr& part) { return part.is_empty(); });
  if (std::ranges::any_of(parts, &Expr::is_never)) return never();
  if (parts.size() == 1) return std::move(parts[0]);
  Expr e{.kind = Expr::Kind::sequence};
  for (Expr& part : parts) {
    if (part.kind != Expr::Kind::sequence) {
      // Texts side by side are one.
      if (part.kind == Expr::Kind::text && !e.parts.empty() &&
          e.parts.back().kind == Expr::Kind::text)
        e.parts.back().text += part.text;
      else
        e.parts.push_back(std::move(part));
    } else {
      std::ranges::move(part.parts, std::back_inserter(e.parts));
    }
  }
  if (e.parts.size() == 1) return std::move(e.parts[0]);
  return e;
}

Expr choice(std::vector<Expr> parts) {
  std::erase_if(parts, [](const Expr& part) { return part.is_never(); });
  if (parts.size() == 1) return std::move(parts[0]);
  return {.kind = Expr::Kind::choice, .parts = std::move(parts)};
}

Expr repeat(Expr part, int64_t min, int64_t max) {
  if (min == 1 && max == 1) return part;
  if (max == 0 || part.is_empty()) return {};
  if (part.is_never()) return min == 0 ? Expr{} : never();
  Expr e{.kind = Expr::Kind::repeat, .min = min, .max = max};
  e.parts.push_back(std::move(part));
  return e;
}

Expr optional(Expr part) { return repeat(std::move(part), 0, 1); }

TextLengths text_lengths(const Expr& e) {
  const auto add = [](int64_t a, int64_t b) {
    return a == kUnbounded || b == kUnbounded ? kUnbounded : a + b;
  };
  switch (e.kind) {
    case Expr::Kind::set:
      return {1, 1};
    case Expr::Kind::sequence: {
      TextLengths sum;
      for (const Expr& part : e.parts) {
        const TextLengths lengths = text_lengths(part);
        sum = {sum.least + lengths.least, add(sum.most, lengths.most)};
      }
      return sum;
    }
    case Expr::Kind::choice: {
      TextLengths all{-1, 0};
      for (const Expr& part : e.parts) {
        const TextLengths lengths = text_lengths(part);
        all.least = all.least < 0 ? lengths.least : std::min(all.least, lengths.least);
        all.most = all.most == kUnbounded || lengths.most == kUnbounded
                       ? kUnbounded
                       : std::max(all.most, lengths.most);
      }
      return {std::max<int64_t>(all.least, 0), all.most};
    }
    case Expr::Kind::repeat: {
      const TextLengths lengths = text_lengths(e.parts[0]);
      const bool unbounded =
          lengths.most != 0 && (lengths.most == kUnbounded || e.max == kUnbounded);
      return {lengths.least * e.min,
              unbounded ? kUnbounded : lengths.most * std::max<int64_t>(e.max, 0)};
    }
    default:
      return {};
  }
}

int Rules::reserve() {
  bodies_.emplace_back();
  return static_cast<int>(bodies_.size()) - 1;
}
int Rules::add(Expr body) {
  bodies_.push_back(std::move(body));
  return static_cast<int>(bodies_.size()) - 1;
}
void Rules::define(int index, Expr body) { bodies_[static_cast<size_t>(index)] = std::move(body); }

bool Rules::prune() {
  std::vector<bool> productive(bodies_.size(), false);
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = bodies_.size(); i-- > 0;) {  // what is needed mostly comes later
      if (productive[i] || !is_productive(bodies_[i], productive)) continue;
      productive[i] = changed = true;
    }
  }
  for (size_t i = 0; i < bodies_.size(); ++i)
    if (productive[i]) drop_dead(bodies_[i], productive);
  return productive[0];
}

std::string Rules::to_ebnf() const {
  std::vector<bool> seen(bodies_.size(), false);
  std::vector<int> found{0};
  seen[0] = true;
  std::string out;
  for (size_t i = 0; i < found.size(); ++i) {
    const Expr& body = bodies_[static_cast<size_t>(found[i])];
    collect(body, found, seen);
    out += rule_name(found[i]) + " ::= ";
    print(out, body);
    out += '\n';
  }
  return out;
}

}  // namespace nanovllm
