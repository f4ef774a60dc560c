// The filters, by file: each table is searched by find_filter.
#pragma once

#include <span>
#include <string_view>
#include <utility>

#include "io/jinja/runtime.h"

namespace nanovllm::jinja {

using FilterEntry = std::pair<std::string_view, FilterFunction>;

std::span<const FilterEntry> text_filters();
std::span<const FilterEntry> number_filters();
std::span<const FilterEntry> sequence_filters();
std::span<const FilterEntry> selection_filters();

/// `value.a.b.0` for the attribute argument of map, sort, groupby and others: dots separate names
/// and indices. `fallback`, where given, stands in for an undefined result.
Value follow_path(Runtime& runtime, const Value& value, const Value& path,
                  const Value* fallback = nullptr);
/// The value by which sort, unique, min, max and groupby compare: strings in lower case unless
/// `case_sensitive`.
Value sort_key(Runtime& runtime, const Value& value, bool case_sensitive);

}  // namespace nanovllm::jinja
