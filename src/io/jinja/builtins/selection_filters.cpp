// map, select, reject, selectattr, rejectattr, attr: filters that apply another filter, a test or
// an attribute path.
#include "io/jinja/builtins/filters.h"
#include "io/jinja/text.h"

namespace nanovllm::jinja {

Value follow_path(Runtime& runtime, const Value& value, const Value& path, const Value* fallback) {
  if (!path.is_string()) {
    const Value item = get_item(runtime, value, path);
    return item.is_undefined() && fallback != nullptr ? *fallback : item;
  }
  const std::string& text = path.text();
  Value current = value;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find('.', at), text.size());
    const std::string part = text.substr(at, end - at);
    const bool is_index =
        !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    const auto index = is_index ? parse_int(part) : std::nullopt;
    current = get_item(runtime, current, index ? Value::integer(*index) : runtime.string(part));
    if (current.is_undefined() && fallback != nullptr) current = *fallback;
    at = end + 1;
  }
  return current;
}

Value sort_key(Runtime& runtime, const Value& value, bool case_sensitive) {
  if (case_sensitive || !value.is_string()) return value;
  return runtime.string(to_lower(value.text()));
}

namespace {

/// Arguments after the first `count` positional ones.
Arguments rest_of(const Arguments& arguments, size_t count) {
  const auto skip = static_cast<std::ptrdiff_t>(std::min(count, arguments.positional.size()));
  return {{arguments.positional.begin() + skip, arguments.positional.end()}, arguments.named};
}

Value map(Runtime& runtime, const Value& input, const Arguments& arguments) {
  // map("map", "map", ...) nests as deep as it has arguments.
  const Budget::Level level(runtime.budget());
  std::vector<Value> results;
  if (!input.truth()) return runtime.sequence({}, Sequence::Kind::generator);
  if (arguments.positional.empty()) {
    const Bound bound("map", arguments, {"attribute", "default"});
    if (bound[0] == nullptr) render_fail("map requires a filter argument");
    for (const Value& item : runtime.iterate(input)) {
      results.push_back(follow_path(runtime, item, bound.at(0), bound.get(1)));
    }
  } else {
    const Value& name = arguments.positional[0];
    const FilterFunction filter = name.is_string() ? find_filter(name.text()) : nullptr;
    if (filter == nullptr) render_fail("no filter named {}", to_repr(runtime.budget(), name));
    const Arguments rest = rest_of(arguments, 1);
    for (const Value& item : runtime.iterate(input)) results.push_back(filter(runtime, item, rest));
  }
  return runtime.sequence(std::move(results), Sequence::Kind::generator);
}

template <bool wanted, bool by_attribute>
Value select(Runtime& runtime, const Value& input, const Arguments& arguments) {
  std::vector<Value> kept;
  if (!input.truth()) return runtime.sequence({}, Sequence::Kind::generator);
  const size_t offset = by_attribute ? 1 : 0;
  if (by_attribute && arguments.positional.empty())
    render_fail("the attribute to select by is missing");
  TestFunction test = nullptr;
  if (arguments.positional.size() > offset) {
    const Value& name = arguments.positional[offset];
    test = name.is_string() ? find_test(name.text()) : nullptr;
    if (test == nullptr) render_fail("no test named {}", to_repr(runtime.budget(), name));
  }
  const Arguments rest = rest_of(arguments, offset + 1);
  for (const Value& item : runtime.iterate(input)) {
    runtime.budget().spend();
    const Value subject = by_attribute ? follow_path(runtime, item, arguments.positional[0]) : item;
    const bool passes = test != nullptr ? test(runtime, subject, rest) : subject.truth();
    if (passes == wanted) kept.push_back(item);
  }
  return runtime.sequence(std::move(kept), Sequence::Kind::generator);
}

Value attr(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("attr", arguments, {"name"}, 1);
  if (input.is_dict()) {  // only attributes: never an item
    const MethodFunction method = find_method(input, bound.text(0));
    if (method == nullptr) return Value::undefined("no such attribute");
  }
  return get_attribute(runtime, input, std::string(bound.text(0)));
}

constexpr FilterEntry kFilters[] = {
    {"attr", attr},
    {"map", map},
    {"reject", select<false, false>},
    {"rejectattr", select<false, true>},
    {"select", select<true, false>},
    {"selectattr", select<true, true>},
};

}  // namespace

std::span<const FilterEntry> selection_filters() { return kFilters; }

}  // namespace nanovllm::jinja
