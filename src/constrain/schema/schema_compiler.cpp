#include "constrain/schema/schema_compiler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "constrain/limits.h"
#include "constrain/schema/formats.h"
#include "constrain/schema/numbers.h"
#include "core/check.h"

namespace nanovllm {
namespace {

constexpr double kLargestInteger = 9.0e18;

struct IntegerFormat {
  std::string_view name;
  int64_t min, max;
};
constexpr IntegerFormat kIntegerFormats[] = {
    {"int32", std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()},
    {"int64", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}};

/// The tighter of a bound and a keyword's.
void tighten(std::optional<Bound>& bound, const Json& schema, const char* keyword, bool exclusive,
             int sign) {
  const auto found = schema.find(keyword);
  if (found == schema.end()) return;
  const Bound other{found->get<double>(), exclusive};
  const double more = bound ? sign * (other.value - bound->value) : 1;
  if (more > 0 || (more == 0 && exclusive)) bound = other;
}

}  // namespace

SchemaCompiler::SchemaCompiler(const Json& schema, Rules& rules)
    : reader_(schema), rules_(rules), json_(rules) {}

Expr SchemaCompiler::value(const Conjunction& schemas) {
  Conjunction distinct;
  for (const Json* schema : schemas) {
    const bool anything = *schema == true || (schema->is_object() && schema->empty());
    if (!anything && std::ranges::count(distinct, schema) == 0) distinct.push_back(schema);
  }
  if (distinct.empty()) return json_.value();
  if (const auto known = memo_.find(distinct); known != memo_.end()) return known->second;
  check(rules_.size() < kMaxRules, ErrorKind::invalid_argument,
        "json: the schema makes more than kMaxRules, {}, rules", kMaxRules);
  const int index = rules_.reserve();  // first: the schema may lead back here
  memo_[distinct] = rule(index);
  Expr made = body(distinct);
  rules_.define(index, made);
  if (made.kind == Expr::Kind::rule || made.kind == Expr::Kind::text) memo_[distinct] = made;
  return memo_[distinct];
}

Expr SchemaCompiler::body(const Conjunction& schemas) {
  std::vector<Expr> choices;
  const std::vector<Conjunction> ways = reader_.alternatives(schemas);
  for (const Conjunction& flat : ways) {
    Json storage;
    if (const Json* values = finite_values(flat, storage)) {
      for (const Json& candidate : *values)
        if (reader_.is_valid(candidate, flat)) choices.push_back(json_.literal(candidate));
      continue;
    }
    const unsigned types = SchemaReader::types(flat);
    for (unsigned type = 1; type < kAllTypes; type *= 2)
      if (types & type) choices.push_back(of_type(flat, type));
  }
  return choice(std::move(choices));
}

Expr SchemaCompiler::of_type(const Conjunction& flat, unsigned type) {
  switch (type) {
    case kNull:
      return text("null");
    case kBoolean:
      return choice({text("true"), text("false")});
    case kString:
      return string(flat);
    case kArray:
      return array(flat);
    case kObject:
      return object(flat);
    case kInteger:
      // Where fractions may be there too, the rule for those has the whole numbers.
      if (SchemaReader::types(flat) & kFraction) return never();
      return number(flat, true);
    default:
      return number(flat, false);
  }
}

Expr SchemaCompiler::number(const Conjunction& flat, bool whole) {
  std::optional<Bound> low, high;
  int64_t factor = 1;
  for (const Json* schema : flat) {
    tighten(low, *schema, "minimum", false, 1);
    tighten(low, *schema, "exclusiveMinimum", true, 1);
    tighten(high, *schema, "maximum", false, -1);
    tighten(high, *schema, "exclusiveMaximum", true, -1);
    if (schema->contains("multipleOf")) {
      const double step = (*schema)["multipleOf"].get<double>();
      if (step > 1e6 || step != std::floor(step))
        reader_.refuse(*schema, "multipleOf", "must be a whole number up to 1e6 to be enforced");
      factor = std::lcm(factor, static_cast<int64_t>(step));
      whole = true;
    }
  }
  for (const Json* schema : flat) {
    if (!whole || !schema->contains("format")) continue;
    const auto* const known = std::ranges::find(
        kIntegerFormats, (*schema)["format"].get<std::string>(), &IntegerFormat::name);
    if (known == std::end(kIntegerFormats)) continue;
    if (!low || low->value < static_cast<double>(known->min))
      low = Bound{static_cast<double>(known->min), false};
    if (!high || high->value > static_cast<double>(known->max))
      high = Bound{static_cast<double>(known->max), false};
  }
  if (low && high && low->value > high->value) return never();
  if (!whole) return low || high ? numbers_between(low, high) : json_.number();

  for (const auto& bound : {low, high})
    check(!bound || std::abs(bound->value) <= 9.3e18, ErrorKind::invalid_argument,
          "json: a bound of an integer is {}: integers can be bounded below 2^63",
          bound ? bound->value : 0);
  const auto to_integer = [](double value) {
    if (value >= kLargestInteger) return std::numeric_limits<int64_t>::max();
    if (value <= -kLargestInteger) return std::numeric_limits<int64_t>::min();
    return static_cast<int64_t>(value);
  };
  std::optional<int64_t> first, last;
  if (low) first = to_integer(low->exclusive ? std::floor(low->value) + 1 : std::ceil(low->value));
  if (high)
    last = to_integer(high->exclusive ? std::ceil(high->value) - 1 : std::floor(high->value));
  if (first && last && *first > *last) return never();
  if (factor == 1) return first || last ? integers_between(first, last) : json_.integer();
  constexpr int64_t kFar = std::numeric_limits<int64_t>::max() / 4;
  if (first && last && *first > -kFar && *last < kFar &&
      (*last - *first) / factor <= kMaxEnumValues) {
    std::vector<Expr> values;
    const int64_t begin = *first / factor - 1;
    for (int64_t i = begin; i * factor <= *last; ++i)
      if (i * factor >= *first) values.push_back(text(std::to_string(i * factor)));
    return choice(std::move(values));
  }
  if (first || last || factor > 100)
    reader_.refuse(*flat.front(), "multipleOf",
                   "can be enforced up to 100 without bounds, or where the bounds leave at most "
                   "5000 values");
  return multiples(rules_, factor);
}

SchemaCompiler::Sizes SchemaCompiler::sizes(const Conjunction& flat, const char* min,
                                            const char* max) {
  Sizes all;
  for (const Json* schema : flat) {
    if (schema->contains(min) && (*schema)[min].get<int64_t>() > all.min) {
      all.min = (*schema)[min].get<int64_t>();
      all.schema = schema;
    }
    if (!schema->contains(max)) continue;
    const auto most = (*schema)[max].get<int64_t>();
    if (all.max == kUnbounded || most < all.max) {
      all.max = most;
      all.schema = schema;
    }
  }
  return all;
}

void SchemaCompiler::check_sizes(const Sizes& sizes, const char* keyword) const {
  if (std::max(sizes.min, sizes.max) > kMaxRepetitions)
    reader_.refuse(*sizes.schema, keyword,
                   fmt::format("goes beyond kMaxRepetitions, {}", kMaxRepetitions));
}

Expr SchemaCompiler::string(const Conjunction& flat) {
  const Expr inside = characters(flat);
  if (inside.is_never()) return never();
  return inside.kind == Expr::Kind::rule ? inside : sequence({text("\""), inside, text("\"")});
}

Expr SchemaCompiler::characters(const Conjunction& flat) {
  const Sizes length = sizes(flat, "minLength", "maxLength");
  if (length.max != kUnbounded && length.min > length.max) return never();
  std::set<std::string> patterns, formats;
  const Json* place = nullptr;
  for (const Json* schema : flat) {
    if (schema->contains("pattern")) patterns.insert((*schema)["pattern"].get<std::string>());
    if (schema->contains("format") && !is_any_text((*schema)["format"].get<std::string>()))
      formats.insert((*schema)["format"].get<std::string>());
    if (schema->contains("pattern") || schema->contains("format")) place = schema;
  }
  // Zod writes both, and its patterns say more. By default a format is an annotation in the
  // standard.
  if (!patterns.empty()) formats.clear();
  if (patterns.size() + formats.size() > 1)
    reader_.refuse(*place, patterns.empty() ? "format" : "pattern",
                   "meets another pattern or format, and a grammar follows only one");
  std::optional<Expr> all;
  if (!patterns.empty()) all = pattern_expr(*patterns.begin());
  if (!formats.empty()) {
    all = format_expr(*formats.begin());
    if (!all)
      reader_.refuse(
          *place, "format",
          fmt::format("is not one that is enforced: {} are", fmt::join(format_names(), ", ")));
  }
  const TextLengths has = all ? text_lengths(*all) : TextLengths{0, kUnbounded};
  const bool fits_min = has.least >= length.min;
  const bool fits_max =
      length.max == kUnbounded || (has.most != kUnbounded && has.most <= length.max);
  if (!formats.empty() && !(fits_min && fits_max)) all.reset();  // an annotation, likewise
  if (!all && length.min == 0 && length.max == kUnbounded) return json_.string();
  if (!all) {
    check_sizes(length, "maxLength");
    return repeat(json_.character(), length.min, length.max);
  }
  if (fits_min && fits_max) return spelled_in_json(*all);
  if (all->kind != Expr::Kind::repeat || all->parts[0].kind != Expr::Kind::set)
    reader_.refuse(*length.schema, fits_max ? "minLength" : "maxLength",
                   "is not implied by the pattern beside it, and a grammar follows only one: write "
                   "counts in the pattern");
  check_sizes(length, "maxLength");
  const int64_t min = std::max(all->min, length.min);
  const int64_t max = all->max == kUnbounded     ? length.max
                      : length.max == kUnbounded ? all->max
                                                 : std::min(all->max, length.max);
  if (max != kUnbounded && min > max) return never();
  return spelled_in_json(repeat(all->parts[0], min, max));
}

Expr SchemaCompiler::array(const Conjunction& flat) {
  const Sizes size = sizes(flat, "minItems", "maxItems");
  check_sizes(size, "maxItems");
  auto prefix = static_cast<int64_t>(SchemaReader::num_prefix_items(flat));
  int64_t max = size.max;
  if (reader_.is_never(SchemaReader::item(flat, static_cast<size_t>(prefix))))
    max = max == kUnbounded ? prefix : std::min(max, prefix);
  for (int64_t i = 0; i < prefix; ++i)
    if (reader_.is_never(SchemaReader::item(flat, static_cast<size_t>(i))))
      max = max == kUnbounded ? i : std::min(max, i);
  if (max != kUnbounded && size.min > max) return never();
  if (max != kUnbounded) prefix = std::min(prefix, max);

  Expr rest;
  if (max == kUnbounded || max > prefix) {
    const Expr item = value(SchemaReader::item(flat, static_cast<size_t>(prefix)));
    const int64_t least = std::max<int64_t>(size.min - prefix, 0);
    const int64_t most = max == kUnbounded ? max : max - prefix;
    rest = prefix == 0 ? json_.listed(item, least, most)
                       : repeat(sequence({json_.comma(), item}), least, most);
  }
  for (int64_t i = prefix - 1; i >= 0; --i) {
    Expr item = value(SchemaReader::item(flat, static_cast<size_t>(i)));
    rest = sequence({i > 0 ? json_.comma() : Expr{}, std::move(item), std::move(rest)});
    if (i >= size.min) rest = rule(rules_.add(optional(std::move(rest))));
  }
  return json_.enclosed("[", std::move(rest), "]");
}

}  // namespace nanovllm
