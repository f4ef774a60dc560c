#include "io/quantised/quantization.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/quantised/module_rules.h"
#include "io/quantised/scheme_fields.h"

namespace nanovllm {
namespace {

void refuse_unless_empty(const JsonObject& in, const char* key, const char* why) {
  const Json* value = in.find(key);
  if (value && !value->empty()) refuse(in, "{} is not supported: {}", in.path(key), why);
}

/// Reads which numbers share a scale, and the order of the columns.
void read_scales(const JsonObject& args, QuantScheme& scheme) {
  const int64_t size = args.optional_integer("group_size", -1, int64_t{1} << 20).value_or(0);
  const std::string strategy = one_of(args, "strategy",
                                      size > 0   ? "group"
                                      : size < 0 ? "channel"
                                                 : "tensor",
                                      {"tensor", "channel", "group", "block"});
  scheme.scales = strategy == "tensor"    ? QuantScales::tensor
                  : strategy == "channel" ? QuantScales::channel
                  : strategy == "group"   ? QuantScales::group
                                          : QuantScales::block;
  if ((size > 0) != (scheme.scales == QuantScales::group))
    refuse(args, "{} {} with strategy {}", args.path("group_size"), size, quote(strategy));
  if (size > 0) scheme.group_size = group_size_of(args);
  const Json* block = args.find("block_structure");  // "128x128" in early files
  if (scheme.scales == QuantScales::block &&
      (!block || (*block != "128x128" && *block != Json::array({kQuantBlock, kQuantBlock}))))
    refuse(args, "{} is not supported: use [128, 128]", args.path("block_structure"));
  if (const Json* order = args.find("actorder")) {
    scheme.is_ordered = *order == true || *order == "group" || *order == "dynamic";
    if (!scheme.is_ordered && *order != false && *order != "weight" && *order != "static")
      args.refuse("actorder", "\"group\", \"weight\" or null", *order);
    if (scheme.is_ordered && scheme.scales != QuantScales::group)
      refuse(args, "{} needs strategy \"group\"", args.path("actorder"));
  }
}

QuantScheme weight_args(const JsonObject& args, const std::string& format) {
  QuantScheme scheme{.scale_name = "weight_scale"};
  const std::string type = one_of(args, "type", "int", {"int", "float"});
  if (args.optional_bool("dynamic").value_or(false))
    refuse(args, "{} true is not supported for weights", args.path("dynamic"));
  scheme.symmetric = args.optional_bool("symmetric").value_or(true);
  read_scales(args, scheme);
  const bool is_packed = format == "pack-quantized";
  scheme.bits = is_packed || type == "int" ? bits_of(args, "num_bits", {4, 8})
                                           : bits_of(args, "num_bits", {8});
  scheme.storage = is_packed       ? QuantStorage::packed
                   : type == "int" ? QuantStorage::int8
                                   : QuantStorage::e4m3;
  if (type != "int" ? is_packed || format == "int-quantized" : format == "float-quantized")
    refuse(args, "{} {} with format {}", args.path("type"), quote(type), format);
  const bool in_groups = scheme.scales == QuantScales::group;
  if (is_packed ? !in_groups && scheme.scales != QuantScales::channel
                : in_groups && scheme.bits == 8)
    refuse(args, "{} is not supported with format {}", args.path("strategy"), format);
  if (!is_packed && scheme.is_ordered)
    refuse(args, "{} is not supported with format {}", args.path("actorder"), format);
  if (!is_packed && !scheme.symmetric)
    refuse(args, "{} false is not supported with format {}", args.path("symmetric"), format);
  return scheme;
}

QuantActivations activation_args(const JsonObject& args, const QuantScheme& scheme) {
  if (scheme.storage == QuantStorage::packed &&
      (!scheme.symmetric || (scheme.bits == 8 && scheme.scales == QuantScales::group)))
    refuse(args, "{} is not supported with weights that have zero points, or int8 in groups",
           args.path("num_bits"));
  bits_of(args, "num_bits", {8});
  const std::string type = one_of(args, "type", "int", {"int", "float"});
  if ((type == "int") != (scheme.storage != QuantStorage::e4m3))
    refuse(args, "{} {} differs from the weights'", args.path("type"), quote(type));
  if (!args.optional_bool("symmetric").value_or(true))
    refuse(args, "{} false is not supported: use symmetric activations", args.path("symmetric"));
  const bool dynamic = args.optional_bool("dynamic").value_or(false);
  const std::string strategy = one_of(args, "strategy", "tensor", {"tensor", "token", "group"});
  if (scheme.scales == QuantScales::block) {
    if (!dynamic || strategy != "group" || args.integer("group_size", 1, 1 << 20) != kQuantBlock)
      refuse(args, "{} {} is not supported with weights in blocks: use dynamic groups of 128",
             args.path("strategy"), quote(strategy));
    return QuantActivations::group;
  }
  if (dynamic && strategy == "token") return QuantActivations::token;
  if (!dynamic && strategy == "tensor") return QuantActivations::tensor;
  // A scale over all rows of a batch would make a request's bytes depend on the others.
  refuse(args, "{} {} with dynamic {} is not supported: use dynamic \"token\" or static \"tensor\"",
         args.path("strategy"), quote(strategy), dynamic);
}

KvCacheScheme kv_cache_scheme_of(const JsonObject& scheme, std::vector<std::string>& warnings) {
  const Json* dynamic = scheme.find("dynamic");
  const bool is_dynamic = dynamic && *dynamic == true;
  const std::string strategy = scheme.optional_string("strategy").value_or("tensor");
  if (scheme.optional_string("type").value_or("") == "float" &&
      scheme.integer("num_bits", 1, 64) == 8 && scheme.optional_bool("symmetric").value_or(true) &&
      (is_dynamic ||
       ((!dynamic || *dynamic == false) && (strategy == "tensor" || strategy == "attn_head"))))
    return is_dynamic ? KvCacheScheme::fp8 : KvCacheScheme::fp8_static;
  warnings.push_back(
      "config.json: kv_cache_scheme is ignored, for only 8-bit floats with a scale of a tensor or "
      "of a head are known: keys and values are kept in the model's dtype");
  return KvCacheScheme::none;
}

}  // namespace

QuantizationConfig::QuantizationConfig(const JsonObject& config,
                                       std::vector<std::string>& warnings) {
  if (!config.find("quant_method"))
    refuse(config,
           "{} is missing, as in MLX's files: use a checkpoint of compressed-tensors, gptq, awq or "
           "fp8",
           config.path("quant_method"));
  method_ = one_of(config, "quant_method", "",
                   {"compressed-tensors", "gptq", "awq", "fp8", "auto-round", "modelopt"});
  if (method_ == "compressed-tensors")
    read_compressed_tensors(config, warnings);
  else if (method_ == "gptq")
    read_gptq(config);
  else if (method_ == "awq")
    read_awq(config);
  else if (method_ == "fp8")
    read_fp8(config);
  else if (method_ == "auto-round")
    read_auto_round(config);
  else
    read_modelopt(config, warnings);
}

bool QuantizationConfig::has_activations() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const Group& group) {
    return group.scheme && group.scheme->activations != QuantActivations::none;
  });
}

void QuantizationConfig::add(std::optional<QuantScheme> scheme, ModuleRules modules) {
  groups_.push_back({std::move(scheme), std::make_shared<const ModuleRules>(std::move(modules))});
}

void QuantizationConfig::read_compressed_tensors(const JsonObject& config,
                                                 std::vector<std::string>& warnings) {
  const auto format_of = [](const JsonObject& in) {
    return one_of(in, "format", "",
                  {"pack-quantized", "float-quantized", "int-quantized", "naive-quantized"});
  };
  one_of(config, "quantization_status", "compressed", {"compressed", "frozen"});
  refuse_unless_empty(config, "transform_config", "it changes the activations");
  refuse_unless_empty(config, "moe_sparsity_config", "all layers have as many experts");
  if (const auto sparsity = config.optional_object("sparsity_config");
      sparsity && !sparsity->json().empty())
    one_of(*sparsity, "format", "dense", {"dense"});
  if (const auto scheme = config.optional_object("kv_cache_scheme"))
    kv_cache_scheme_ = kv_cache_scheme_of(*scheme, warnings);
  ModuleRules ignored;
  for (const std::string& name :
       config.optional_strings("ignore").value_or(std::vector<std::string>{}))
    ignored.add(config, "ignore", name);
  add(std::nullopt, std::move(ignored));

  const auto groups = config.optional_object("config_groups");
  if (!groups || groups->json().empty())
    refuse(config, "{} is missing", config.path("config_groups"));
  for (const auto& item : groups->json().items()) {
    const auto group = groups->optional_object(item.key());
    if (!group) refuse(config, "{} is null", groups->path(item.key()));
    const std::string format = format_of(group->find("format") ? *group : config);
    refuse_unless_empty(*group, "output_activations", "outputs are not quantised");
    const auto weights = group->optional_object("weights");
    if (!weights)
      refuse(config, "{} is missing: attention's own activations are not quantised",
             group->path("weights"));
    QuantScheme scheme = weight_args(*weights, format);
    if (const auto inputs = group->optional_object("input_activations"))
      scheme.activations = activation_args(*inputs, scheme);
    ModuleRules targets;
    for (const std::string& name :
         group->optional_strings("targets").value_or(std::vector<std::string>{})) {
      if (name == "Linear")
        targets.all_linear = true;
      else
        targets.add(config, "targets", name);
    }
    add(std::move(scheme), std::move(targets));
  }
}

void QuantizationConfig::read_fp8(const JsonObject& config) {
  QuantScheme scheme{.storage = QuantStorage::e4m3, .bits = 8, .scale_name = "weight_scale"};
  one_of(config, "fmt", "e4m3", {"e4m3"});
  one_of(config, "scale_fmt", "float", {"float"});
  const bool is_static =
      one_of(config, "activation_scheme", "dynamic", {"dynamic", "static"}) == "static";
  if (const auto block = config.optional_integers("weight_block_size", 1, int64_t{1} << 20)) {
    if (*block != std::vector<int64_t>{kQuantBlock, kQuantBlock})
      refuse(config, "{} is not supported: use [128, 128]", config.path("weight_block_size"));
    if (is_static)
      refuse(config, "{} \"static\" is not supported with weight_block_size",
             config.path("activation_scheme"));
    scheme.scales = QuantScales::block;
    scheme.activations = QuantActivations::group;
    scheme.scale_name = "weight_scale_inv";
  } else {
    scheme.scales = QuantScales::tensor;
    scheme.activations = is_static ? QuantActivations::tensor : QuantActivations::token;
  }
  add_all_linear(std::move(scheme), config);
}

/// NVIDIA's FP8: one scale for a weight, and a static one for what meets it.
void QuantizationConfig::read_modelopt(const JsonObject& config,
                                       std::vector<std::string>& warnings) {
  one_of(config, "quant_algo", "", {"FP8"});
  if (const auto scheme = config.optional_object("kv_cache_scheme"))
    kv_cache_scheme_ = kv_cache_scheme_of(*scheme, warnings);
  else if (config.optional_string("kv_cache_quant_algo").value_or("") == "FP8")
    kv_cache_scheme_ = KvCacheScheme::fp8_static;
  add_all_linear({.storage = QuantStorage::e4m3,
                  .scales = QuantScales::tensor,
                  .activations = QuantActivations::tensor,
                  .bits = 8,
                  .scale_name = "weight_scale"},
                 config);
  // Names of modules, in which a star stands for any text.
  ModuleRules ignored;
  for (const char* key : {"ignore", "exclude_modules"})
    for (const std::string& name :
         config.optional_strings(key).value_or(std::vector<std::string>{})) {
      std::string expression = name;
      for (size_t at = 0; (at = expression.find_first_of(".*", at)) != name.npos; at += 2)
        expression.insert(at, expression[at] == '.' ? "\\" : ".");
      ignored.add(config, key, name.find('*') == name.npos ? name : "re:" + expression + "$");
    }
  add(std::nullopt, std::move(ignored));
}

void QuantizationConfig::add_all_linear(QuantScheme scheme, const JsonObject& config) {
  ModuleRules all, ignored;
  all.all_linear = true;
  ignored.parts_too = true;
  for (const char* key : {"modules_to_not_convert", "ignored_layers"})
    for (const std::string& name :
         config.optional_strings(key).value_or(std::vector<std::string>{}))
      ignored.names.insert(name.ends_with('.') ? name.substr(0, name.size() - 1) : name);
  add(std::nullopt, std::move(ignored));
  add(std::move(scheme), std::move(all));
}

const QuantScheme* QuantizationConfig::find(const std::string& module) const {
  if (module.ends_with("embed_tokens")) return nullptr;
  // A name or an expression goes before the class "Linear".
  for (const Group& group : groups_)
    if (group.modules->matches(module)) return group.scheme ? &*group.scheme : nullptr;
  for (const Group& group : groups_)
    if (group.modules->all_linear) return &*group.scheme;
  return nullptr;
}

std::string QuantizationConfig::describe() const {
  const QuantScheme* main = nullptr;
  for (const Group& group : groups_) {
    if (group.scheme) main = &*group.scheme;
    if (group.modules->all_linear) break;
  }
  const std::string name = main->storage == QuantStorage::e4m3 ? "fp8"
                           : main->bits == 4 && main->activations != QuantActivations::none
                               ? "w4a8"
                               : fmt::format("int{}", main->bits);
  return fmt::format("{} ({})", name, method_);
}

void QuantizationConfig::quantise_while_loading() {
  method_ = "quantised while loading";
  for (Group& group : groups_)
    if (group.scheme) group.scheme->while_loading = true;
}

void QuantizationConfig::dequantise_while_loading() {
  for (Group& group : groups_)
    if (group.scheme) group.scheme->is_kept = false;
}

}  // namespace nanovllm
