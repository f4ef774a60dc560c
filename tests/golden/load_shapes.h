// The models of the exactness fuzz: shapes of real ones for GPUs, small ones for CPUs.
#pragma once

#include "devices.h"

namespace nanovllm {

struct Shape {
  const char* config;
  const char* changes;  // of config.json
  const char* name;
  int ranks = 1;
  Target target = kTargets[3];
  const char* kv_cache_dtype = "auto";
  const char* quantization = "auto";
};
inline void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

inline constexpr const char* kFourLayers = R"({"num_hidden_layers": 4})";
inline constexpr const char* kOddRecords =  // of 128 columns, in a half of k
    R"({"num_hidden_layers": 4, "intermediate_size": 3328})";
inline constexpr const char* kWholeVocabulary = R"({"num_hidden_layers": 4, "vocab_size": 151936})";
inline constexpr const char* kTwoLayers = R"({"num_hidden_layers": 2})";
inline constexpr const char* kOneLayer = R"({"num_hidden_layers": 1})";
inline constexpr const char* kMistral = R"({"num_hidden_layers": 3, "sliding_window": 500,
    "intermediate_size": 11008, "model_type": "mistral", "architectures": ["MistralForCausalLM"]})";
inline constexpr const char* kQwen2 = R"({"num_hidden_layers": 4, "head_dim": 64,
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})";
inline constexpr const char* kTwoLayersFp8 = R"({"num_hidden_layers": 2, "quantization_config": {
    "quant_method": "fp8", "weight_block_size": [128, 128]}})";
inline constexpr const char* kSmall =
    R"({"num_hidden_layers": 2, "vocab_size": 2000, "head_dim": 32,
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2})";
inline constexpr const char* kSmallFourHeads = R"({"num_hidden_layers": 2, "vocab_size": 2000,
    "head_dim": 32, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 4})";
inline constexpr const char* kSmallInt4 =
    R"({"num_hidden_layers": 2, "vocab_size": 2000, "head_dim": 32,
    "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "quantization_config": {"quant_method": "awq",
    "version": "gemm", "bits": 4, "group_size": 32}})";
inline constexpr const char* kSmallFp8 =
    R"({"num_hidden_layers": 2, "vocab_size": 2000, "head_dim": 32,
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "quantization_config": {"quant_method": "fp8",
    "weight_block_size": [128, 128]}})";
inline constexpr const char* kSmallInt8 =
    R"({"num_hidden_layers": 2, "vocab_size": 2000, "head_dim": 32,
    "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "quantization_config": {
    "quant_method": "compressed-tensors", "format": "int-quantized",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": true},
    "ignore": ["lm_head"], "config_groups": {"all": {"targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"}, "input_activations":
    {"num_bits": 8, "strategy": "token", "dynamic": true}}}}})";
inline constexpr const char* kSmallW4A8 =
    R"({"num_hidden_layers": 2, "vocab_size": 2000, "head_dim": 32,
    "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "quantization_config": {
    "quant_method": "compressed-tensors", "format": "int-quantized",
    "ignore": ["lm_head"], "config_groups": {"all": {"targets": ["Linear"],
    "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "input_activations":
    {"num_bits": 8, "strategy": "token", "dynamic": true}}}}})";
inline constexpr const char* kSmallExpertsInt4 = R"({"num_hidden_layers": 2, "vocab_size": 2000,
    "head_dim": 32, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 96, "quantization_config": {"quant_method": "awq",
    "version": "gemm", "bits": 4, "group_size": 32}})";
inline constexpr const char* kSmallExpertsFp8 = R"({"num_hidden_layers": 2, "vocab_size": 2000,
    "head_dim": 32, "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 256, "quantization_config": {
    "quant_method": "fp8", "weight_block_size": [128, 128]}})";

inline const Shape kGpuShapes[] = {
    Shape{"qwen3-0.6b", kWholeVocabulary, "qwen3_0_6b"},
    Shape{"qwen3-8b", kTwoLayers, "qwen3_8b"},
    Shape{"qwen3-30b-a3b", kTwoLayers, "qwen3_30b_a3b"},
    Shape{"qwen3-32b", kOneLayer, "qwen3_32b"},  // rows wider than 4,096
    Shape{"qwen3-1.7b", kMistral, "mistral_window"},
    Shape{"qwen3-0.6b", kQwen2, "qwen2_heads_of_64"},
    Shape{"qwen3-0.6b", kFourLayers, "fp8_cache", 1, kTargets[3], "fp8"},
    Shape{"qwen3-0.6b", kQwen2, "fp8_cache_heads_of_64", 1, kTargets[3], "fp8"},
    Shape{"qwen3-8b", kTwoLayers, "fp8_cache_2_ranks", 2, kTargets[3], "fp8"},
    Shape{"qwen3-8b", kTwoLayersFp8, "fp8_blocks"},
    Shape{"qwen3-32b-fp8", kOneLayer, "fp8_blocks_wide"},
    Shape{"qwen3-8b", kTwoLayers, "fp8_rows", 1, kTargets[3], "fp8", "fp8"},
    Shape{"qwen3-0.6b", kOddRecords, "int4", 1, kTargets[3], "auto", "int4"},
    Shape{"qwen3-8b", kTwoLayers, "int8", 1, kTargets[3], "auto", "int8"},
    Shape{"qwen3-30b-a3b", kTwoLayersFp8, "fp8_experts"},
    Shape{"qwen3-30b-a3b", kTwoLayers, "int4_experts", 1, kTargets[3], "auto", "int4"},
    Shape{"qwen3-30b-a3b", kTwoLayers, "int8_experts", 1, kTargets[3], "auto", "int8"},
    Shape{"qwen3-8b", kTwoLayersFp8, "fp8_blocks_2_ranks", 2},
    Shape{"qwen3-8b", kTwoLayers, "int4_2_ranks", 2, kTargets[3], "auto", "int4"},
    Shape{"qwen3-30b-a3b", kTwoLayersFp8, "fp8_experts_2_ranks", 2},
    Shape{"qwen3-30b-a3b", kTwoLayers, "int4_experts_2_ranks", 2, kTargets[3], "auto", "int4"},
    Shape{"qwen3-0.6b", kFourLayers, "qwen3_0_6b_2_ranks", 2},
    Shape{"qwen3-8b", kTwoLayers, "qwen3_8b_2_ranks", 2},
    Shape{"qwen3-30b-a3b", kTwoLayers, "qwen3_30b_a3b_2_ranks", 2},
    Shape{"qwen3-8b", kTwoLayers, "qwen3_8b_4_ranks", 4}};
inline const Shape kCpuShapes[] = {
    Shape{"qwen3-0.6b", kSmall, "f32", 1, kTargets[0]},
    Shape{"qwen3-0.6b", kSmall, "bf16_2_ranks", 2, kTargets[1]},
    Shape{"qwen3-0.6b", kSmallFourHeads, "bf16_4_ranks", 4, kTargets[1]},
    Shape{"qwen3-0.6b", kSmallInt4, "int4", 1, kTargets[1]},
    Shape{"qwen3-0.6b", kSmallFp8, "fp8_2_ranks", 2, kTargets[1]},
    Shape{"qwen3-0.6b", kSmallInt8, "int8_fp8_cache_2_ranks", 2, kTargets[1]},
    Shape{"qwen3-0.6b", kSmallW4A8, "w4a8_2_ranks", 2, kTargets[1]},
    Shape{"qwen3-30b-a3b", kSmallExpertsInt4, "int4_experts", 1, kTargets[1]},
    Shape{"qwen3-30b-a3b", kSmallExpertsFp8, "fp8_experts_2_ranks", 2, kTargets[1]}};

}  // namespace nanovllm
