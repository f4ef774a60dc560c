// The methods of dicts, lists and tuples. Those that would change the value are refused:
// transformers renders templates in a sandbox where values are immutable, and a published template
// therefore never relies on them.
#include <algorithm>

#include "io/jinja/runtime.h"

namespace nanovllm::jinja {

namespace {

template <Sequence::Kind kind>
Value dict_view(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound none("dict view", arguments, {});
  std::vector<Value> items;
  for (const auto& [key, value] : self.dict().items) {
    if (kind == Sequence::Kind::keys) items.push_back(key);
    if (kind == Sequence::Kind::values) items.push_back(value);
    if (kind == Sequence::Kind::items)
      items.push_back(runtime.sequence({key, value}, Sequence::Kind::tuple));
  }
  return runtime.sequence(std::move(items), kind);
}

Value dict_get(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("get", arguments, {"key", "default"}, 1);
  if (const Value* found = find(runtime.budget(), self.dict(), bound.at(0))) return *found;
  return bound[1] != nullptr ? *bound[1] : Value::none();
}

Value copy(Runtime&, const Value& self, const Arguments& arguments) {
  const Bound none("copy", arguments, {});
  return self;  // values are immutable: a copy is the value
}

Value list_count(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("count", arguments, {"value"}, 1);
  const auto& items = self.sequence().items;
  const auto count = std::count_if(items.begin(), items.end(), [&](const Value& item) {
    return equal(runtime.budget(), item, bound.at(0));
  });
  return Value::integer(count);
}

Value list_index(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Bound bound("index", arguments, {"value"}, 1);
  const auto& items = self.sequence().items;
  for (size_t i = 0; i < items.size(); ++i) {
    if (equal(runtime.budget(), items[i], bound.at(0))) return Value::integer(static_cast<Int>(i));
  }
  render_fail("the value is not in the list");
}

Value refuse(Runtime&, const Value& self, const Arguments&) {
  render_fail("a template cannot change a {}: build a new one, or keep state in a namespace",
              self.type_name());
}

using Entry = std::pair<std::string_view, MethodFunction>;

constexpr Entry kDictMethods[] = {
    {"clear", refuse},
    {"copy", copy},
    {"get", dict_get},
    {"items", dict_view<Sequence::Kind::items>},
    {"keys", dict_view<Sequence::Kind::keys>},
    {"pop", refuse},
    {"popitem", refuse},
    {"setdefault", refuse},
    {"update", refuse},
    {"values", dict_view<Sequence::Kind::values>},
};

constexpr Entry kListMethods[] = {
    {"append", refuse}, {"clear", refuse},     {"copy", copy},     {"count", list_count},
    {"extend", refuse}, {"index", list_index}, {"insert", refuse}, {"pop", refuse},
    {"remove", refuse}, {"reverse", refuse},   {"sort", refuse},
};

constexpr Entry kTupleMethods[] = {{"count", list_count}, {"index", list_index}};

template <size_t size>
MethodFunction lookup(const Entry (&entries)[size], std::string_view name) {
  const auto* entry = std::find_if(std::begin(entries), std::end(entries),
                                   [name](const Entry& e) { return e.first == name; });
  return entry != std::end(entries) ? entry->second : nullptr;
}

}  // namespace

MethodFunction find_collection_method(const Value& self, std::string_view name) {
  if (self.is_dict()) return lookup(kDictMethods, name);
  switch (self.sequence().kind) {
    case Sequence::Kind::list:
      return lookup(kListMethods, name);
    case Sequence::Kind::tuple:
    case Sequence::Kind::range:
      return lookup(kTupleMethods, name);
    default:
      return nullptr;
  }
}

bool is_refused(MethodFunction method) { return method == refuse; }

}  // namespace nanovllm::jinja
