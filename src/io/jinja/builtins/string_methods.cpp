// The methods of Python's str that templates use.
#include <algorithm>

#include "io/jinja/runtime.h"
#include "io/jinja/text.h"

namespace nanovllm::jinja {

namespace {

Value made(Runtime& runtime, const Value& self, std::string text) {
  return runtime.string(std::move(text), self.is_markup());
}

/// A method without arguments that maps the text.
template <std::string (*Map)(std::string_view)>
Value mapped(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound none("str method", arguments, {});
  runtime.budget().expect_room(2 * self.text().size());
  runtime.budget().spend(self.text().size() / 4);  // tables are looked up for each character
  return made(runtime, self, Map(self.text()));
}

enum class Side { left, right, both };

template <Side side>
Value strip_method(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("strip", arguments, {"chars"});
  std::string_view text = self.text();
  const bool by_set = bound.get(0) != nullptr;
  const std::string_view set = bound.text(0);
  runtime.budget().spend_bytes(text.size() * (1 + set.size()));
  if (side != Side::right) text = by_set ? strip_left(text, set) : strip_left(text);
  if (side != Side::left) text = by_set ? strip_right(text, set) : strip_right(text);
  return made(runtime, self, std::string(text));
}

std::vector<std::string_view> split_words(std::string_view text, size_t limit, bool from_right) {
  std::vector<std::string_view> parts;
  const auto trim = [from_right](std::string_view t) {
    return from_right ? strip_right(t) : strip_left(t);
  };
  for (text = trim(text); !text.empty() && parts.size() < limit; text = trim(text)) {
    size_t edge = from_right ? text.size() : 0;
    if (from_right) {
      while (edge > 0) {
        const size_t previous = last_code_point(text.substr(0, edge));
        if (is_space(decode_at(text, previous).value)) break;
        edge = previous;
      }
      parts.push_back(text.substr(edge));
      text = text.substr(0, edge);
    } else {
      while (edge < text.size()) {
        const CodePoint c = decode_at(text, edge);
        if (is_space(c.value)) break;
        edge += c.size;
      }
      parts.push_back(text.substr(0, edge));
      text = text.substr(edge);
    }
  }
  if (!text.empty()) parts.push_back(from_right ? strip_right(text) : text);
  return parts;
}

std::vector<std::string_view> split_at(std::string_view text, std::string_view separator,
                                       size_t limit, bool from_right) {
  std::vector<std::string_view> parts;
  while (parts.size() < limit) {
    const size_t at = from_right ? text.rfind(separator) : text.find(separator);
    if (at == std::string_view::npos) break;
    parts.push_back(from_right ? text.substr(at + separator.size()) : text.substr(0, at));
    text = from_right ? text.substr(0, at) : text.substr(at + separator.size());
  }
  parts.push_back(text);
  return parts;
}

template <bool from_right>
Value split_method(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("split", arguments, {"sep", "maxsplit"});
  const Int most = bound.integer(1, -1);
  const size_t limit = most < 0 ? SIZE_MAX : static_cast<size_t>(clamp_index(most));
  const bool by_words = bound.get(0) == nullptr;
  const std::string_view separator = bound.text(0);
  if (!by_words && separator.empty()) render_fail("empty separator");
  runtime.budget().spend_bytes(self.text().size());
  runtime.budget().expect_room(self.text().size());
  auto parts = by_words ? split_words(self.text(), limit, from_right)
                        : split_at(self.text(), separator, limit, from_right);
  if (from_right) std::reverse(parts.begin(), parts.end());
  std::vector<Value> items;
  for (const std::string_view part : parts) items.push_back(made(runtime, self, std::string(part)));
  return runtime.sequence(std::move(items));
}

Value split_lines(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("splitlines", arguments, {"keepends"});
  const bool keep = bound.truth(0, false);
  const std::string& text = self.text();
  std::vector<Value> lines;
  size_t start = 0;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_at(text, at);
    size_t end = at + c.size;
    if (is_line_break(c.value)) {
      if (c.value == '\r' && end < text.size() && text[end] == '\n') ++end;
      lines.push_back(made(runtime, self, text.substr(start, (keep ? end : at) - start)));
      start = end;
    }
    at = end;
  }
  if (start < text.size()) lines.push_back(made(runtime, self, text.substr(start)));
  return runtime.sequence(std::move(lines));
}

/// The part of the text that optional (start, end) arguments name, and where it begins.
struct Window {
  std::string_view text;
  size_t first;  // in code points
  bool valid;    // false where start lies behind the end
};

Window window(Runtime& runtime, const Value& self, const Bound& bound, size_t start_index) {
  const std::string& text = self.text();
  runtime.budget().spend_bytes(text.size());
  if (bound.get(start_index) == nullptr && bound.get(start_index + 1) == nullptr)
    return {text, 0, true};
  const auto length = static_cast<Int>(length_of(text));
  const auto place = [length](Int i) { return std::clamp(i < 0 ? i + length : i, Int{0}, length); };
  const Int start = bound.integer(start_index, 0);
  const Int from = place(start);
  const Int to = place(bound.integer(start_index + 1, length));
  if (from > to || start > length) return {"", 0, false};
  const size_t begin = byte_offset(text, static_cast<size_t>(from));
  const size_t end = byte_offset(text, static_cast<size_t>(to));
  return {std::string_view(text).substr(begin, end - begin), static_cast<size_t>(from), true};
}

template <bool at_start>
Value has_affix(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound(at_start ? "startswith" : "endswith", arguments, {"prefix", "start", "end"}, 1);
  const Window part = window(runtime, self, bound, 1);
  const auto matches = [&](const Value& affix) {
    if (affix.is_undefined()) render_fail("{}", affix.why_undefined());
    if (!affix.is_string()) {
      render_fail("{} first arg must be str or a tuple of str, not {}",
                  at_start ? "startswith" : "endswith", affix.type_name());
    }
    return part.valid &&
           (at_start ? part.text.starts_with(affix.text()) : part.text.ends_with(affix.text()));
  };
  const Value& affix = bound.at(0);
  if (!affix.is_sequence() || affix.sequence().kind != Sequence::Kind::tuple)
    return Value::boolean(matches(affix));
  const auto& affixes = affix.sequence().items;
  return Value::boolean(std::any_of(affixes.begin(), affixes.end(), matches));
}

template <bool from_right, bool must_find>
Value find_method(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("find", arguments, {"sub", "start", "end"}, 1);
  const Window part = window(runtime, self, bound, 1);
  const std::string_view wanted = bound.text(0);
  const size_t at = !part.valid ? std::string_view::npos
                                : (from_right ? part.text.rfind(wanted) : part.text.find(wanted));
  if (at != std::string_view::npos) {
    return Value::integer(static_cast<Int>(part.first + length_of(part.text.substr(0, at))));
  }
  if (must_find) render_fail("substring not found");
  return Value::integer(-1);
}

Value count(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("count", arguments, {"sub", "start", "end"}, 1);
  const Window part = window(runtime, self, bound, 1);
  const std::string_view wanted = bound.text(0);
  if (!part.valid) return Value::integer(0);
  if (wanted.empty()) return Value::integer(static_cast<Int>(length_of(part.text)) + 1);
  Int found = 0;
  for (size_t at = part.text.find(wanted); at != std::string_view::npos;
       at = part.text.find(wanted, at + wanted.size())) {
    ++found;
  }
  return Value::integer(found);
}

Value replace(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("replace", arguments, {"old", "new", "count"}, 2);
  if (bound.get(0) == nullptr || bound.get(1) == nullptr)
    render_fail("replace() argument must be str, not NoneType");
  const bool escapes = self.is_markup() && !bound.at(1).is_markup();
  const std::string replacement = escapes ? escape_html(bound.text(1)) : std::string(bound.text(1));
  const Int count = bound.integer(2, -1);
  return made(runtime, self, replace_text(runtime, self.text(), bound.text(0), replacement, count));
}

Value join(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("join", arguments, {"iterable"}, 1);
  const Items items = runtime.iterate(bound.at(0));
  TextBuilder out(runtime.budget());
  for (size_t i = 0; i < items.size(); ++i) {
    const Value& item = items[i];
    if (item.is_undefined()) render_fail("{}", item.why_undefined());
    if (!item.is_string())
      render_fail("sequence item {}: expected str instance, {} found", i, item.type_name());
    if (i > 0) out.append(self.text());
    out.append(self.is_markup() && !item.is_markup() ? escape_html(item.text()) : item.text());
  }
  return made(runtime, self, out.take());
}

template <bool prefix>
Value remove_affix(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("removeprefix", arguments, {"affix"}, 1);
  const std::string_view text = self.text();
  const std::string_view affix = bound.text(0);
  if (affix.empty() || !(prefix ? text.starts_with(affix) : text.ends_with(affix))) return self;
  return made(
      runtime, self,
      std::string(prefix ? text.substr(affix.size()) : text.substr(0, text.size() - affix.size())));
}

template <bool from_right>
Value partition(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("partition", arguments, {"sep"}, 1);
  const std::string& text = self.text();
  const std::string_view separator = bound.text(0);
  if (separator.empty()) render_fail("empty separator");
  runtime.budget().spend_bytes(text.size());
  const size_t at = from_right ? text.rfind(separator) : text.find(separator);
  std::string parts[3];
  if (at == std::string::npos) {
    parts[from_right ? 2 : 0] = text;
  } else {
    parts[0] = text.substr(0, at);
    parts[1] = separator;
    parts[2] = text.substr(at + separator.size());
  }
  std::vector<Value> items;
  for (std::string& part : parts) items.push_back(made(runtime, self, std::move(part)));
  return runtime.sequence(std::move(items), Sequence::Kind::tuple);
}

template <Side text_side>
Value pad(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("just", arguments, {"width", "fillchar"}, 1);
  const std::string fill(bound.text(1, " "));
  if (length_of(fill) != 1) render_fail("the fill character must be exactly one character long");
  return made(runtime, self,
              pad_text(runtime, self.text(), bound.integer(0, 0), fill,
                       text_side == Side::both ? 0 : (text_side == Side::left ? -1 : 1)));
}

Value zero_fill(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("zfill", arguments, {"width"}, 1);
  std::string_view text = self.text();
  std::string sign;
  if (text.starts_with('-') || text.starts_with('+')) {
    sign = text.substr(0, 1);
    text.remove_prefix(1);
  }
  return made(
      runtime, self,
      sign + pad_text(runtime, text, bound.integer(0, 0) - static_cast<Int>(sign.size()), "0", 1));
}

Value expand_tabs(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("expandtabs", arguments, {"tabsize"});
  const auto size = static_cast<size_t>(std::clamp(bound.integer(0, 8), Int{0}, Int{1000}));
  TextBuilder out(runtime.budget());
  size_t column = 0;
  const std::string& text = self.text();
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_at(text, at);
    if (c.value == '\t') {
      const size_t spaces = size == 0 ? 0 : size - column % size;
      out.append(spaces, ' ');
      column += spaces;
    } else {
      out.append(std::string_view(text).substr(at, c.size));
      column = c.value == '\n' || c.value == '\r' ? 0 : column + 1;
    }
    at += c.size;
  }
  return made(runtime, self, out.take());
}

Value format(Runtime& runtime, const Value& self, const Arguments& arguments) {
  return made(runtime, self, brace_format(runtime, self.text(), arguments));
}

/// True where there is text and each code point passes.
template <bool (*Pass)(char32_t)>
Value every(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound none("str method", arguments, {});
  const std::string& text = self.text();
  runtime.budget().spend_bytes(text.size());
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_at(text, at);
    if (!Pass(c.value)) return Value::boolean(false);
    at += c.size;
  }
  return Value::boolean(!text.empty());
}

bool is_letter_or_number(char32_t c) { return is_letter(c) || is_number(c); }

template <bool (*Has)(char32_t), bool (*HasNot)(char32_t)>
Value cased(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound none("str method", arguments, {});
  return Value::boolean(has_case(runtime, self.text(), Has, HasNot));
}

Value is_ascii(Runtime&, const Value& self, const Arguments& arguments) {
  const Bound none("isascii", arguments, {});
  const std::string& text = self.text();
  return Value::boolean(std::all_of(text.begin(), text.end(),
                                    [](char c) { return static_cast<signed char>(c) >= 0; }));
}

constexpr std::pair<std::string_view, MethodFunction> kMethods[] = {
    {"capitalize", mapped<capitalize>},
    {"casefold", mapped<case_fold>},
    {"center", pad<Side::both>},
    {"count", count},
    {"endswith", has_affix<false>},
    {"expandtabs", expand_tabs},
    {"find", find_method<false, false>},
    {"format", format},
    {"index", find_method<false, true>},
    {"isalnum", every<is_letter_or_number>},
    {"isalpha", every<is_letter>},
    {"isascii", is_ascii},
    {"isdecimal", every<is_digit>},
    {"isdigit", every<is_digit>},
    {"islower", cased<is_lower, is_upper>},
    {"isnumeric", every<is_number>},
    {"isspace", every<is_space>},
    {"isupper", cased<is_upper, is_lower>},
    {"join", join},
    {"ljust", pad<Side::left>},
    {"lower", mapped<to_lower>},
    {"lstrip", strip_method<Side::left>},
    {"partition", partition<false>},
    {"removeprefix", remove_affix<true>},
    {"removesuffix", remove_affix<false>},
    {"replace", replace},
    {"rfind", find_method<true, false>},
    {"rindex", find_method<true, true>},
    {"rjust", pad<Side::right>},
    {"rpartition", partition<true>},
    {"rsplit", split_method<true>},
    {"rstrip", strip_method<Side::right>},
    {"split", split_method<false>},
    {"splitlines", split_lines},
    {"startswith", has_affix<true>},
    {"strip", strip_method<Side::both>},
    {"swapcase", mapped<swap_case>},
    {"title", mapped<title_case>},
    {"upper", mapped<to_upper>},
    {"zfill", zero_fill},
};

}  // namespace

MethodFunction find_string_method(std::string_view name) {
  const auto* entry = std::find_if(std::begin(kMethods), std::end(kMethods),
                                   [name](const auto& m) { return m.first == name; });
  return entry != std::end(kMethods) ? entry->second : nullptr;
}

}  // namespace nanovllm::jinja
