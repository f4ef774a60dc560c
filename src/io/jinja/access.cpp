// value.name, value[key], value[a:b:c], `in`, and calls.
#include <algorithm>

#include "io/jinja/runtime.h"
#include "io/jinja/text.h"

namespace nanovllm::jinja {

namespace {

/// A method taken as a value: `{% set f = text.strip %}`.
class BoundMethod final : public Object {
 public:
  BoundMethod(Value self, std::string_view name, MethodFunction function)
      : self_(std::move(self)), name_(name), function_(function) {}

  std::string_view type_name() const override { return "builtin_function_or_method"; }
  std::string repr() const override {
    return fmt::format("<built-in method {} of {} object>", name_, self_.type_name());
  }
  bool is_callable() const override { return true; }
  Value call(Runtime& runtime, const Arguments& arguments) override {
    return function_(runtime, self_, arguments);
  }
  int depth() const override { return self_.depth() + 1; }

 private:
  Value self_;
  std::string name_;
  MethodFunction function_;
};

/// How Jinja names an object in its messages.
std::string described(const Value& value) {
  return value.is_none() ? "None" : fmt::format("{} object", value.type_name());
}

Value no_attribute(const Value& value, std::string_view name) {
  return Value::undefined(fmt::format("'{}' has no attribute '{}'", described(value), name));
}

std::optional<Value> item_of_string(Runtime& runtime, const Value& value, Int index) {
  const std::string& text = value.text();
  runtime.budget().spend_bytes(text.size());
  if (index < 0) index += static_cast<Int>(length_of(text));
  if (index < 0 || index >= static_cast<Int>(text.size())) return std::nullopt;
  const size_t at = byte_offset(text, static_cast<size_t>(index));
  if (at >= text.size()) return std::nullopt;
  return runtime.string(text.substr(at, decode_at(text, at).size), value.is_markup());
}

/// obj[key] of Python; nothing where that raises TypeError or LookupError.
std::optional<Value> find_item(Runtime& runtime, const Value& value, const Value& key) {
  if (value.is_dict()) {
    const bool unhashable = key.is_dict() || key.is_sequence();
    if (unhashable && !(key.is_sequence() && key.sequence().kind == Sequence::Kind::tuple))
      return std::nullopt;
    const Value* found = find(runtime.budget(), value.dict(), key);
    return found != nullptr ? std::optional(*found) : std::nullopt;
  }
  if (!key.is_integer() && !key.is_boolean()) return std::nullopt;
  Int index = key.as_integer();
  if (value.is_string()) return item_of_string(runtime, value, index);
  if (!value.is_sequence() || !value.sequence().is_indexable()) return std::nullopt;
  const auto& items = value.sequence().items;
  if (index < 0) index += static_cast<Int>(items.size());
  if (index < 0 || index >= static_cast<Int>(items.size())) return std::nullopt;
  return items[static_cast<size_t>(index)];
}

std::optional<Value> attribute_of(Runtime& runtime, const Value& value, const std::string& name) {
  if (value.is_object()) {
    if (auto attribute = value.object().attribute(runtime, name)) return attribute;
  }
  if (value.is_sequence() && value.sequence().is_group && (name == "grouper" || name == "list"))
    return value.sequence().items[name == "grouper" ? 0 : 1];
  const MethodFunction method = find_method(value, name);
  if (method != nullptr && is_refused(method)) {  // as Jinja's sandbox has it: there, but undefined
    return Value::undefined(fmt::format("'{}' would change the {}", name, value.type_name()));
  }
  if (method != nullptr) return runtime.object<BoundMethod>(value, name, method);
  return std::nullopt;
}

struct SliceBounds {
  int64_t start, stop, step;
};

/// slice.indices(length).
SliceBounds resolve_slice(int64_t length, const Value* start, const Value* stop,
                          const Value* step) {
  const auto integer = [](const Value* v) -> std::optional<int64_t> {
    if (v == nullptr) return std::nullopt;
    if (v->is_undefined()) render_fail("{}", v->why_undefined());
    if (!v->is_integer() && !v->is_boolean()) {
      render_fail("slice indices must be integers or None, not {}", v->type_name());
    }
    return clamp_index(v->as_integer());
  };
  const int64_t by = integer(step).value_or(1);
  if (by == 0) render_fail("slice step cannot be zero");
  const int64_t lowest = by > 0 ? 0 : -1;
  const int64_t highest = by > 0 ? length : length - 1;
  const auto bound = [&](const Value* v, int64_t fallback) {
    const auto given = integer(v);
    if (!given) return fallback;
    return std::clamp(*given < 0 ? *given + length : *given, lowest, highest);
  };
  return {bound(start, by > 0 ? lowest : highest), bound(stop, by > 0 ? highest : lowest), by};
}

/// Positions of the slice, in order.
template <class Take>
void for_each_position(const SliceBounds& bounds, Take take) {
  const int64_t distance =
      bounds.step > 0 ? bounds.stop - bounds.start : bounds.start - bounds.stop;
  if (distance <= 0) return;
  const int64_t stride = bounds.step > 0 ? bounds.step : -bounds.step;
  const int64_t count = (distance - 1) / stride + 1;
  for (int64_t i = 0; i < count; ++i) take(static_cast<size_t>(bounds.start + i * bounds.step));
}

Value slice_string(Runtime& runtime, const Value& value, const Value* start, const Value* stop,
                   const Value* step) {
  const std::string& text = value.text();
  runtime.budget().spend_bytes(4 * text.size());
  const auto length = static_cast<int64_t>(length_of(text));
  const SliceBounds bounds = resolve_slice(length, start, stop, step);
  if (bounds.step == 1) {
    if (bounds.start >= bounds.stop) return runtime.string("", value.is_markup());
    const size_t from = byte_offset(text, static_cast<size_t>(bounds.start));
    const size_t size = byte_offset(std::string_view(text).substr(from),
                                    static_cast<size_t>(bounds.stop - bounds.start));
    return runtime.string(text.substr(from, size), value.is_markup());
  }
  runtime.budget().expect_room(sizeof(size_t) * static_cast<size_t>(length));
  std::vector<size_t> offsets;
  for (size_t at = 0; at < text.size(); at += decode_at(text, at).size) offsets.push_back(at);
  std::string out;
  for_each_position(
      bounds, [&](size_t i) { out.append(text, offsets[i], decode_at(text, offsets[i]).size); });
  return runtime.string(std::move(out), value.is_markup());
}

}  // namespace

MethodFunction find_method(const Value& value, std::string_view name) {
  if (value.is_string()) return find_string_method(name);
  if (value.is_dict() || value.is_sequence()) return find_collection_method(value, name);
  if (value.is_object()) return value.object().method(name);
  return nullptr;
}

Value get_attribute(Runtime& runtime, const Value& value, const std::string& name) {
  if (value.is_undefined()) render_fail("{}", value.why_undefined());
  if (auto attribute = attribute_of(runtime, value, name)) return *attribute;
  if (value.is_dict()) {
    runtime.budget().spend(1 + value.dict().items.size() / 8);
    if (const Value* found = value.dict().find(name)) return *found;
  }
  return no_attribute(value, name);
}

Value get_item(Runtime& runtime, const Value& value, const Value& key) {
  if (value.is_undefined()) render_fail("{}", value.why_undefined());
  if (auto item = find_item(runtime, value, key)) return *item;
  if (key.is_string()) {
    if (auto attribute = attribute_of(runtime, value, key.text())) return *attribute;
    return no_attribute(value, key.text());
  }
  return Value::undefined(
      fmt::format("{} has no element {}", described(value), to_repr(runtime.budget(), key)));
}

Value get_slice(Runtime& runtime, const Value& value, const Value* start, const Value* stop,
                const Value* step) {
  if (value.is_undefined()) render_fail("{}", value.why_undefined());
  if (value.is_string()) return slice_string(runtime, value, start, stop, step);
  if (!value.is_sequence() || !value.sequence().is_indexable()) {
    render_fail("'{}' object is not subscriptable", value.type_name());
  }
  const auto& items = value.sequence().items;
  const SliceBounds bounds = resolve_slice(static_cast<int64_t>(items.size()), start, stop, step);
  std::vector<Value> taken;
  for_each_position(bounds, [&](size_t i) { taken.push_back(items[i]); });
  return runtime.sequence(std::move(taken), value.sequence().kind);
}

bool contains(Runtime& runtime, const Value& container, const Value& item) {
  Budget& budget = runtime.budget();
  if (container.is_string()) {
    if (item.is_undefined()) render_fail("{}", item.why_undefined());
    if (!item.is_string()) {
      render_fail("'in <string>' requires string as left operand, not {}", item.type_name());
    }
    budget.spend_bytes(container.text().size());
    return container.text().find(item.text()) != std::string::npos;
  }
  if (container.is_dict()) return find(budget, container.dict(), item) != nullptr;
  if (!container.is_sequence() && !container.is_undefined()) {
    render_fail("argument of type '{}' is not iterable", container.type_name());
  }
  const Items items = runtime.iterate(container);
  return std::any_of(items.begin(), items.end(),
                     [&](const Value& candidate) { return equal(budget, candidate, item); });
}

Value call_value(Runtime& runtime, const Value& callee, const Arguments& arguments) {
  if (callee.is_undefined()) render_fail("{}", callee.why_undefined());
  if (!callee.is_object()) render_fail("'{}' object is not callable", callee.type_name());
  const Budget::Level level(runtime.budget());
  return callee.object().call(runtime, arguments);
}

}  // namespace nanovllm::jinja
