// Instances of schemas as texts. The order of keys is the schema's, so an instance is tried in all
// of its orders.
#pragma once

#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "constrain/rig.h"
#include "io/json.h"

namespace nanovllm {

/// An integer spelled 1.0: a grammar writes 1.
inline bool has_whole_float(const Json& value) {
  if (value.is_structured()) return std::ranges::any_of(value, has_whole_float);
  return value.is_number_float() && value.get<double>() == std::floor(value.get<double>());
}

/// `value` in the orders of its keys, those of nested objects included; at most `most`.
inline std::vector<Json> in_all_orders(const Json& value, size_t most = 5000) {
  if (!value.is_structured() || value.empty()) return {value};
  std::vector<std::string> keys;
  if (value.is_object())
    for (auto it = value.begin(); it != value.end(); ++it) keys.push_back(it.key());
  std::ranges::sort(keys);
  std::vector<Json> out;
  do {
    std::vector<Json> made{value.is_object() ? Json::object() : Json::array()};
    for (size_t i = 0; i < value.size(); ++i) {
      const Json& member = value.is_object() ? value[keys[i]] : value[i];
      std::vector<Json> longer;
      for (const Json& variant : in_all_orders(member, most))
        for (const Json& begun : made) {
          if (longer.size() == most) break;
          Json next = begun;
          if (value.is_object())
            next[keys[i]] = variant;
          else
            next.push_back(variant);
          longer.push_back(std::move(next));
        }
      made = std::move(longer);
    }
    out.insert(out.end(), made.begin(), made.end());
  } while (out.size() < most && std::ranges::next_permutation(keys).found);
  return out;
}

/// As Python's json.dumps writes it: a space behind each comma and colon.
inline std::string with_spaces(const Json& value) {
  if (!value.is_structured()) return value.dump();
  std::string text;
  for (auto it = value.begin(); it != value.end(); ++it) {
    if (it != value.begin()) text += ", ";
    if (value.is_object()) text += Json(it.key()).dump() + ": ";
    text += with_spaces(*it);
  }
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

/// Whether one order of `value`'s keys is taken; then it is taken with spaces too.
inline bool takes_in_some_order(const GrammarRig& rig, const Grammar& grammar, const Json& value) {
  const auto takes = [&](const Json& order) {
    constexpr unsigned kCut = 0xA5A5F00DU;
    if (!rig.takes(grammar, order.dump(), kCut)) return false;
    EXPECT_TRUE(rig.takes(grammar, with_spaces(order), kCut)) << with_spaces(order);
    return true;
  };
  return takes(value) || std::ranges::any_of(in_all_orders(value), takes);
}

}  // namespace nanovllm
