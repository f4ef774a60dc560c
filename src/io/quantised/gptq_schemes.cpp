// quantization_config of GPTQ, AutoAWQ and AutoRound, which has the layouts of the other two.
#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/quantised/module_rules.h"
#include "io/quantised/quantization.h"
#include "io/quantised/scheme_fields.h"

namespace nanovllm {
namespace {

constexpr size_t kMostRules = 1024;  // each is tried on each module

/// The fields of GPTQ's schemes that rules for single modules may change.
void change_gptq_scheme(const JsonObject& in, QuantScheme& scheme) {
  if (in.find("bits")) scheme.bits = bits_of(in, "bits", {4, 8});
  if (in.find("group_size")) scheme.group_size = group_size_of(in);
  scheme.scales = scheme.group_size < 0 ? QuantScales::channel : QuantScales::group;
  scheme.symmetric = in.optional_bool("sym").value_or(scheme.symmetric);
  scheme.is_ordered = in.optional_bool("desc_act").value_or(scheme.is_ordered);
}

QuantScheme gptq_scheme(const JsonObject& config) {
  QuantScheme scheme{.storage = QuantStorage::gptq, .scale_name = "scales"};
  for (const char* needed : {"bits", "group_size"})
    if (!config.find(needed)) refuse(config, "{} is missing", config.path(needed));
  change_gptq_scheme(config, scheme);
  const char* key = config.find("checkpoint_format") ? "checkpoint_format" : "format";
  const std::string format = one_of(config, key, "gptq", {"gptq", "gptq_v2"});
  scheme.zero_offset = format == "gptq" ? 1 : 0;
  one_of(config, "pack_dtype", "int32", {"int32"});
  if (config.optional_bool("is_marlin_format").value_or(false))
    refuse(config, "{} is not supported: use GPTQ's own layout", config.path("is_marlin_format"));
  return scheme;
}

QuantScheme awq_scheme(const JsonObject& config) {
  QuantScheme scheme{.storage = QuantStorage::awq, .symmetric = false, .scale_name = "scales"};
  scheme.bits = bits_of(config, config.find("bits") ? "bits" : "w_bit", {4});
  scheme.group_size =
      group_size_of(config, config.find("q_group_size") ? "q_group_size" : "group_size");
  if (scheme.group_size < 0) scheme.scales = QuantScales::channel;
  if (config.optional_string("version") != "GEMM")
    one_of(config, config.find("version") ? "version" : "format", "gemm", {"gemm"});
  if (!config.optional_bool("zero_point").value_or(true))
    refuse(config, "{} false is not supported", config.path("zero_point"));
  return scheme;
}

/// The scheme that AutoRound's extra_config gives a module; none: it is plain.
std::optional<QuantScheme> own_scheme(const JsonObject& modules, const std::string& name,
                                      const QuantScheme& scheme) {
  const auto own = modules.optional_object(name);
  if (!own) refuse(modules, "{} is null", modules.path(quote(name)));
  if (own->optional_integer("bits", 1, 64).value_or(scheme.bits) >= 16) return std::nullopt;
  one_of(*own, "data_type", "int", {"int"});
  QuantScheme changed = scheme;
  change_gptq_scheme(*own, changed);
  if (scheme.storage == QuantStorage::awq) changed.symmetric = false;
  if (scheme.storage == QuantStorage::awq && changed != scheme)
    refuse(modules, "{} is not supported: one scheme for all modules of AWQ's layout",
           modules.path(quote(name)));
  return changed;
}

}  // namespace

void QuantizationConfig::read_gptq(const JsonObject& config) {
  QuantScheme scheme = gptq_scheme(config);
  read_dynamic(config, scheme);
  // Of a layer's linear modules those that are quantised, in lists; without it all.
  ModuleRules targets;
  const Json* lists = config.find("modules_in_block_to_quantize");
  targets.all_linear = !lists;
  targets.parts_too = true;
  for (const Json& list : lists ? *lists : Json::array())
    for (const Json& name : list.is_array() ? list : Json::array({list}))
      if (name.is_string())
        targets.names.insert(name.get<std::string>());
      else
        config.refuse("modules_in_block_to_quantize", "lists of names", name);
  add(std::move(scheme), std::move(targets));
}

/// GPTQModel's rules for single modules, of which the first that matches counts: "-:" leaves them
/// plain, others change their scheme.
void QuantizationConfig::read_dynamic(const JsonObject& config, const QuantScheme& scheme) {
  const auto rules = config.optional_object("dynamic");
  if (!rules) return;
  if (rules->json().size() > kMostRules)
    refuse(config, "{} has more than {} rules", config.path("dynamic"), kMostRules);
  for (const auto& item : rules->json().items()) {
    const std::string& rule = item.key();
    std::optional<QuantScheme> own;
    if (!rule.starts_with("-:")) {
      const auto changes = rules->optional_object(rule);
      if (!changes) refuse(config, "{} is not supported", rules->path(quote(rule)));
      change_gptq_scheme(*changes, own.emplace(scheme));
    }
    ModuleRules modules;
    const bool is_signed = rule.starts_with("-:") || rule.starts_with("+:");
    modules.add(config, "dynamic", "re:" + rule.substr(is_signed ? 2 : 0));
    add(std::move(own), std::move(modules));
  }
}

void QuantizationConfig::read_awq(const JsonObject& config) {
  add_all_linear(awq_scheme(config), config);
}

/// The layouts of GPTQ and AWQ.
void QuantizationConfig::read_auto_round(const JsonObject& config) {
  const std::string packing =
      one_of(config, "packing_format", "", {"auto_round:auto_gptq", "auto_round:auto_awq"});
  one_of(config, "data_type", "int", {"int"});
  QuantScheme scheme = packing.ends_with("gptq") ? gptq_scheme(config) : awq_scheme(config);
  read_extra_config(config, scheme);
  add_all_linear(std::move(scheme), config);
}

/// Modules with a scheme of their own, by names and, behind them, by expressions that occur in a
/// name (vLLM's AutoRoundConfig). Names are many, one for each expert's weights, and schemes few.
void QuantizationConfig::read_extra_config(const JsonObject& config, const QuantScheme& scheme) {
  const auto modules = config.optional_object("extra_config");
  if (!modules) return;
  struct Rule {
    const Json* fields;
    std::optional<QuantScheme> scheme;
    ModuleRules modules;
  };
  std::vector<Rule> named, searched;
  for (const auto& item : modules->json().items()) {
    const std::string& name = item.key();
    const bool is_name = name.find_first_of("*+?^$()[]{}|\\") == name.npos;
    std::vector<Rule>& rules = is_name ? named : searched;
    auto rule = std::find_if(rules.begin(), rules.end(), [&](const Rule& other) {
      return is_name && *other.fields == item.value();
    });
    if (rule == rules.end()) {
      if (rules.size() == kMostRules)
        refuse(config, "{} has more than {} rules", config.path("extra_config"), kMostRules);
      rules.push_back({&item.value(), own_scheme(*modules, name, scheme), {}});
      rule = rules.end() - 1;
    }
    if (is_name)
      rule->modules.names.insert(name);
    else
      rule->modules.add(config, "extra_config", "re:.*?(?:" + name + ")");
  }
  for (auto* rules : {&named, &searched})
    for (Rule& rule : *rules) add(std::move(rule.scheme), std::move(rule.modules));
}

}  // namespace nanovllm
