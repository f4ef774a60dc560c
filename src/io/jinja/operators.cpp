// Arithmetic, with Python's rules for what goes with what.
#include <charconv>
#include <cmath>

#include "io/jinja/runtime.h"
#include "io/jinja/text.h"

namespace nanovllm::jinja {

namespace {

[[noreturn]] void overflow() { render_fail("an integer does not fit in 128 bits"); }

Int power(Int base, Int exponent) {
  Int result = 1;
  while (true) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) overflow();
    exponent >>= 1;
    if (exponent == 0) return result;
    if (__builtin_mul_overflow(base, base, &base)) overflow();
  }
}

Int floor_divide(Int a, Int b) {
  if (b == 0) render_fail("integer division or modulo by zero");
  if (b == -1) {  // the one quotient that may not fit
    Int result = 0;
    if (__builtin_sub_overflow(Int{0}, a, &result)) overflow();
    return result;
  }
  const Int quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

// As Python does: a / b may have been rounded up to an integer.
double floor_divide(double a, double b) {
  const double rest = std::fmod(a, b);
  double quotient = (a - rest) / b;
  if (rest != 0 && (rest < 0) != (b < 0)) quotient -= 1;
  return std::floor(quotient) + (quotient - std::floor(quotient) > 0.5 ? 1 : 0);
}

Int modulo(Int a, Int b) {
  if (b == 0) render_fail("integer division or modulo by zero");
  if (b == -1) return 0;
  const Int rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

/// a / b rounded once, as Python does for integers of any size.
double quotient(Int a, Int b) {
  using Natural = unsigned __int128;
  const auto size_of = [](Int i) {
    return i < 0 ? Natural{0} - static_cast<Natural>(i) : static_cast<Natural>(i);
  };
  const Natural dividend = size_of(a), divisor = size_of(b);
  Natural rest = 0;
  uint64_t bits = 0;  // of the quotient, from its first one on
  int exponent = 128;
  // The dividend's bits, then zeros: 60 bits of the quotient are more than a double holds.
  for (; dividend != 0 && bits >> 60 == 0; --exponent) {
    const Natural bit = exponent > 0 ? dividend >> (exponent - 1) & 1 : 0;
    rest = rest << 1 | bit;
    bits = bits << 1 | static_cast<uint64_t>(rest >= divisor);
    if (rest >= divisor) rest -= divisor;
  }
  const bool exact = rest == 0 && (exponent <= 0 || dividend << (128 - exponent) == 0);
  const double size = std::ldexp(static_cast<double>(bits | (exact ? 0 : 1)), exponent);
  return (a < 0) != (b < 0) ? -size : size;
}

double modulo(double a, double b) {
  if (b == 0) render_fail("float modulo by zero");
  const double rest = std::fmod(a, b);
  if (rest == 0) return std::copysign(0.0, b);
  return (rest < 0) != (b < 0) ? rest + b : rest;
}

Value integers(BinaryOp op, Int a, Int b) {
  Int result = 0;
  switch (op) {
    case BinaryOp::add:
      if (__builtin_add_overflow(a, b, &result)) overflow();
      return Value::integer(result);
    case BinaryOp::subtract:
      if (__builtin_sub_overflow(a, b, &result)) overflow();
      return Value::integer(result);
    case BinaryOp::multiply:
      if (__builtin_mul_overflow(a, b, &result)) overflow();
      return Value::integer(result);
    case BinaryOp::divide:
      if (b == 0) render_fail("division by zero");
      return Value::real(quotient(a, b));
    case BinaryOp::floor_divide:
      return Value::integer(floor_divide(a, b));
    case BinaryOp::modulo:
      return Value::integer(modulo(a, b));
    case BinaryOp::power:
      if (b >= 0) return Value::integer(power(a, b));
      if (a == 0) render_fail("0.0 cannot be raised to a negative power");
      return Value::real(std::pow(static_cast<double>(a), static_cast<double>(b)));
  }
  return Value();
}

Value reals(BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::add:
      return Value::real(a + b);
    case BinaryOp::subtract:
      return Value::real(a - b);
    case BinaryOp::multiply:
      return Value::real(a * b);
    case BinaryOp::divide:
      if (b == 0) render_fail("float division by zero");
      return Value::real(a / b);
    case BinaryOp::floor_divide:
      if (b == 0) render_fail("float floor division by zero");
      return Value::real(floor_divide(a, b));
    case BinaryOp::modulo:
      return Value::real(modulo(a, b));
    case BinaryOp::power: {
      if (a == 0 && b < 0) render_fail("0.0 cannot be raised to a negative power");
      const double result = std::pow(a, b);
      if (std::isnan(result) && !std::isnan(a) && !std::isnan(b))
        render_fail("the power is a complex number");
      if (std::isinf(result) && !std::isinf(a) && !std::isinf(b))
        render_fail("the power is too large for a float");
      return Value::real(result);
    }
  }
  return Value();
}

/// Strings joined; what is marked safe escapes what is not, as markupsafe does.
Value join_strings(Runtime& runtime, const Value& a, const Value& b) {
  const bool markup = a.is_markup() || b.is_markup();
  runtime.budget().expect_room(a.text().size() + b.text().size());
  if (!markup) return runtime.string(a.text() + b.text());
  const auto part = [](const Value& v) { return v.is_markup() ? v.text() : escape_html(v.text()); };
  return runtime.string(part(a) + part(b), true);
}

Value repeat(Runtime& runtime, const Value& value, Int times) {
  const size_t count = times > 0 ? static_cast<size_t>(clamp_index(times)) : 0;
  const auto expect_room = [&](size_t bytes) {
    if (bytes > 0 && count > runtime.budget().limits().max_memory_bytes / bytes)
      runtime.budget().expect_room(SIZE_MAX);
    runtime.budget().expect_room(bytes * count);
  };
  if (value.is_string()) {
    const std::string& text = value.text();
    expect_room(text.size());
    std::string out;
    out.reserve(text.size() * count);
    for (size_t i = 0; i < count && !text.empty(); ++i) out += text;
    return runtime.string(std::move(out), value.is_markup());
  }
  const auto& items = value.sequence().items;
  expect_room(items.size() * sizeof(Value));
  std::vector<Value> out;
  for (size_t i = 0; i < count && !items.empty(); ++i)
    out.insert(out.end(), items.begin(), items.end());
  return runtime.sequence(std::move(out), value.sequence().kind);
}

bool is_repeatable(const Value& v) {
  return v.is_string() || (v.is_sequence() && (v.sequence().kind == Sequence::Kind::list ||
                                               v.sequence().kind == Sequence::Kind::tuple));
}

std::string_view symbol(BinaryOp op) {
  static constexpr std::string_view kSymbols[] = {"+", "-", "*", "/", "//", "%", "** or pow()"};
  return kSymbols[static_cast<size_t>(op)];
}

}  // namespace

Value binary(Runtime& runtime, BinaryOp op, const Value& a, const Value& b) {
  runtime.budget().spend();
  for (const Value* v : {&a, &b}) {
    const bool formatted = v == &b && op == BinaryOp::modulo && a.is_string();
    if (v->is_undefined() && !formatted) render_fail("{}", v->why_undefined());
  }
  if (a.is_number() && b.is_number()) {
    if (a.is_real() || b.is_real()) return reals(op, a.as_real(), b.as_real());
    return integers(op, a.as_integer(), b.as_integer());
  }
  if (op == BinaryOp::add) {
    if (a.is_string() && b.is_string()) return join_strings(runtime, a, b);
    if (a.is_string()) render_fail("can only concatenate str (not \"{}\") to str", b.type_name());
    if (is_repeatable(a) && b.is_sequence() && a.sequence().kind == b.sequence().kind) {
      runtime.budget().expect_room((a.sequence().items.size() + b.sequence().items.size()) *
                                   sizeof(Value));
      std::vector<Value> items = a.sequence().items;
      items.insert(items.end(), b.sequence().items.begin(), b.sequence().items.end());
      return runtime.sequence(std::move(items), a.sequence().kind);
    }
  }
  if (op == BinaryOp::multiply) {
    const auto is_count = [](const Value& v) { return v.is_integer() || v.is_boolean(); };
    if (is_repeatable(a) && is_count(b)) return repeat(runtime, a, b.as_integer());
    if (is_repeatable(b) && is_count(a)) return repeat(runtime, b, a.as_integer());
  }
  if (op == BinaryOp::modulo && a.is_string())
    return runtime.string(percent_format(runtime, a.text(), b));
  render_fail("unsupported operand type(s) for {}: '{}' and '{}'", symbol(op), a.type_name(),
              b.type_name());
}

Value negate(const Value& value) {
  if (value.is_undefined()) render_fail("{}", value.why_undefined());
  if (value.is_real()) return Value::real(-value.as_real());
  if (!value.is_number()) render_fail("bad operand type for unary -: '{}'", value.type_name());
  Int result = 0;
  if (__builtin_sub_overflow(Int{0}, value.as_integer(), &result)) overflow();
  return Value::integer(result);
}

std::optional<Int> parse_int(std::string_view source, int base) {
  const std::string digits = ascii_digits(strip(source));
  std::string_view text = digits;
  bool negative = false;
  if (text.starts_with('-') || text.starts_with('+')) {
    negative = text[0] == '-';
    text.remove_prefix(1);
  }
  if (text.size() > 2 && text[0] == '0') {
    const char letter = static_cast<char>(text[1] | 0x20);
    const int prefixed = letter == 'x' ? 16 : (letter == 'o' ? 8 : (letter == 'b' ? 2 : 0));
    if (prefixed != 0 && (base == prefixed || base == 0)) {
      base = prefixed;
      text.remove_prefix(2);
    }
  }
  if (base == 0) base = 10;
  if (text.empty() || text.back() == '_' || text.front() == '_') return std::nullopt;
  Int value = 0;
  bool underscore = false;
  for (const char c : text) {
    const char letter = static_cast<char>(c | 0x20);
    const int digit =
        c >= '0' && c <= '9' ? c - '0' : (letter >= 'a' && letter <= 'z' ? letter - 'a' + 10 : 99);
    if (c == '_' && !underscore) {
      underscore = true;
      continue;
    }
    underscore = false;
    if (digit >= base || __builtin_mul_overflow(value, Int{base}, &value) ||
        __builtin_add_overflow(value, Int{digit}, &value)) {
      return std::nullopt;
    }
  }
  return negative ? -value : value;
}

std::optional<double> parse_float(std::string_view text) {
  std::string digits;
  for (const char c : ascii_digits(strip(text))) {
    if (c != '_') digits += c;
  }
  const char* first = digits.data() + (digits.starts_with('+') ? 1 : 0);
  double value = 0;
  const auto [end, error] = std::from_chars(first, digits.data() + digits.size(), value);
  if (end != digits.data() + digits.size() || digits.empty()) return std::nullopt;
  if (error == std::errc::result_out_of_range) {  // from_chars leaves the value alone: infinity or
                                                  // zero by the exponent
    const bool tiny =
        digits.find("e-") != std::string::npos || digits.find("E-") != std::string::npos;
    value = tiny ? 0.0 : HUGE_VAL;
    return digits.starts_with('-') ? -value : value;
  }
  return error == std::errc() ? std::optional(value) : std::nullopt;
}

Int truncate_to_int(double value) {
  if (std::isnan(value)) render_fail("cannot convert float NaN to integer");
  if (std::isinf(value)) render_fail("cannot convert float infinity to integer");
  if (std::abs(value) >= 0x1p126) overflow();
  return static_cast<Int>(value);
}

}  // namespace nanovllm::jinja
