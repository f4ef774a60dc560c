// config.json of a Hugging Face model directory, as transformers 4 and 5 write it, checked in full.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "io/json.h"
#include "io/rope_parameters.h"

namespace nanovllm {

/// What a layer's attention sees: every earlier position, or the last `sliding_window` ones (its
/// own included).
enum class AttentionType : uint8_t { full, sliding };

/// A mixture of experts in place of the MLP.
struct MoeConfig {
  int64_t num_experts = 0;
  int64_t num_experts_per_tok = 0;       ///< 1 .. num_experts
  int64_t moe_intermediate_size = 0;     ///< of one expert
  bool norm_topk_prob = false;           ///< the chosen experts' weights are scaled to sum 1
  int64_t decoder_sparse_step = 1;       ///< every so many layers there are experts
  std::vector<int64_t> mlp_only_layers;  ///< indices of layers without

  /// Whether layer `index` (from 0) has experts; the others have a dense MLP of intermediate_size.
  bool is_sparse(int64_t index) const;
};

/// A model's shape and constants; a plain value that nothing changes after it is read. Every size
/// is positive and every product of sizes that the engine forms fits in 40 bits. Fields that a
/// config.json leaves out have the value that transformers gives them for that architecture.
struct ModelConfig {
  std::string architecture;  ///< architectures[0]: "Qwen3ForCausalLM"

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;  ///< divides num_attention_heads
  int64_t head_dim = 0;             ///< even
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  RopeParameters rope;

  bool tie_word_embeddings = false;
  bool qkv_bias = false;     ///< biases on q, k and v (Qwen2 always; others by attention_bias)
  bool output_bias = false;  ///< a bias on o (by attention_bias)
  bool mlp_bias = false;     ///< biases on gate, up and down

  std::vector<AttentionType> layer_types;  ///< num_hidden_layers entries
  int64_t sliding_window = 0;              ///< tokens; 0 if no layer slides
  std::optional<MoeConfig> moe;

  std::optional<DType> dtype;  ///< f32, f16 or bf16, if config.json says
  std::vector<int64_t> eos_token_ids;
  std::optional<int64_t> bos_token_id, pad_token_id;

  std::vector<std::string> warnings;  ///< one line each, for the log

  /// Keys that a row of layer `index` (from 0) sees, its own included; 0: all up to its own.
  int64_t window(int64_t index) const;
  /// Elements of all weights, biases and norms aside.
  int64_t approximate_parameters() const;
};

/// Reads `directory`/config.json. `supported` lists the architectures that can be loaded (empty:
/// any); another one is refused by name before anything else is looked at. Throws Error(model)
/// naming the field and its value.
ModelConfig load_model_config(const std::string& directory,
                              std::span<const std::string_view> supported = {});

/// The same from the parsed file; `what` names it in errors.
ModelConfig parse_model_config(const Json& json, std::string_view what = "config.json",
                               std::span<const std::string_view> supported = {});

}  // namespace nanovllm
