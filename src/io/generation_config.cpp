#include "io/generation_config.h"

#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/limits.h"
#include "io/json_object.h"

namespace nanovllm {

GenerationConfig parse_generation_config(const Json& json, int64_t vocab_size,
                                         std::string_view what) {
  const JsonObject in(json, std::string(what), ErrorKind::model);
  const auto number = [&](const char* key, double min, double max) {
    const std::optional<double> value = in.optional_number(key);
    if (value && (*value < min || *value > max))
      in.refuse(fmt::format("{} must be from {} to {}, got {}", key, min, max, *value));
    return value;
  };
  constexpr int64_t kMaxTokens = (int64_t{1} << 31) - 1;

  GenerationConfig out;
  if (const auto ids = in.optional_integers("eos_token_id", 0, vocab_size - 1))
    out.eos_token_ids = *ids;
  out.do_sample = in.optional_bool("do_sample");
  // The range of a request's own parameter.
  out.temperature = number("temperature", 0, kMaxTemperature);
  out.top_k = in.optional_integer("top_k", -1, kMaxTokens);
  out.top_p = number("top_p", 0, 1);
  out.min_p = number("min_p", 0, 1);
  out.repetition_penalty =
      number("repetition_penalty", 1 / kMaxRepetitionPenalty, kMaxRepetitionPenalty);
  out.max_new_tokens = in.optional_integer("max_new_tokens", 1, kMaxTokens);
  return out;
}

GenerationConfig load_generation_config(const std::string& directory, int64_t vocab_size) {
  const std::filesystem::path path = std::filesystem::path(directory) / "generation_config.json";
  std::error_code error;
  if (std::filesystem::symlink_status(path, error).type() == std::filesystem::file_type::not_found)
    return {};
  const JsonLimits limits{.max_bytes = size_t{1} << 20, .max_nodes = 100'000};
  return parse_generation_config(read_json_file(path, limits), vocab_size, path.string());
}

}  // namespace nanovllm
