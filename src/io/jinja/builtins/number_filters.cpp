// Filters on numbers: abs, int, float, round, filesizeformat.
#include <algorithm>
#include <cmath>

#include "io/jinja/builtins/filters.h"

namespace nanovllm::jinja {

namespace {

Value absolute(Runtime&, const Value& input, const Arguments& arguments) {
  const Bound none("abs", arguments, {});
  if (input.is_undefined()) render_fail("{}", input.why_undefined());
  if (!input.is_number()) render_fail("bad operand type for abs(): '{}'", input.type_name());
  if (input.is_real()) return Value::real(std::abs(input.as_real()));
  return input.as_integer() < 0 ? negate(input) : Value::integer(input.as_integer());
}

Value to_int(Runtime&, const Value& input, const Arguments& arguments) {
  const Bound bound("int", arguments, {"default", "base"});
  const Value fallback = bound[0] != nullptr ? *bound[0] : Value::integer(0);
  if (input.is_undefined()) render_fail("{}", input.why_undefined());
  std::optional<double> real;
  if (input.is_string()) {
    const Int base = bound.integer(1, 10);
    if (base != 0 && (base < 2 || base > 36)) return fallback;
    if (const auto integer = parse_int(input.text(), static_cast<int>(base)))
      return Value::integer(*integer);
    real = parse_float(input.text());
  } else if (input.is_real()) {
    real = input.as_real();
  } else if (input.is_number()) {
    return Value::integer(input.as_integer());
  }
  if (!real || std::isnan(*real) || std::isinf(*real)) return fallback;
  return Value::integer(truncate_to_int(*real));
}

Value to_float(Runtime&, const Value& input, const Arguments& arguments) {
  const Bound bound("float", arguments, {"default"});
  const Value fallback = bound[0] != nullptr ? *bound[0] : Value::real(0);
  if (input.is_undefined()) render_fail("{}", input.why_undefined());
  if (input.is_number()) return Value::real(input.as_real());
  const auto real = input.is_string() ? parse_float(input.text()) : std::nullopt;
  return real ? Value::real(*real) : fallback;
}

/// round(value, digits) of Python for floats: correct rounding of the decimal expansion, halves of
/// binary ties to even.
double round_half_even(double value, int digits) {
  if (!std::isfinite(value) || digits > 300) return value;
  if (digits >= 0) return *parse_float(fmt::format("{:.{}f}", value, digits));
  const double scale = std::pow(10.0, -digits);
  return std::isinf(scale) ? 0.0 : std::nearbyint(value / scale) * scale;
}

Value round(Runtime&, const Value& input, const Arguments& arguments) {
  const Bound bound("round", arguments, {"precision", "method"});
  const int digits = static_cast<int>(std::clamp(bound.integer(0, 0), Int{-400}, Int{400}));
  const std::string_view method = bound.text(1, "common");
  if (input.is_undefined()) render_fail("{}", input.why_undefined());
  if (!input.is_number()) render_fail("type {} doesn't define __round__ method", input.type_name());
  if (method == "common") {
    if (input.is_real()) return Value::real(round_half_even(input.as_real(), digits));
    if (digits >= 0) return Value::integer(input.as_integer());
    return Value::integer(truncate_to_int(round_half_even(input.as_real(), digits)));
  }
  if (method != "ceil" && method != "floor")
    render_fail("round: method must be common, ceil or floor");
  const double scale = std::pow(10.0, digits);
  const double scaled = input.as_real() * scale;
  return Value::real((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
}

Value file_size(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("filesizeformat", arguments, {"binary"});
  const bool binary = bound.truth(0, false);
  if (!input.is_number()) render_fail("filesizeformat: '{}' is not a number", input.type_name());
  const double bytes = input.as_real();
  const double base = binary ? 1024 : 1000;
  if (bytes == 1) return runtime.string("1 Byte");
  if (bytes < base) return runtime.string(fmt::format("{:.0f} Bytes", std::trunc(bytes)));
  static constexpr std::string_view kDecimal[] = {"kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"};
  static constexpr std::string_view kBinary[] = {"KiB", "MiB", "GiB", "TiB",
                                                 "PiB", "EiB", "ZiB", "YiB"};
  double unit = base;
  size_t i = 0;
  for (; i + 1 < std::size(kDecimal) && bytes >= unit * base; ++i) unit *= base;
  return runtime.string(fmt::format("{:.1f} {}", bytes / unit, binary ? kBinary[i] : kDecimal[i]));
}

constexpr FilterEntry kFilters[] = {
    {"abs", absolute}, {"filesizeformat", file_size}, {"float", to_float}, {"int", to_int},
    {"round", round},
};

}  // namespace

std::span<const FilterEntry> number_filters() { return kFilters; }

}  // namespace nanovllm::jinja
