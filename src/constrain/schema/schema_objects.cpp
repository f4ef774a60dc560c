// SchemaCompiler's objects: declared keys in their order, then the others.
#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "constrain/regex.h"
#include "constrain/schema/match.h"
#include "constrain/schema/schema_compiler.h"

namespace nanovllm {
namespace {

constexpr size_t kMaxNameBytes = 512;  // a rule is made of each character
constexpr size_t kLongSequence = 64;   // parts; longer ones become rules, or copies would add up

struct Member {
  std::string name;
  Expr text{};
  bool required = false;
};

/// The declared keys: properties, then those that are only required.
std::vector<Member> declared_members(const Conjunction& flat) {
  std::vector<Member> members;
  const auto add = [&](const std::string& name, bool required) {
    const auto known = std::ranges::find(members, name, &Member::name);
    if (known == members.end())
      members.push_back({.name = name, .required = required});
    else
      known->required |= required;
  };
  for (const Json* schema : flat)
    if (const auto properties = schema->find("properties"); properties != schema->end())
      for (auto it = properties->begin(); it != properties->end(); ++it) add(it.key(), false);
  for (const Json* schema : flat)
    if (const auto required = schema->find("required"); required != schema->end())
      for (const Json& name : *required) add(name.get<std::string>(), true);
  return members;
}

Conjunction schemas_of(const Conjunction& flat, const char* keyword) {
  Conjunction all;
  for (const Json* schema : flat)
    if (const auto found = schema->find(keyword); found != schema->end()) all.push_back(&*found);
  return all;
}

/// Members in their order, each required one and any of the others, then what is free. How many are
/// written so far is a state: of two kinds, none and some, unless a bound makes it count.
class MemberList {
 public:
  MemberList(Rules& rules, JsonRules& json, Expr free, int64_t min, int64_t max)
      : rules_(rules), json_(json), free_(std::move(free)), min_(min), max_(max) {}

  Expr make(const std::vector<Member>& members) {
    const auto required = std::ranges::count_if(members, &Member::required);
    const auto most = std::ssize(members);
    counts_ = min_ > required || (max_ != kUnbounded && (max_ < most || !free_.is_never()));
    last_ = counts_ ? most : 1;
    std::vector<Expr> next;
    for (int64_t written = 0; written <= last_; ++written) next.push_back(end(written));
    for (size_t i = members.size(); i-- > 0;) {
      std::vector<Expr> here;
      for (int64_t written = 0; written <= last_; ++written)
        here.push_back(member(members[i], written, next));
      next = std::move(here);
    }
    return next[0];
  }

 private:
  Expr member(const Member& member, int64_t written, const std::vector<Expr>& next) {
    const auto then = static_cast<size_t>(std::min(written + 1, last_));
    Expr with = sequence({written > 0 ? json_.comma() : Expr{}, member.text, next[then]});
    if (counts_ && (written == last_ || written == max_)) with = never();
    if (member.required)
      return with.parts.size() < kLongSequence ? with : rule(rules_.add(std::move(with)));
    const Expr& without = next[static_cast<size_t>(written)];
    return rule(rules_.add(choice({std::move(with), without})));
  }

  Expr end(int64_t written) {
    const int64_t least = counts_ ? std::max<int64_t>(min_ - written, 0) : 0;
    const int64_t most = counts_ && max_ != kUnbounded ? max_ - written : kUnbounded;
    if (most != kUnbounded && most < least) return never();
    if (free_.is_never() || most == 0) return least == 0 ? Expr{} : never();
    if (written == 0) return json_.listed(free_, least, most);
    return repeat(sequence({json_.comma(), free_}), least, most);
  }

  Rules& rules_;
  JsonRules& json_;
  const Expr free_;
  const int64_t min_, max_;
  bool counts_ = false;
  int64_t last_ = 1;
};

}  // namespace

Expr SchemaCompiler::object(const Conjunction& flat) {
  const Sizes size = sizes(flat, "minProperties", "maxProperties");
  check_sizes(size, "maxProperties");
  std::vector<Member> members;
  std::vector<std::string> names;
  const Conjunction name_schemas = schemas_of(flat, "propertyNames");
  for (Member& member : declared_members(flat)) {
    const Conjunction schemas = reader_.property(flat, member.name);
    const bool possible = !reader_.is_never(schemas) && reader_.is_valid(member.name, name_schemas);
    if (!possible && member.required) return never();
    if (member.name.size() > kMaxNameBytes)
      reader_.refuse(*flat.front(), "",
                     fmt::format("names a property of {} bytes, the limit kMaxNameBytes is {}",
                                 member.name.size(), kMaxNameBytes));
    names.push_back(member.name);
    if (!possible) continue;
    member.text = sequence({json_.literal(member.name), text(":"), json_.space(), value(schemas)});
    members.push_back(std::move(member));
  }
  const bool has_patterns = !schemas_of(flat, "patternProperties").empty();
  Expr free = has_patterns ? pattern_member(flat, names) : free_member(flat, names);
  const auto required = std::ranges::count_if(members, &Member::required);
  // A key may be written twice and counts once.
  if (size.min > required + 1 && !free.is_never())
    reader_.refuse(*size.schema, "minProperties",
                   "can be enforced up to one more than the required keys, or with "
                   "additionalProperties: false");
  if (members.empty() && size.min == 0 && size.max == kUnbounded && !has_patterns &&
      name_schemas.empty() && names.empty() && SchemaReader::free_property(flat).empty())
    return json_.object();
  return json_.enclosed(
      "{", MemberList(rules_, json_, std::move(free), size.min, size.max).make(members), "}");
}

// A member whose key no `properties` names.
Expr SchemaCompiler::free_member(const Conjunction& flat, const std::vector<std::string>& names) {
  const Conjunction schemas = SchemaReader::free_property(flat);
  if (reader_.is_never(schemas)) return never();
  const Conjunction name_schemas = schemas_of(flat, "propertyNames");
  std::vector<Expr> keys;
  if (name_schemas.empty()) keys.push_back(json_.key_except(names));
  const std::vector<Conjunction> ways = reader_.alternatives(name_schemas);
  for (const Conjunction& way : ways) {
    if (name_schemas.empty() || !(SchemaReader::types(way) & kString)) continue;
    Json storage;
    if (const Json* values = finite_values(way, storage)) {
      for (const Json& key : *values)
        if (key.is_string() && reader_.is_valid(key, way) &&
            std::ranges::count(names, key.get<std::string>()) == 0)
          keys.push_back(json_.literal(key));
    } else if (way.empty()) {
      keys.push_back(json_.key_except(names));
    } else if (names.empty()) {
      keys.push_back(string(way));
    } else {
      reader_.refuse(*name_schemas.front(), "",
                     "is supported without properties and required, or as an enum");
    }
  }
  Expr key = choice(std::move(keys));
  if (key.is_never()) return never();
  return rule(rules_.add(sequence({std::move(key), text(":"), json_.space(), value(schemas)})));
}

// A member whose key matches the one pattern that there is; others are not allowed.
Expr SchemaCompiler::pattern_member(const Conjunction& flat,
                                    const std::vector<std::string>& names) {
  const Conjunction holders = schemas_of(flat, "patternProperties");
  const auto refuse = [&](const std::string& problem) {
    reader_.refuse(*holders.front(), "", problem);
  };
  std::string pattern;
  for (const Json* holder : holders)
    for (auto it = holder->begin(); it != holder->end(); ++it) {
      if (!pattern.empty() && it.key() != pattern) refuse("is supported with one pattern");
      pattern = it.key();
    }
  if (pattern.empty()) return free_member(flat, names);
  if (!reader_.is_never(SchemaReader::free_property(flat)))
    refuse("is supported beside additionalProperties: false");
  if (!schemas_of(flat, "propertyNames").empty()) refuse("is not supported beside propertyNames");
  const Expr key = parse_regex_search(pattern, "json: patternProperties");
  for (const std::string& name : names)
    if (matches(key, name))
      refuse(fmt::format("has a pattern that matches the property {}", quote(name)));
  Conjunction schemas;
  for (const Json* schema : flat) {
    const auto own = schema->find("patternProperties");
    if (own != schema->end() && own->contains(pattern)) {
      schemas.push_back(&(*own)[pattern]);
      continue;
    }
    const Conjunction further = SchemaReader::free_property({schema});
    schemas.insert(schemas.end(), further.begin(), further.end());
  }
  if (reader_.is_never(schemas)) return never();
  return rule(rules_.add(
      sequence({text("\""), spelled_in_json(key), text("\":"), json_.space(), value(schemas)})));
}

}  // namespace nanovllm
