// Filters that take or give text.
#include <algorithm>

#include "io/jinja/builtins/filters.h"
#include "io/jinja/text.h"

namespace nanovllm::jinja {

namespace {

/// The input as text, as soft_str does: a string stays what it is.
Value as_text(Runtime& runtime, const Value& input) {
  return input.is_string() ? input : runtime.string(to_str(runtime.budget(), input));
}

/// A filter that is the string method of the same name on the input's text.
template <const char* (*Name)()>
Value by_method(Runtime& runtime, const Value& input, const Arguments& arguments) {
  return find_string_method(Name())(runtime, as_text(runtime, input), arguments);
}
const char* upper_name() { return "upper"; }
const char* lower_name() { return "lower"; }
const char* capitalize_name() { return "capitalize"; }
const char* trim_name() { return "strip"; }

Value string_filter(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("string", arguments, {});
  return as_text(runtime, input);
}

Value safe(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("safe", arguments, {});
  return runtime.string(to_str(runtime.budget(), input), true);
}

Value escape(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("escape", arguments, {});
  if (input.is_markup()) return input;
  return runtime.string(escape_html(to_str(runtime.budget(), input)), true);
}

Value force_escape(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("forceescape", arguments, {});
  return runtime.string(escape_html(to_str(runtime.budget(), input)), true);
}

/// Every word with its first character in upper case; words begin after white space and - ( { [ <,
/// unlike in str.title().
Value title(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("title", arguments, {});
  const std::string text = to_str(runtime.budget(), input);
  const auto separates = [](char32_t c) {
    return is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
  };
  TextBuilder out(runtime.budget());
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < text.size() && !separates(decode_at(text, end).value))
      end += decode_at(text, end).size;
    const std::string_view word = std::string_view(text).substr(at, end - at);
    const size_t first = word.empty() ? 0 : decode_at(word, 0).size;
    out.append(to_upper(word.substr(0, first)));
    out.append(to_lower(word.substr(first)));
    at = end;
    while (end < text.size() && separates(decode_at(text, end).value))
      end += decode_at(text, end).size;
    out.append(std::string_view(text).substr(at, end - at));
    at = end;
  }
  return runtime.string(out.take(), input.is_markup());
}

Value replace(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("replace", arguments, {"old", "new", "count"}, 2);
  Budget& budget = runtime.budget();
  return runtime.string(replace_text(runtime, to_str(budget, input), to_str(budget, bound.at(0)),
                                     to_str(budget, bound.at(1)), bound.integer(2, -1)));
}

Value center(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("center", arguments, {"width"});
  return runtime.string(
      pad_text(runtime, to_str(runtime.budget(), input), bound.integer(0, 80), " ", 0),
      input.is_markup());
}

Value format(Runtime& runtime, const Value& input, const Arguments& arguments) {
  if (!arguments.positional.empty() && !arguments.named.empty()) {
    render_fail("format() takes positional or keyword arguments, not both");
  }
  Value values;
  if (arguments.named.empty()) {
    values = runtime.sequence(arguments.positional, Sequence::Kind::tuple);
  } else {
    DictItems items;
    for (const auto& [name, value] : arguments.named)
      items.emplace_back(runtime.string(name), value);
    values = runtime.dict(std::move(items));
  }
  return runtime.string(percent_format(runtime, to_str(runtime.budget(), input), values));
}

Value indent(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("indent", arguments, {"width", "first", "blank"});
  if (!input.is_string()) {
    if (input.is_undefined()) render_fail("{}", input.why_undefined());
    render_fail("indent: the input must be str, not {}", input.type_name());
  }
  const Value* width = bound.get(0);
  std::string indentation;
  if (width != nullptr && width->is_string()) {
    indentation = width->text();
  } else {
    const Int spaces = std::max(bound.integer(0, 4), Int{0});
    runtime.budget().expect_room(static_cast<size_t>(clamp_index(spaces)));
    indentation.assign(static_cast<size_t>(spaces), ' ');
  }
  const bool blank = bound.truth(2, false);
  const Value terminated = runtime.string(fmt::format("{}\n", input.text()));
  const Value lines = find_string_method("splitlines")(runtime, terminated, {});
  TextBuilder out(runtime.budget());
  if (bound.truth(1, false)) out.append(indentation);
  bool first = true;
  for (const Value& line : lines.sequence().items) {
    if (!first) {
      out.append("\n");
      if (blank || !line.text().empty()) out.append(indentation);
    }
    first = false;
    out.append(line.text());
  }
  return runtime.string(out.take(), input.is_markup());
}

Value truncate(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("truncate", arguments, {"length", "killwords", "end", "leeway"});
  const std::string text = to_str(runtime.budget(), input);
  const std::string_view end = bound.text(2, "...");
  const auto end_length = static_cast<Int>(length_of(end));
  const Int length = bound.integer(0, 255);
  const Int leeway = bound.integer(3, 5);
  if (length < end_length) render_fail("truncate: expected length >= {}", end_length);
  if (leeway < 0) render_fail("truncate: expected leeway >= 0");
  const Int present = static_cast<Int>(length_of(text));
  if (present <= length || present - length <= leeway) return runtime.string(text);
  std::string kept =
      text.substr(0, byte_offset(text, static_cast<size_t>(clamp_index(length - end_length))));
  if (!bound.truth(1, false)) {
    const size_t space = kept.rfind(' ');
    if (space != std::string::npos) kept.resize(space);
  }
  return runtime.string(kept.append(end));
}

Value word_count(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("wordcount", arguments, {});
  const std::string text = to_str(runtime.budget(), input);
  Int words = 0;
  bool inside = false;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = decode_at(text, at);
    const bool word = is_letter(c.value) || is_number(c.value) || c.value == '_';
    words += word && !inside ? 1 : 0;
    inside = word;
    at += c.size;
  }
  return Value::integer(words);
}

Value tojson(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = bound.truth(0, false);
  style.sort_keys = bound.truth(3, false);
  if (const Value* indent = bound.get(1)) {
    constexpr size_t kMaxIndent = 1000;
    if (indent->is_string()) {
      style.indent = indent->text();
    } else {
      const Int spaces = std::clamp(bound.integer(1, 0), Int{0}, Int{kMaxIndent});
      style.indent = std::string(static_cast<size_t>(spaces), ' ');
    }
    style.item_separator.assign(1, ',');
  }
  if (const Value* separators = bound.get(2)) {
    const Items both = runtime.iterate(*separators);
    if (both.size() != 2 || !both[0].is_string() || !both[1].is_string()) {
      render_fail("tojson: separators must be two strings");
    }
    style.item_separator = both[0].text();
    style.key_separator = both[1].text();
  }
  return runtime.string(to_json(runtime.budget(), input, style));
}

/// Percent-encoding as urllib.parse.quote; "/" stays.
Value urlencode(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("urlencode", arguments, {});
  if (!input.is_string())
    render_fail("urlencode: only text is supported, not {}", input.type_name());
  static constexpr std::string_view kKept =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~/";
  TextBuilder out(runtime.budget());
  for (const char c : input.text()) {
    if (kKept.find(c) != std::string_view::npos) {
      out.append(1, c);
    } else {
      out.append(fmt::format("%{:02X}", static_cast<unsigned char>(c)));
    }
  }
  return runtime.string(out.take());
}

constexpr FilterEntry kFilters[] = {
    {"capitalize", by_method<capitalize_name>},
    {"center", center},
    {"e", escape},
    {"escape", escape},
    {"forceescape", force_escape},
    {"format", format},
    {"indent", indent},
    {"lower", by_method<lower_name>},
    {"replace", replace},
    {"safe", safe},
    {"string", string_filter},
    {"title", title},
    {"tojson", tojson},
    {"trim", by_method<trim_name>},
    {"truncate", truncate},
    {"upper", by_method<upper_name>},
    {"urlencode", urlencode},
    {"wordcount", word_count},
};

}  // namespace

std::span<const FilterEntry> text_filters() { return kFilters; }

FilterFunction find_filter(std::string_view name) {
  for (const auto table :
       {text_filters(), sequence_filters(), selection_filters(), number_filters()}) {
    for (const auto& [known, function] : table) {
      if (known == name) return function;
    }
  }
  return nullptr;
}

}  // namespace nanovllm::jinja
