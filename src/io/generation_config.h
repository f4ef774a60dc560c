// generation_config.json: the ids that end a text, and the sampling that a model's authors
// recommend.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"

namespace nanovllm {

/// Every field is what the file says, or nothing.
struct GenerationConfig {
  std::vector<int64_t> eos_token_ids;  ///< below vocab_size
  std::optional<bool> do_sample;       ///< false: greedy, whatever the temperature
  std::optional<double> temperature;   ///< >= 0
  std::optional<int64_t> top_k;        ///< >= -1; 0 and -1 are off
  std::optional<double> top_p;         ///< [0, 1]
  std::optional<double> min_p;         ///< [0, 1]
  std::optional<double> repetition_penalty;
  std::optional<int64_t> max_new_tokens;  ///< >= 1
};

/// Reads `directory`/generation_config.json; without the file, nothing is recommended. Throws
/// Error(model) naming the field and its value. `vocab_size` bounds the ids.
GenerationConfig load_generation_config(const std::string& directory, int64_t vocab_size);

GenerationConfig parse_generation_config(const Json& json, int64_t vocab_size,
                                         std::string_view what = "generation_config.json");

}  // namespace nanovllm
