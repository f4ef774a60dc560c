// config.json of a Hugging Face model directory, as transformers 4 and 5 write it, checked in full.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "io/json.h"
#include "io/rope_parameters.h"

namespace nanovllm {

class QuantizationConfig;

/// The positions that a layer's attention sees: every earlier position, or the last
/// `sliding_window` ones (its own included).
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
  bool output_bias = false;  ///< a bias on o (by attention_out_bias, else by attention_bias)
  bool mlp_bias = false;     ///< biases on gate, up and down

  std::vector<AttentionType> layer_types;  ///< num_hidden_layers entries
  int64_t sliding_window = 0;              ///< tokens; 0 if no layer slides
  std::optional<MoeConfig> moe;
  /// How the checkpoint's linear layers are quantised; null: they are not.
  std::shared_ptr<const QuantizationConfig> quantization;

  std::optional<DType> dtype;  ///< f32, f16 or bf16, if config.json says
  std::vector<int64_t> eos_token_ids;
  std::optional<int64_t> bos_token_id, pad_token_id;

  std::vector<std::string> warnings;  ///< one line each, for the log

  /// Positions that the model is made for: max_position_embeddings, or those that YaRN stretches
  /// to, which Qwen's instructions add to config.json beside a max_position_embeddings that stays.
  int64_t longest_context() const;
  /// Keys that a row of layer `index` (from 0) sees, its own included; 0: all up to its own.
  int64_t window(int64_t index) const;
  /// Whether one rank multiplies o and down in halves (WeightFormat::in_halves), as far as they are
  /// plain: all of a dense model's, where sizes allow, or none.
  bool is_in_halves() const;
  /// Elements of all weights, biases and norms aside.
  int64_t approximate_parameters() const;
};

/// The layers that slide where config.json has no layer_types: those from max_window_layers on, or
/// all of them.
enum class SlidingLayers : uint8_t { none, by_layer, all };

/// An architecture's defaults where config.json is silent, and the fields that it reads at
/// all. The rest is alike in all architectures.
struct ConfigDefaults {
  // The value of a field that is absent.
  int64_t num_key_value_heads = 0;  ///< 0: as many as attention heads
  int64_t head_dim = 0;             ///< 0: hidden_size / num_attention_heads
  int64_t max_position_embeddings = 2048;
  int64_t sliding_window = 4096;
  int64_t num_experts = 0;  ///< 0: it has no experts, whatever config.json says
  std::optional<int64_t> bos_token_id{}, eos_token_id{};

  // The same of fields that not every architecture reads; none: it does not.
  std::optional<bool> use_sliding_window{};
  std::optional<bool> attention_bias{}, attention_out_bias{}, mlp_bias{};

  SlidingLayers sliding = SlidingLayers::none;
  bool qkv_bias = false;  ///< q, k and v have biases, whatever config.json says
};

/// The defaults of an architecture, by architectures[0]. Throws Error(model) for one that cannot be
/// loaded.
using FindConfigDefaults = std::function<ConfigDefaults(const std::string& architecture)>;

/// Reads `directory`/config.json. The architecture is looked up before anything else is looked at.
/// Throws what `defaults` throws, and Error(model) naming the field and its value.
ModelConfig load_model_config(const std::string& directory, const FindConfigDefaults& defaults);

/// The same from the parsed file; `what` names it in errors.
ModelConfig parse_model_config(const Json& json, const FindConfigDefaults& defaults,
                               std::string_view what = "config.json");

}  // namespace nanovllm
