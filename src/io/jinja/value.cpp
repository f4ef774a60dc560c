#include "io/jinja/value.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "io/jinja/runtime.h"

namespace nanovllm::jinja {

Value Value::undefined(std::string_view why) {
  return Value(Undefined{std::make_shared<const std::string>(why)});
}

std::string Value::why_undefined() const {
  const auto& why = std::get<Undefined>(data_).why;
  return why ? *why : "the value is undefined";
}

Value Value::literal(std::string text) {
  return Value(std::make_shared<const String>(String{std::move(text), false, Held()}));
}

const std::string& Value::text() const {
  return std::get<std::shared_ptr<const String>>(data_)->text;
}
bool Value::is_markup() const {
  return is_string() && std::get<std::shared_ptr<const String>>(data_)->markup;
}

bool Value::truth() const {
  if (is_undefined() || is_none()) return false;
  if (is_boolean()) return as_boolean();
  if (is_integer()) return as_integer() != 0;
  if (is_real()) return as_real() != 0;
  if (is_string()) return !text().empty();
  if (is_dict()) return !dict().items.empty();
  if (is_sequence())
    return sequence().kind == Sequence::Kind::generator || !sequence().items.empty();
  return true;
}

int Value::depth() const {
  if (is_sequence()) return sequence().depth;
  if (is_dict()) return dict().depth;
  if (is_object()) return object().depth();
  return 0;
}

std::string_view Value::type_name() const {
  if (is_undefined()) return "Undefined";
  if (is_none()) return "NoneType";
  if (is_boolean()) return "bool";
  if (is_integer()) return "int";
  if (is_real()) return "float";
  if (is_string()) return is_markup() ? "Markup" : "str";
  if (is_dict()) return "dict";
  if (is_object()) return object().type_name();
  switch (sequence().kind) {
    case Sequence::Kind::list:
      return "list";
    case Sequence::Kind::tuple:
      return "tuple";
    case Sequence::Kind::range:
      return "range";
    case Sequence::Kind::generator:
      return "generator";
    case Sequence::Kind::keys:
      return "dict_keys";
    case Sequence::Kind::values:
      return "dict_values";
    case Sequence::Kind::items:
      return "dict_items";
  }
  return "object";
}

const Value* Dict::find(std::string_view key) const {
  for (const auto& [k, v] : items) {
    if (k.is_string() && k.text() == key) return &v;
  }
  return nullptr;
}

std::string Object::repr() const { return fmt::format("<{}>", type_name()); }

Value Object::call(Runtime&, const Arguments&) {
  throw RenderError(fmt::format("'{}' object is not callable", type_name()));
}

namespace {

/// An integer against a float, exactly: an int that no double can hold is not rounded first.
int compare_int_real(Int i, double d) {
  if (std::isinf(d)) return d > 0 ? -1 : 1;
  constexpr double kEdge = 0x1p126;
  if (d >= kEdge) return -1;
  if (d <= -kEdge) return 1;
  const double whole = std::trunc(d);
  const Int j = static_cast<Int>(whole);
  if (i != j) return i < j ? -1 : 1;
  if (d == whole) return 0;
  return d > whole ? -1 : 1;
}

/// -1, 0, 1; 2 where a NaN takes part.
int compare_numbers(const Value& a, const Value& b) {
  if (a.is_real() && b.is_real()) {
    const double x = a.as_real();
    const double y = b.as_real();
    if (std::isnan(x) || std::isnan(y)) return 2;
    return x < y ? -1 : (x > y ? 1 : 0);
  }
  if (a.is_real())
    return std::isnan(a.as_real()) ? 2 : -compare_int_real(b.as_integer(), a.as_real());
  if (b.is_real())
    return std::isnan(b.as_real()) ? 2 : compare_int_real(a.as_integer(), b.as_real());
  const Int x = a.as_integer();
  const Int y = b.as_integer();
  return x < y ? -1 : (x > y ? 1 : 0);
}

bool same_kind(const Sequence& a, const Sequence& b) {
  return a.kind == b.kind &&
         (a.is_indexable() || a.kind == Sequence::Kind::keys || a.kind == Sequence::Kind::items);
}

bool equal_dicts(Budget& budget, const Dict& a, const Dict& b) {
  if (a.items.size() != b.items.size()) return false;
  for (const auto& [key, value] : a.items) {
    const Value* other = find(budget, b, key);
    if (other == nullptr || !equal(budget, value, *other)) return false;
  }
  return true;
}

}  // namespace

bool equal(Budget& budget, const Value& a, const Value& b) {
  budget.spend();
  if (a.is_number() && b.is_number()) return compare_numbers(a, b) == 0;
  if (a.is_string() && b.is_string()) {
    budget.spend_bytes(std::min(a.text().size(), b.text().size()));
    return a.text() == b.text();
  }
  if (a.is_sequence() && b.is_sequence()) {
    const Sequence& x = a.sequence();
    const Sequence& y = b.sequence();
    if (&x == &y) return true;
    if (!same_kind(x, y) || x.items.size() != y.items.size()) return false;
    for (size_t i = 0; i < x.items.size(); ++i) {
      if (!equal(budget, x.items[i], y.items[i])) return false;
    }
    return true;
  }
  if (a.is_dict() && b.is_dict())
    return &a.dict() == &b.dict() || equal_dicts(budget, a.dict(), b.dict());
  if (a.is_object() && b.is_object()) return &a.object() == &b.object();
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

bool less(Budget& budget, const Value& a, const Value& b, std::string_view op) {
  budget.spend();
  if (a.is_number() && b.is_number()) return compare_numbers(a, b) == -1;
  if (a.is_string() && b.is_string()) {
    budget.spend_bytes(std::min(a.text().size(), b.text().size()));
    return a.text() < b.text();  // UTF-8 sorts as its code points do
  }
  if (a.is_sequence() && b.is_sequence() && a.sequence().kind == b.sequence().kind &&
      (a.sequence().kind == Sequence::Kind::list || a.sequence().kind == Sequence::Kind::tuple)) {
    const auto& x = a.sequence().items;
    const auto& y = b.sequence().items;
    for (size_t i = 0; i < x.size() && i < y.size(); ++i) {
      if (!equal(budget, x[i], y[i])) return less(budget, x[i], y[i], op);
    }
    return x.size() < y.size();
  }
  for (const Value* v : {&a, &b}) {
    if (v->is_undefined()) throw RenderError(v->why_undefined());
  }
  throw RenderError(fmt::format("'{}' not supported between instances of '{}' and '{}'", op,
                                a.type_name(), b.type_name()));
}

void expect_hashable(const Value& key) {
  const bool tuple = key.is_sequence() && key.sequence().kind == Sequence::Kind::tuple;
  if (tuple) {
    for (const Value& item : key.sequence().items) expect_hashable(item);
  } else if (key.is_dict() || (key.is_sequence() && (key.sequence().kind == Sequence::Kind::list ||
                                                     key.sequence().is_view()))) {
    throw RenderError(fmt::format("unhashable type: '{}'", key.type_name()));
  }
}

const Value* find(Budget& budget, const Dict& dict, const Value& key) {
  expect_hashable(key);
  if (key.is_string()) {
    budget.spend(1 + dict.items.size() / 8);
    return dict.find(key.text());
  }
  for (const auto& [k, v] : dict.items) {
    if (equal(budget, k, key)) return &v;
  }
  return nullptr;
}

}  // namespace nanovllm::jinja
