// The tests of `value is name`.
#include <algorithm>

#include "io/jinja/runtime.h"
#include "io/jinja/text.h"

namespace nanovllm::jinja {

namespace {

void expect_none(std::string_view name, const Arguments& arguments) {
  const Bound bound(name, arguments, {});
}

/// A test that looks at nothing but its input.
template <bool (*Check)(const Value&)>
bool simple(Runtime&, const Value& input, const Arguments& arguments) {
  expect_none("test", arguments);
  return Check(input);
}

bool is_defined(const Value& v) { return !v.is_undefined(); }
bool is_undefined(const Value& v) { return v.is_undefined(); }
bool is_none(const Value& v) { return v.is_none(); }
bool is_boolean(const Value& v) { return v.is_boolean(); }
bool is_true(const Value& v) { return v.is_boolean() && v.as_boolean(); }
bool is_false(const Value& v) { return v.is_boolean() && !v.as_boolean(); }
bool is_integer(const Value& v) { return v.is_integer(); }
bool is_float(const Value& v) { return v.is_real(); }
bool is_number(const Value& v) { return v.is_number(); }
bool is_string(const Value& v) { return v.is_string(); }
bool is_mapping(const Value& v) { return v.is_dict(); }
bool is_iterable(const Value& v) {
  return v.is_undefined() || v.is_string() || v.is_sequence() || v.is_dict();
}
bool is_sequence(const Value& v) {
  return v.is_undefined() || v.is_string() || v.is_dict() ||
         (v.is_sequence() && v.sequence().is_indexable());
}
bool is_callable(const Value& v) {
  return v.is_undefined() || (v.is_object() && v.object().is_callable());
}
bool is_escaped(const Value& v) { return v.is_markup(); }

template <bool (*Has)(char32_t), bool (*HasNot)(char32_t)>
bool cased(Runtime& runtime, const Value& input, const Arguments& arguments) {
  expect_none("test", arguments);
  return has_case(runtime, to_str(runtime.budget(), input), Has, HasNot);
}

/// Is input % divisor == rest?
bool leaves(Runtime& runtime, const Value& input, const Value& divisor, Int rest) {
  return equal(runtime.budget(), binary(runtime, BinaryOp::modulo, input, divisor),
               Value::integer(rest));
}
bool is_odd(Runtime& runtime, const Value& input, const Arguments& arguments) {
  expect_none("odd", arguments);
  return leaves(runtime, input, Value::integer(2), 1);
}
bool is_even(Runtime& runtime, const Value& input, const Arguments& arguments) {
  expect_none("even", arguments);
  return leaves(runtime, input, Value::integer(2), 0);
}
bool is_divisible_by(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("divisibleby", arguments, {"num"}, 1);
  return leaves(runtime, input, bound.at(0), 0);
}

const Value& other(const Arguments& arguments) {
  return Bound("test", arguments, {"other"}, 1).at(0);
}

bool is_equal(Runtime& runtime, const Value& input, const Arguments& arguments) {
  return equal(runtime.budget(), input, other(arguments));
}
bool is_unequal(Runtime& runtime, const Value& input, const Arguments& arguments) {
  return !equal(runtime.budget(), input, other(arguments));
}
bool is_less(Runtime& runtime, const Value& input, const Arguments& arguments) {
  return less(runtime.budget(), input, other(arguments), "<");
}
bool is_greater(Runtime& runtime, const Value& input, const Arguments& arguments) {
  return less(runtime.budget(), other(arguments), input, ">");
}
bool is_at_most(Runtime& runtime, const Value& input, const Arguments& arguments) {
  return is_less(runtime, input, arguments) || is_equal(runtime, input, arguments);
}
bool is_at_least(Runtime& runtime, const Value& input, const Arguments& arguments) {
  return is_greater(runtime, input, arguments) || is_equal(runtime, input, arguments);
}
bool is_in(Runtime& runtime, const Value& input, const Arguments& arguments) {
  return contains(runtime, other(arguments), input);
}

bool is_same(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Value& value = other(arguments);
  if (input.is_sequence() && value.is_sequence()) return &input.sequence() == &value.sequence();
  if (input.is_dict() && value.is_dict()) return &input.dict() == &value.dict();
  return input.type_name() == value.type_name() && equal(runtime.budget(), input, value);
}

bool is_filter(Runtime&, const Value& input, const Arguments& arguments) {
  expect_none("filter", arguments);
  return input.is_string() && find_filter(input.text()) != nullptr;
}
bool is_test(Runtime&, const Value& input, const Arguments& arguments) {
  expect_none("test", arguments);
  return input.is_string() && find_test(input.text()) != nullptr;
}

constexpr std::pair<std::string_view, TestFunction> kTests[] = {
    {"!=", is_unequal},
    {"<", is_less},
    {"<=", is_at_most},
    {"==", is_equal},
    {">", is_greater},
    {">=", is_at_least},
    {"boolean", simple<is_boolean>},
    {"callable", simple<is_callable>},
    {"defined", simple<is_defined>},
    {"divisibleby", is_divisible_by},
    {"eq", is_equal},
    {"equalto", is_equal},
    {"escaped", simple<is_escaped>},
    {"even", is_even},
    {"false", simple<is_false>},
    {"filter", is_filter},
    {"float", simple<is_float>},
    {"ge", is_at_least},
    {"greaterthan", is_greater},
    {"gt", is_greater},
    {"in", is_in},
    {"integer", simple<is_integer>},
    {"iterable", simple<is_iterable>},
    {"le", is_at_most},
    {"lessthan", is_less},
    {"lower", cased<jinja::is_lower, jinja::is_upper>},
    {"lt", is_less},
    {"mapping", simple<is_mapping>},
    {"ne", is_unequal},
    {"none", simple<is_none>},
    {"number", simple<is_number>},
    {"odd", is_odd},
    {"sameas", is_same},
    {"sequence", simple<is_sequence>},
    {"string", simple<is_string>},
    {"test", is_test},
    {"true", simple<is_true>},
    {"undefined", simple<is_undefined>},
    {"upper", cased<jinja::is_upper, jinja::is_lower>},
};

}  // namespace

TestFunction find_test(std::string_view name) {
  const auto* entry = std::find_if(std::begin(kTests), std::end(kTests),
                                   [name](const auto& t) { return t.first == name; });
  return entry != std::end(kTests) ? entry->second : nullptr;
}

}  // namespace nanovllm::jinja
