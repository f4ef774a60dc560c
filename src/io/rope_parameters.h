// Rotary position embedding as config.json describes it, in both spellings.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/json_object.h"

namespace nanovllm {

enum class RopeType { standard, linear, dynamic, llama3, yarn };  // "standard" is spelled "default"
std::string_view name_of(RopeType type);

/// The numbers of one RoPE. Fields that the type does not use keep their defaults.
struct RopeParameters {
  RopeType type = RopeType::standard;
  double theta = 10000;
  double partial_rotary_factor = 1;  ///< (0, 1]: the share of head_dim that is rotated
  double factor = 1;                 ///< >= 1: linear, dynamic, llama3, yarn
  /// The context that the model was trained with before scaling: llama3, yarn (and dynamic, where
  /// it equals the model's limit).
  int64_t original_max_position_embeddings = 0;
  double low_freq_factor = 1, high_freq_factor = 4;  ///< llama3: low < high
  double beta_fast = 32, beta_slow = 1;              ///< yarn: fast >= slow
  bool truncate = true;         ///< yarn: round the correction range to whole dimensions
  double attention_factor = 1;  ///< yarn: cos and sin are multiplied by it; mscale is already in it

  bool operator==(const RopeParameters&) const = default;
};

/// Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4,
/// "type" or "rope_type"). Refuses a type that is not in RopeType by name. What Hugging Face
/// ignores goes to `warnings`.
RopeParameters read_rope_parameters(const JsonObject& config, int64_t max_position_embeddings,
                                    std::vector<std::string>& warnings);

}  // namespace nanovllm
