// Filters on lists, dicts and other iterables.
#include <algorithm>

#include "io/jinja/builtins/filters.h"

namespace nanovllm::jinja {

namespace {

Value length(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("length", arguments, {});
  return Value::integer(static_cast<Int>(runtime.length(input)));
}

Value list(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("list", arguments, {});
  const Items all = runtime.iterate(input);
  return runtime.sequence({all.begin(), all.end()});
}

Value first(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("first", arguments, {});
  if (input.is_sequence() && input.sequence().kind == Sequence::Kind::generator) {
    const Sequence& generator = input.sequence();  // of which one item is taken, no more
    if (generator.taken < generator.items.size()) return generator.items[generator.taken++];
    return Value::undefined("no first item, sequence was empty");
  }
  if (input.is_string() && !input.text().empty())
    return get_item(runtime, input, Value::integer(0));
  const Items items = runtime.iterate(input);
  return items.empty() ? Value::undefined("no first item, sequence was empty") : items.front();
}

Value last(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("last", arguments, {});
  if (input.is_sequence() && input.sequence().kind == Sequence::Kind::generator) {
    render_fail("'generator' object is not reversible");
  }
  if (input.is_string() && !input.text().empty())
    return get_item(runtime, input, Value::integer(-1));
  const Items items = runtime.iterate(input);
  return items.empty() ? Value::undefined("no last item, sequence was empty") : items.back();
}

Value reverse(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("reverse", arguments, {});
  const Items all = runtime.iterate(input);
  std::vector<Value> items(all.begin(), all.end());
  std::reverse(items.begin(), items.end());
  if (!input.is_string()) return runtime.sequence(std::move(items), Sequence::Kind::generator);
  TextBuilder out(runtime.budget());
  for (const Value& item : items) out.append(item.text());
  return runtime.string(out.take(), input.is_markup());
}

Value join(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("join", arguments, {"d", "attribute"});
  const std::string separator = bound[0] != nullptr ? to_str(runtime.budget(), *bound[0]) : "";
  const Value* path = bound.get(1);
  const Items items = runtime.iterate(input);
  TextBuilder out(runtime.budget());
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out.append(separator);
    const Value& item = items[i];
    out.append(
        to_str(runtime.budget(), path != nullptr ? follow_path(runtime, item, *path) : item));
  }
  return runtime.string(out.take());
}

Value default_value(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("default", arguments, {"default_value", "boolean"});
  const bool replaced = input.is_undefined() || (bound.truth(1, false) && !input.truth());
  if (!replaced) return input;
  return bound[0] != nullptr ? *bound[0] : runtime.string("");
}

Value items(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound none("items", arguments, {});
  if (input.is_undefined()) return runtime.sequence({}, Sequence::Kind::generator);
  if (!input.is_dict())
    render_fail("can only get item pairs from a mapping, not from {}", input.type_name());
  std::vector<Value> pairs;
  for (const auto& [key, value] : input.dict().items) {
    pairs.push_back(runtime.sequence({key, value}, Sequence::Kind::tuple));
  }
  return runtime.sequence(std::move(pairs), Sequence::Kind::generator);
}

/// Items with the keys they sort by.
using Keyed = std::vector<std::pair<Value, Value>>;

/// Stable, also when reversed: equal items keep their order, as in Python.
void sort_by_key(Runtime& runtime, Keyed& keyed, bool reversed) {
  Budget& budget = runtime.budget();
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reversed ? less(budget, b.first, a.first) : less(budget, a.first, b.first);
  });
}

Value values_of(Runtime& runtime, Keyed keyed) {
  std::vector<Value> values;
  for (auto& item : keyed) values.push_back(std::move(item.second));
  return runtime.sequence(std::move(values));
}

Value dictsort(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("dictsort", arguments, {"case_sensitive", "by", "reverse"});
  const std::string_view by = bound.text(1, "key");
  if (by != "key" && by != "value") render_fail("dictsort: by must be \"key\" or \"value\"");
  if (input.is_undefined()) render_fail("{}", input.why_undefined());
  if (!input.is_dict()) render_fail("dictsort: '{}' is not a mapping", input.type_name());
  Keyed keyed;
  for (const auto& [key, value] : input.dict().items) {
    keyed.emplace_back(sort_key(runtime, by == "key" ? key : value, bound.truth(0, false)),
                       runtime.sequence({key, value}, Sequence::Kind::tuple));
  }
  sort_by_key(runtime, keyed, bound.truth(2, false));
  return values_of(runtime, std::move(keyed));
}

/// sort(attribute="a,b") compares by a, then by b. Jinja compares lists of keys, be it of one:
/// attributes that no item has are equal then.
Value multi_key(Runtime& runtime, const Value& item, const Value* path, bool case_sensitive) {
  std::vector<Value> keys;
  if (path == nullptr || !path->is_string()) {
    keys.push_back(sort_key(runtime, path != nullptr ? follow_path(runtime, item, *path) : item,
                            case_sensitive));
    return runtime.sequence(std::move(keys));
  }
  const std::string& paths = path->text();
  for (size_t at = 0; at <= paths.size();) {
    const size_t end = std::min(paths.find(',', at), paths.size());
    const Value part = runtime.string(paths.substr(at, end - at));
    keys.push_back(sort_key(runtime, follow_path(runtime, item, part), case_sensitive));
    at = end + 1;
  }
  return runtime.sequence(std::move(keys));
}

Value sort(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("sort", arguments, {"reverse", "case_sensitive", "attribute"});
  Keyed keyed;
  for (const Value& item : runtime.iterate(input)) {
    keyed.emplace_back(multi_key(runtime, item, bound.get(2), bound.truth(1, false)), item);
  }
  sort_by_key(runtime, keyed, bound.truth(0, false));
  return values_of(runtime, std::move(keyed));
}

Value group_by(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("groupby", arguments, {"attribute", "default", "case_sensitive"}, 1);
  const bool case_sensitive = bound.truth(2, false);
  const auto attribute = [&](const Value& item) {
    return follow_path(runtime, item, bound.at(0), bound.get(1));
  };
  Keyed keyed;
  for (const Value& item : runtime.iterate(input)) {
    keyed.emplace_back(sort_key(runtime, attribute(item), case_sensitive), item);
  }
  sort_by_key(runtime, keyed, false);
  std::vector<Value> groups;
  for (size_t start = 0; start < keyed.size();) {
    std::vector<Value> members;
    size_t end = start;
    for (; end < keyed.size() && equal(runtime.budget(), keyed[start].first, keyed[end].first);
         ++end) {
      members.push_back(keyed[end].second);
    }
    end = std::max(end, start + 1);  // a NaN equals nothing, itself included
    if (members.empty()) members.push_back(keyed[start].second);
    const Value grouper = attribute(members[0]);
    groups.push_back(runtime.group(grouper, runtime.sequence(std::move(members))));
    start = end;
  }
  return runtime.sequence(std::move(groups));
}

Value unique(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("unique", arguments, {"case_sensitive", "attribute"});
  const Value* path = bound.get(1);
  std::vector<Value> seen;
  std::vector<Value> kept;
  for (const Value& item : runtime.iterate(input)) {
    const Value key = sort_key(runtime, path != nullptr ? follow_path(runtime, item, *path) : item,
                               bound.truth(0, false));
    expect_hashable(key);
    const bool known = std::any_of(seen.begin(), seen.end(), [&](const Value& other) {
      return equal(runtime.budget(), other, key);
    });
    if (known) continue;
    seen.push_back(key);
    kept.push_back(item);
  }
  return runtime.sequence(std::move(kept), Sequence::Kind::generator);
}

template <bool largest>
Value extreme(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound(largest ? "max" : "min", arguments, {"case_sensitive", "attribute"});
  const Value* path = bound.get(1);
  const Items all = runtime.iterate(input);
  if (all.empty()) return Value::undefined("no aggregated item, sequence was empty");
  const auto key_of = [&](const Value& item) {
    return sort_key(runtime, path != nullptr ? follow_path(runtime, item, *path) : item,
                    bound.truth(0, false));
  };
  const Value* best = &all[0];
  Value best_key = key_of(*best);
  for (size_t i = 1; i < all.size(); ++i) {
    Value key = key_of(all[i]);
    if (largest ? !less(runtime.budget(), best_key, key) : !less(runtime.budget(), key, best_key))
      continue;
    best = &all[i];
    best_key = std::move(key);
  }
  return *best;
}

Value sum(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("sum", arguments, {"attribute", "start"});
  const Value* path = bound.get(0);
  Value total = bound[1] != nullptr ? *bound[1] : Value::integer(0);
  if (total.is_string()) render_fail("sum() can't sum strings");
  for (const Value& item : runtime.iterate(input)) {
    total = binary(runtime, BinaryOp::add, total,
                   path != nullptr ? follow_path(runtime, item, *path) : item);
  }
  return total;
}

Value batch(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("batch", arguments, {"linecount", "fill_with"}, 1);
  const Int size = bound.integer(0, 0);
  const Value* fill = bound.get(1);
  if (fill != nullptr && size > 0) {
    const auto most = static_cast<size_t>(clamp_index(size));
    runtime.budget().expect_room(std::min(most, SIZE_MAX / sizeof(Value)) * sizeof(Value));
  }
  std::vector<Value> batches;
  std::vector<Value> current;
  for (const Value& item : runtime.iterate(input)) {
    if (static_cast<Int>(current.size()) == size)
      batches.push_back(runtime.sequence(std::exchange(current, {})));
    current.push_back(item);
  }
  if (!current.empty()) {
    while (fill != nullptr && static_cast<Int>(current.size()) < size) current.push_back(*fill);
    batches.push_back(runtime.sequence(std::move(current)));
  }
  return runtime.sequence(std::move(batches), Sequence::Kind::generator);
}

Value slice(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Bound bound("slice", arguments, {"slices", "fill_with"}, 1);
  const Int slices = bound.integer(0, 0);
  if (slices <= 0 || slices > 100'000)
    render_fail("slice: the number of slices must be between 1 and 100000");
  const Items all = runtime.iterate(input);
  const size_t count = static_cast<size_t>(slices);
  const size_t each = all.size() / count;
  const size_t longer = all.size() % count;
  std::vector<Value> parts;
  size_t start = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t size = each + (i < longer ? 1 : 0);
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(start);
    std::vector<Value> part(begin, begin + static_cast<std::ptrdiff_t>(size));
    if (bound.get(1) != nullptr && i >= longer) part.push_back(bound.at(1));
    parts.push_back(runtime.sequence(std::move(part)));
    start += size;
  }
  return runtime.sequence(std::move(parts), Sequence::Kind::generator);
}

constexpr FilterEntry kFilters[] = {
    {"batch", batch},       {"count", length},
    {"d", default_value},   {"default", default_value},
    {"dictsort", dictsort}, {"first", first},
    {"groupby", group_by},  {"items", items},
    {"join", join},         {"last", last},
    {"length", length},     {"list", list},
    {"max", extreme<true>}, {"min", extreme<false>},
    {"reverse", reverse},   {"slice", slice},
    {"sort", sort},         {"sum", sum},
    {"unique", unique},
};

}  // namespace

std::span<const FilterEntry> sequence_filters() { return kFilters; }

}  // namespace nanovllm::jinja
