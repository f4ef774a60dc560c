// `pattern % values` and `pattern.format(...)`, as far as texts, integers and floats go.
#include <algorithm>
#include <cmath>
#include <optional>

#include "io/jinja/runtime.h"
#include "io/jinja/text.h"

namespace nanovllm::jinja {

namespace {

constexpr int kMaxPrecision = 400;

/// One conversion: what stands between `%` or `{:` and the type.
struct Spec {
  std::string fill = " ";
  char align = 0;  ///< '<', '>', '^', '='; 0 by type
  char sign = 0;   ///< '+' or ' '
  bool alternate = false;
  char grouping = 0;  ///< ',' or '_'
  size_t width = 0;
  int precision = -1;
  char type = 0;
};

void pad(TextBuilder& out, const Spec& spec, std::string_view body, char default_align) {
  const size_t length = length_of(body);
  const size_t missing = spec.width > length ? spec.width - length : 0;
  const char align = spec.align != 0 ? spec.align : default_align;
  size_t left = align == '<' ? 0 : (align == '^' ? missing / 2 : missing);
  const auto fill = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) out.append(spec.fill);
  };
  if (align == '=' && !body.empty() && (body[0] == '-' || body[0] == '+' || body[0] == ' ')) {
    out.append(body.substr(0, 1));
    body.remove_prefix(1);
  }
  fill(left);
  out.append(body);
  fill(missing - left);
}

std::string with_sign(const Spec& spec, bool negative, std::string digits) {
  const char sign = negative ? '-' : spec.sign;
  if (sign != 0) digits.insert(digits.begin(), sign);
  return digits;
}

std::string group_thousands(const Spec& spec, std::string digits) {
  if (spec.grouping == 0) return digits;
  const size_t whole = std::min(digits.find_first_not_of("0123456789"), digits.size());
  for (size_t i = whole; i > 3; i -= 3) digits.insert(i - 3, 1, spec.grouping);
  return digits;
}

std::string integer_digits(const Spec& spec, Int value) {
  const auto magnitude =
      value < 0 ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
  const auto prefixed = [&spec](std::string_view prefix, const std::string& text) {
    return spec.alternate ? fmt::format("{}{}", prefix, text) : text;
  };
  std::string digits;
  switch (spec.type) {
    case 'x':
      digits = prefixed("0x", fmt::format("{:x}", magnitude));
      break;
    case 'X':
      digits = prefixed("0X", fmt::format("{:X}", magnitude));
      break;
    case 'o':
      digits = prefixed("0o", fmt::format("{:o}", magnitude));
      break;
    case 'b':
      digits = prefixed("0b", fmt::format("{:b}", magnitude));
      break;
    default:
      digits = group_thousands(spec, fmt::format("{}", magnitude));
  }
  return with_sign(spec, value < 0, digits);
}

std::string real_digits(const Spec& spec, double value) {
  const bool negative = std::signbit(value) && !std::isnan(value);
  const double magnitude = std::abs(value);
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return with_sign(spec, negative, "inf");
  const int precision = std::min(spec.precision >= 0 ? spec.precision : 6, kMaxPrecision);
  switch (spec.type) {
    case 'e':
      return with_sign(spec, negative, fmt::format("{:.{}e}", magnitude, precision));
    case 'E':
      return with_sign(spec, negative, fmt::format("{:.{}E}", magnitude, precision));
    case 'g':
    case 'G':
      return with_sign(spec, negative, fmt::format("{:.{}g}", magnitude, std::max(precision, 1)));
    case '%':
      return with_sign(spec, negative, fmt::format("{:.{}f}%", 100 * magnitude, precision));
    default:
      return with_sign(spec, negative,
                       group_thousands(spec, fmt::format("{:.{}f}", magnitude, precision)));
  }
}

std::string_view shortened(const Spec& spec, std::string_view text) {
  return spec.precision < 0
             ? text
             : text.substr(0, byte_offset(text, static_cast<size_t>(spec.precision)));
}

bool is_integer_type(char type) {
  return std::string_view("bdioxXu").find(type) != std::string_view::npos;
}
bool is_real_type(char type) {
  return std::string_view("eEfFgG%").find(type) != std::string_view::npos;
}

/// Reads a decimal number; what is absurd as a width or precision is an error.
std::optional<size_t> read_number(std::string_view pattern, size_t& at) {
  size_t value = 0;
  const size_t start = at;
  for (; at < pattern.size() && pattern[at] >= '0' && pattern[at] <= '9'; ++at) {
    value = value * 10 + static_cast<size_t>(pattern[at] - '0');
    if (value > 1'000'000) render_fail("a format width over 1000000");
  }
  return at > start ? std::optional(value) : std::nullopt;
}

/// The values of a `%` formatting, taken in order or by name.
class PercentArguments {
 public:
  explicit PercentArguments(const Value& values) : values_(values) {
    is_tuple_ = values.is_sequence() && values.sequence().kind == Sequence::Kind::tuple;
  }
  const Value& next() {
    const size_t count = is_tuple_ ? values_.sequence().items.size() : 1;
    if (taken_ >= count) render_fail("not enough arguments for format string");
    return is_tuple_ ? values_.sequence().items[taken_++] : (++taken_, values_);
  }
  const Value& named(std::string_view name) {
    if (!values_.is_dict()) render_fail("format requires a mapping");
    const Value* found = values_.dict().find(name);
    if (found == nullptr) render_fail("format: no value named '{}'", name);
    by_name_ = true;
    return *found;
  }
  void expect_all_used() const {
    const size_t count =
        is_tuple_ ? values_.sequence().items.size() : (values_.is_dict() ? taken_ : 1);
    if (!by_name_ && taken_ < count)
      render_fail("not all arguments converted during string formatting");
  }

 private:
  const Value& values_;
  size_t taken_ = 0;
  bool is_tuple_ = false;
  bool by_name_ = false;
};

void convert_percent(Runtime& runtime, TextBuilder& out, Spec spec, const Value& value, bool zero) {
  if (zero && spec.align == 0 && (is_integer_type(spec.type) || is_real_type(spec.type))) {
    spec.fill.assign(1, '0');
    spec.align = '=';
  }
  if (spec.type == 's')
    return pad(out, spec, shortened(spec, to_str(runtime.budget(), value)), '>');
  if (spec.type == 'r')
    return pad(out, spec, shortened(spec, to_repr(runtime.budget(), value)), '>');
  if (spec.type == 'c' && value.is_string()) return pad(out, spec, value.text(), '>');
  if (!value.is_number())
    render_fail("%{} format: a number is required, not {}", spec.type, value.type_name());
  if (is_real_type(spec.type)) return pad(out, spec, real_digits(spec, value.as_real()), '>');
  if (!is_integer_type(spec.type)) render_fail("unsupported format character '{}'", spec.type);
  if (spec.type == 'i' || spec.type == 'u') spec.type = 'd';
  const Int integer = value.is_real() ? truncate_to_int(value.as_real()) : value.as_integer();
  pad(out, spec, integer_digits(spec, integer), '>');
}

}  // namespace

std::string percent_format(Runtime& runtime, std::string_view pattern, const Value& values) {
  TextBuilder out(runtime.budget());
  PercentArguments arguments(values);
  for (size_t at = 0; at < pattern.size();) {
    runtime.budget().spend();
    if (pattern[at] != '%') {
      const size_t end = std::min(pattern.find('%', at), pattern.size());
      out.append(pattern.substr(at, end - at));
      at = end;
      continue;
    }
    ++at;
    if (at < pattern.size() && pattern[at] == '%') {
      out.append("%");
      ++at;
      continue;
    }
    const Value* value = nullptr;
    if (at < pattern.size() && pattern[at] == '(') {
      const size_t close = std::min(pattern.find(')', at), pattern.size());
      value = &arguments.named(pattern.substr(at + 1, close - at - 1));
      at = close + 1;
    }
    Spec spec;
    bool zero = false;
    for (; at < pattern.size() &&
           std::string_view("-+ #0").find(pattern[at]) != std::string_view::npos;
         ++at) {
      if (pattern[at] == '-') spec.align = '<';
      if (pattern[at] == '+' || (pattern[at] == ' ' && spec.sign == 0)) spec.sign = pattern[at];
      if (pattern[at] == '#') spec.alternate = true;
      if (pattern[at] == '0') zero = true;
    }
    spec.width = read_number(pattern, at).value_or(0);
    if (at < pattern.size() && pattern[at] == '.') {
      ++at;
      spec.precision = static_cast<int>(read_number(pattern, at).value_or(0));
    }
    if (at >= pattern.size()) render_fail("incomplete format");
    spec.type = pattern[at++];
    convert_percent(runtime, out, spec, value != nullptr ? *value : arguments.next(), zero);
  }
  arguments.expect_all_used();
  return out.take();
}

namespace {

/// str.format: fields with names, items, conversions and specs. Nested fields in a spec are not
/// supported.
class BraceFormatter {
 public:
  BraceFormatter(Runtime& runtime, const Arguments& arguments)
      : runtime_(runtime), arguments_(arguments), out_(runtime.budget()) {}

  std::string run(std::string_view pattern) {
    for (size_t at = 0; at < pattern.size();) {
      runtime_.budget().spend();
      const char c = pattern[at];
      const bool doubled = at + 1 < pattern.size() && pattern[at + 1] == c;
      if ((c == '{' || c == '}') && doubled) {
        out_.append(pattern.substr(at, 1));
        at += 2;
      } else if (c == '}') {
        render_fail("single '}}' encountered in format string");
      } else if (c == '{') {
        const size_t close = pattern.find('}', at);
        if (close == std::string_view::npos) render_fail("expected '}}' before end of string");
        field(pattern.substr(at + 1, close - at - 1));
        at = close + 1;
      } else {
        const size_t end = std::min(pattern.find_first_of("{}", at), pattern.size());
        out_.append(pattern.substr(at, end - at));
        at = end;
      }
    }
    return out_.take();
  }

 private:
  void field(std::string_view text) {
    const size_t name_end = std::min(text.find_first_of("!:"), text.size());
    Value value = lookup(text.substr(0, name_end));
    size_t at = name_end;
    if (at < text.size() && text[at] == '!') {
      const char conversion = at + 1 < text.size() ? text[at + 1] : char{0};
      if (conversion != 's' && conversion != 'r')
        render_fail("unknown conversion in a format field");
      value = runtime_.string(conversion == 'r' ? to_repr(runtime_.budget(), value)
                                                : to_str(runtime_.budget(), value));
      at += 2;
    }
    if (at < text.size() && text[at] != ':')
      render_fail("expected ':' after the conversion of a format field");
    write(value, parse_spec(at < text.size() ? text.substr(at + 1) : ""));
  }

  Value lookup(std::string_view name) {
    const size_t first_end = std::min(name.find_first_of(".["), name.size());
    Value value = first_value(name.substr(0, first_end));
    for (size_t at = first_end; at < name.size();) {
      if (name[at] == '.') {
        const size_t end = std::min(name.find_first_of(".[", at + 1), name.size());
        value = get_attribute(runtime_, value, std::string(name.substr(at + 1, end - at - 1)));
        at = end;
      } else {
        const size_t end = name.find(']', at);
        if (name[at] != '[' || end == std::string_view::npos)
          render_fail("bad field name in a format string");
        const std::string_view key = name.substr(at + 1, end - at - 1);
        const auto index = parse_int(key);
        value = get_item(runtime_, value,
                         index ? Value::integer(*index) : runtime_.string(std::string(key)));
        at = end + 1;
      }
    }
    return value;
  }

  Value first_value(std::string_view name) {
    const auto index = name.empty() ? std::optional(static_cast<Int>(next_++)) : parse_int(name);
    if (index) {
      if (*index < 0 || *index >= static_cast<Int>(arguments_.positional.size())) {
        render_fail("replacement index out of range for positional arguments");
      }
      return arguments_.positional[static_cast<size_t>(*index)];
    }
    for (const auto& [known, value] : arguments_.named) {
      if (known == name) return value;
    }
    render_fail("format: no value named '{}'", name);
  }

  static Spec parse_spec(std::string_view text) {
    Spec spec;
    size_t at = 0;
    const auto is_align = [&](size_t i) {
      return i < text.size() && std::string_view("<>^=").find(text[i]) < 4;
    };
    const size_t fill = text.empty() ? 0 : decode_at(text, 0).size;
    if (fill > 0 && is_align(fill)) {
      spec.fill = text.substr(0, fill);
      spec.align = text[fill];
      at = fill + 1;
    } else if (is_align(0)) {
      spec.align = text[at++];
    }
    if (at < text.size() && (text[at] == '+' || text[at] == ' ' || text[at] == '-')) {
      spec.sign = text[at] == '-' ? char{0} : text[at];
      ++at;
    }
    if (at < text.size() && text[at] == '#') {
      spec.alternate = true;
      ++at;
    }
    if (at < text.size() && text[at] == '0' && spec.align == 0) {
      spec.fill.assign(1, '0');
      spec.align = '=';
    }
    spec.width = read_number(text, at).value_or(0);
    if (at < text.size() && (text[at] == ',' || text[at] == '_')) spec.grouping = text[at++];
    if (at < text.size() && text[at] == '.') {
      ++at;
      const auto precision = read_number(text, at);
      if (!precision) render_fail("format specifier missing precision");
      spec.precision = static_cast<int>(*precision);
    }
    if (at < text.size()) spec.type = text[at++];
    if (at < text.size()) render_fail("invalid format specifier '{}'", text);
    return spec;
  }

  void write(const Value& value, const Spec& spec) {
    const bool is_int = value.is_integer() || (value.is_boolean() && spec.type != 0);
    if (is_real_type(spec.type) && value.is_number())
      return pad(out_, spec, real_digits(spec, value.as_real()), '>');
    if (is_int && (spec.type == 0 || is_integer_type(spec.type))) {
      return pad(out_, spec, integer_digits(spec, value.as_integer()), '>');
    }
    if (value.is_real() && spec.type == 0) {
      Spec general = spec;
      general.type = 'g';
      return pad(
          out_, spec,
          spec.precision < 0 ? float_repr(value.as_real()) : real_digits(general, value.as_real()),
          '>');
    }
    if (spec.type != 0 && spec.type != 's') {
      render_fail("unknown format code '{}' for object of type '{}'", spec.type, value.type_name());
    }
    pad(out_, spec, shortened(spec, to_str(runtime_.budget(), value)), '<');
  }

  Runtime& runtime_;
  const Arguments& arguments_;
  TextBuilder out_;
  size_t next_ = 0;
};

}  // namespace

std::string brace_format(Runtime& runtime, std::string_view pattern, const Arguments& arguments) {
  return BraceFormatter(runtime, arguments).run(pattern);
}

}  // namespace nanovllm::jinja
