// Follows transformers/modeling_rope_utils.py (version 5), which also defines what the spelling of
// version 4 means now.
#include "io/rope_parameters.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace nanovllm {
namespace {

constexpr std::array<std::pair<std::string_view, RopeType>, 5> kTypes{
    {{"default", RopeType::standard},
     {"linear", RopeType::linear},
     {"dynamic", RopeType::dynamic},
     {"llama3", RopeType::llama3},
     {"yarn", RopeType::yarn}}};

constexpr int64_t kMaxPositions = int64_t{1} << 31;

/// One RoPE object, and the field of the whole configuration that stands in for a missing one.
class RopeReader {
 public:
  RopeReader(const JsonObject& config, const JsonObject& rope, int64_t max_positions)
      : config_(config), rope_(rope), max_positions_(max_positions) {}

  RopeParameters read(std::vector<std::string>& warnings) const {
    RopeParameters parameters;
    parameters.type = type();
    parameters.theta =
        positive("rope_theta", config_.optional_number("rope_theta").value_or(parameters.theta));
    parameters.partial_rotary_factor = positive(
        "partial_rotary_factor", config_.optional_number("partial_rotary_factor").value_or(1.0));
    if (parameters.partial_rotary_factor > 1)
      rope_.refuse(fmt::format("partial_rotary_factor must be at most 1, got {}",
                               parameters.partial_rotary_factor));
    switch (parameters.type) {
      case RopeType::standard:
        break;
      case RopeType::linear:
        parameters.factor = required_factor();
        break;
      case RopeType::dynamic:
        parameters.factor = required_factor();
        parameters.original_max_position_embeddings = max_positions_;
        break;
      case RopeType::llama3:
        read_llama3(parameters);
        break;
      case RopeType::yarn:
        read_yarn(parameters);
        break;
    }
    warn_about_unknown_fields(parameters.type, warnings);
    return parameters;
  }

 private:
  RopeType type() const {
    std::optional<std::string> name = rope_.optional_string("rope_type");
    if (!name) name = rope_.optional_string("type");
    if (!name) return RopeType::standard;
    for (const auto& [known, type] : kTypes)
      if (*name == known) return type;
    rope_.refuse(
        fmt::format("RoPE type {} is not supported: use default, linear, dynamic, llama3 or yarn",
                    quote(*name)));
  }

  double positive(std::string_view key, double otherwise) const {
    const double value = rope_.optional_number(key).value_or(otherwise);
    if (!std::isfinite(value) || value <= 0)
      rope_.refuse(
          fmt::format("{} must be a number greater than 0, got {}", rope_.path(key), value));
    return value;
  }

  double required(std::string_view key) const {
    if (!rope_.find(key)) rope_.refuse(fmt::format("{} is missing", rope_.path(key)));
    return positive(key, 0);
  }

  double at_least_one(double factor) const {
    if (factor < 1)
      rope_.refuse(fmt::format("{} must be at least 1, got {}", rope_.path("factor"), factor));
    return factor;
  }
  double required_factor() const { return at_least_one(required("factor")); }

  /// Some files keep this one outside, and transformers gives that place priority.
  int64_t original_positions() const {
    constexpr const char* kKey = "original_max_position_embeddings";
    const auto outside = config_.optional_integer(kKey, 1, kMaxPositions);
    const auto inside = rope_.optional_integer(kKey, 1, kMaxPositions);
    return outside.value_or(inside.value_or(max_positions_));
  }

  void read_llama3(RopeParameters& parameters) const {
    parameters.factor = required_factor();
    parameters.low_freq_factor = required("low_freq_factor");
    parameters.high_freq_factor = required("high_freq_factor");
    if (parameters.high_freq_factor <= parameters.low_freq_factor)
      rope_.refuse(fmt::format("{} is {}, must be greater than low_freq_factor {}",
                               rope_.path("high_freq_factor"), parameters.high_freq_factor,
                               parameters.low_freq_factor));
    parameters.original_max_position_embeddings = original_positions();
  }

  void read_yarn(RopeParameters& parameters) const {
    if (parameters.theta <= 1)
      rope_.refuse(fmt::format("{} is {}, must be greater than 1 for RoPE type yarn",
                               rope_.path("rope_theta"), parameters.theta));
    const int64_t original = original_positions();
    parameters.original_max_position_embeddings = original;
    parameters.factor = at_least_one(rope_.find("factor") ? positive("factor", 1)
                                                          : static_cast<double>(max_positions_) /
                                                                static_cast<double>(original));
    // 0 means the default, as `or` in Python does.
    const auto unless_zero = [&](std::string_view key, double otherwise) {
      const double value = rope_.optional_number(key).value_or(0);
      return value == 0 ? otherwise : positive(key, otherwise);
    };
    parameters.beta_fast = unless_zero("beta_fast", parameters.beta_fast);
    parameters.beta_slow = unless_zero("beta_slow", parameters.beta_slow);
    if (parameters.beta_fast < parameters.beta_slow)
      rope_.refuse(fmt::format("{} is {}, must be at least beta_slow {}", rope_.path("beta_fast"),
                               parameters.beta_fast, parameters.beta_slow));
    parameters.truncate = rope_.optional_bool("truncate").value_or(true);
    parameters.attention_factor = yarn_attention_factor(parameters.factor);
  }

  double yarn_attention_factor(double factor) const {
    if (rope_.find("attention_factor")) return positive("attention_factor", 1);
    const auto mscale = [&](double weight) {
      return factor <= 1 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0;
    };
    const double above = rope_.optional_number("mscale").value_or(0);
    const double below = rope_.optional_number("mscale_all_dim").value_or(0);
    const double result = above != 0 && below != 0 ? mscale(above) / mscale(below) : mscale(1);
    if (!std::isfinite(result) || result <= 0)
      rope_.refuse(fmt::format("{} {} and mscale_all_dim {} give no usable attention factor",
                               rope_.path("mscale"), above, below));
    return result;
  }

  /// Hugging Face ignores these as well; what it does not ignore (sections per axis, factors per
  /// dimension) is refused.
  void warn_about_unknown_fields(RopeType type, std::vector<std::string>& warnings) const {
    static constexpr std::array<std::string_view, 15> kKnown{"rope_type",
                                                             "type",
                                                             "rope_theta",
                                                             "partial_rotary_factor",
                                                             "factor",
                                                             "original_max_position_embeddings",
                                                             "low_freq_factor",
                                                             "high_freq_factor",
                                                             "beta_fast",
                                                             "beta_slow",
                                                             "truncate",
                                                             "attention_factor",
                                                             "mscale",
                                                             "mscale_all_dim",
                                                             "max_position_embeddings"};
    static constexpr std::array<std::string_view, 3> kOtherMathematics{
        "mrope_section", "short_factor", "long_factor"};
    for (const auto& [key, value] : rope_.json().get_ref<const Json::object_t&>()) {
      if (std::find(kOtherMathematics.begin(), kOtherMathematics.end(), key) !=
          kOtherMathematics.end())
        rope_.refuse(fmt::format("{} is not supported", rope_.path(key)));
      if (value.is_object())
        rope_.refuse(
            fmt::format("{}: RoPE per layer type is not supported", rope_.path(quote(key))));
      if (std::find(kKnown.begin(), kKnown.end(), key) == kKnown.end())
        warnings.push_back(
            fmt::format("config.json: {} is not a field of RoPE type {} and is ignored",
                        rope_.path(quote(key)), name_of(type)));
    }
  }

  const JsonObject& config_;
  const JsonObject& rope_;
  int64_t max_positions_;
};

}  // namespace

std::string_view name_of(RopeType type) {
  for (const auto& [name, known] : kTypes)
    if (known == type) return name;
  return "?";
}

RopeParameters read_rope_parameters(const JsonObject& config, int64_t max_position_embeddings,
                                    std::vector<std::string>& warnings) {
  // An empty object counts as absent, and rope_scaling goes before rope_parameters: transformers
  // reads them so.
  for (const char* key : {"rope_scaling", "rope_parameters"})
    if (const std::optional<JsonObject> rope = config.optional_object(key);
        rope && !rope->json().empty())
      return RopeReader(config, *rope, max_position_embeddings).read(warnings);
  const Json none = Json::object();
  return RopeReader(config, config.another(none), max_position_embeddings).read(warnings);
}

}  // namespace nanovllm
