#include "io/jinja/runtime.h"

#include <algorithm>
#include <limits>

#include <nlohmann/json.hpp>

#include "io/jinja/text.h"

namespace nanovllm::jinja {

namespace {

constexpr size_t kObjectBytes = 64;  // what a small object costs beside its payload

int check_depth(int depth) {
  if (depth > kMaxValueDepth) render_fail("a value nests deeper than {} levels", kMaxValueDepth);
  return depth;
}

int depth_over(const DictItems& items) {
  int depth = 0;
  for (const auto& [key, value] : items) depth = std::max({depth, key.depth(), value.depth()});
  return check_depth(depth + 1);
}

}  // namespace

int Runtime::depth_over(const std::vector<Value>& values) {
  int depth = 0;
  for (const Value& value : values) depth = std::max(depth, value.depth());
  return check_depth(depth + 1);
}

Value Runtime::string(std::string text, bool markup) {
  budget_.spend_bytes(text.size());
  Held held(budget_, text.size() + kObjectBytes);
  return Value(std::make_shared<const String>(String{std::move(text), markup, std::move(held)}));
}

Value Runtime::sequence(std::vector<Value> items, Sequence::Kind kind) {
  budget_.spend(1 + items.size() / 4);
  const int depth = depth_over(items);
  Held held(budget_, items.size() * sizeof(Value) + kObjectBytes);
  return Value(
      std::make_shared<const Sequence>(Sequence{kind, std::move(items), depth, std::move(held)}));
}

Value Runtime::group(const Value& grouper, const Value& list) {
  budget_.spend();
  std::vector<Value> items = {grouper, list};
  const int depth = depth_over(items);
  Held held(budget_, items.size() * sizeof(Value) + kObjectBytes);
  return Value(std::make_shared<const Sequence>(Sequence{
      Sequence::Kind::tuple, std::move(items), depth, std::move(held), /*is_group=*/true}));
}

Value Runtime::distinct_dict(DictItems items) {
  budget_.spend(1 + items.size() / 4);
  const int depth = jinja::depth_over(items);
  Held held(budget_, items.size() * sizeof(DictItems::value_type) + kObjectBytes);
  return Value(std::make_shared<const Dict>(Dict{std::move(items), depth, std::move(held)}));
}

Value Runtime::dict(DictItems items) {
  Dict result;
  for (auto& [key, value] : items) {
    if (const Value* present = find(budget_, result, key)) {
      *const_cast<Value*>(present) = std::move(value);
    } else {
      result.items.emplace_back(std::move(key), std::move(value));
    }
  }
  return distinct_dict(std::move(result.items));
}

Value Runtime::from_json(const Json& json, int depth) {
  check_depth(depth);
  budget_.spend();
  switch (json.type()) {
    case Json::value_t::boolean:
      return Value::boolean(json.get<bool>());
    case Json::value_t::number_integer:
      return Value::integer(json.get<int64_t>());
    case Json::value_t::number_unsigned:
      return Value::integer(json.get<uint64_t>());
    case Json::value_t::number_float:
      return Value::real(json.get<double>());
    case Json::value_t::string:
      return string(json.get_ref<const std::string&>());
    case Json::value_t::array: {
      std::vector<Value> items;
      for (const Json& item : json) items.push_back(from_json(item, depth + 1));
      return sequence(std::move(items));
    }
    case Json::value_t::object: {
      DictItems items;
      for (const auto& [key, item] : json.items())
        items.emplace_back(string(key), from_json(item, depth + 1));
      return distinct_dict(std::move(items));
    }
    default:
      return Value::none();
  }
}

Value Runtime::keep(std::unique_ptr<Object> object) {
  budget_.hold(sizeof(void*) + kObjectBytes);
  kept_.push_back(std::move(object));
  return Value(std::shared_ptr<Object>(std::shared_ptr<Object>(), kept_.back().get()));
}

Items Runtime::iterate(const Value& value) {
  if (value.is_sequence()) {
    const Sequence& sequence = value.sequence();
    if (sequence.kind != Sequence::Kind::generator) return Items(value.sequence_ptr());
    if (sequence.taken == 0) {
      sequence.taken = sequence.items.size();
      return Items(value.sequence_ptr());
    }
    std::vector<Value> rest(sequence.items.begin() + static_cast<std::ptrdiff_t>(sequence.taken),
                            sequence.items.end());
    sequence.taken = sequence.items.size();
    return Items(this->sequence(std::move(rest)).sequence_ptr());
  }
  std::vector<Value> items;
  if (value.is_dict()) {
    for (const auto& item : value.dict().items) items.push_back(item.first);
  } else if (value.is_string()) {
    const std::string& text = value.text();
    for (size_t at = 0; at < text.size();) {
      const size_t size = decode_at(text, at).size;
      items.push_back(string(text.substr(at, size), value.is_markup()));
      at += size;
    }
  } else if (!value.is_undefined()) {
    render_fail("'{}' object is not iterable", value.type_name());
  }
  return Items(sequence(std::move(items)).sequence_ptr());
}

size_t Runtime::length(const Value& value) {
  if (value.is_undefined()) return 0;
  if (value.is_string()) {
    budget_.spend_bytes(value.text().size());
    return length_of(value.text());
  }
  if (value.is_dict()) return value.dict().items.size();
  if (value.is_sequence() && value.sequence().kind != Sequence::Kind::generator)
    return value.sequence().items.size();
  if (value.is_object()) {
    if (const auto length = value.object().length(*this)) return *length;
  }
  render_fail("object of type '{}' has no len()", value.type_name());
}

Bound::Bound(std::string_view function, const Arguments& arguments,
             std::initializer_list<std::string_view> names, size_t required)
    : function_(function), values_(names.size(), nullptr) {
  if (arguments.positional.size() > names.size()) {
    render_fail("{}() takes at most {} argument(s), {} given", function, names.size(),
                arguments.positional.size());
  }
  for (size_t i = 0; i < arguments.positional.size(); ++i) values_[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.named) {
    const auto place = std::find(names.begin(), names.end(), name);
    if (place == names.end())
      render_fail("{}() got an unexpected keyword argument '{}'", function, name);
    const Value*& slot = values_[static_cast<size_t>(place - names.begin())];
    if (slot != nullptr) render_fail("{}() got multiple values for argument '{}'", function, name);
    slot = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (values_[i] == nullptr)
      render_fail("{}() misses its argument '{}'", function, *(names.begin() + i));
  }
}

Int Bound::integer(size_t i, Int fallback) const {
  const Value* value = get(i);
  if (value == nullptr) return fallback;
  if (value->is_undefined()) render_fail("{}", value->why_undefined());
  if (!value->is_integer() && !value->is_boolean()) {
    render_fail("{}(): '{}' object cannot be interpreted as an integer", function_,
                value->type_name());
  }
  return value->as_integer();
}

std::string_view Bound::text(size_t i, std::string_view fallback) const {
  const Value* value = get(i);
  if (value == nullptr) return fallback;
  if (value->is_undefined()) render_fail("{}", value->why_undefined());
  if (!value->is_string())
    render_fail("{}() argument must be str, not {}", function_, value->type_name());
  return value->text();
}

int64_t clamp_index(Int value) {
  constexpr Int kMost = std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(std::clamp(value, -kMost, kMost));
}

}  // namespace nanovllm::jinja
