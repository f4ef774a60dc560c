#include "kv_events/config.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/limits.h"
#include "io/json_object.h"

namespace nanovllm {
namespace {

constexpr auto kBad = ErrorKind::invalid_argument;

struct TextField {
  const char* name;
  std::string KvEventsConfig::*value;
};
struct CountField {
  const char* name;
  int64_t KvEventsConfig::*value;
};
using C = KvEventsConfig;
constexpr TextField kTexts[] = {{"publisher", &C::publisher},
                                {"endpoint", &C::endpoint},
                                {"replay_endpoint", &C::replay_endpoint},
                                {"topic", &C::topic}};
constexpr CountField kCounts[] = {
    {"buffer_steps", &C::buffer_steps}, {"hwm", &C::hwm}, {"max_queue_size", &C::max_queue_size}};
constexpr const char* kSwitch = "enable_kv_cache_events";

}  // namespace

KvEventsConfig read_kv_events_config(std::string_view json, std::string_view what) {
  const Json parsed = parse_json(json, what, kBad);
  const JsonObject object(parsed, std::string(what), kBad);
  KvEventsConfig config;
  config.enable_kv_cache_events = object.optional_bool(kSwitch).value_or(false);
  for (const TextField& field : kTexts)
    if (auto text = object.optional_string(field.name)) config.*field.value = std::move(*text);
  for (const CountField& field : kCounts)
    if (const auto count = object.optional_integer(field.name, 0, kMaxKvEvents))
      config.*field.value = *count;
  for (const auto& item : parsed.items()) {
    const std::string& name = item.key();
    const auto is_it = [&](const auto& field) { return field.name == name; };
    check(name == kSwitch || std::ranges::any_of(kTexts, is_it) ||
              std::ranges::any_of(kCounts, is_it),
          kBad, "{}: there is no field {}", what, quote(name));
  }
  return config;
}

}  // namespace nanovllm
