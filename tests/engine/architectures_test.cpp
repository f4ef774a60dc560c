// Every architecture of the table: config.json is read as transformers reads it, and what would
// change the mathematics is refused by name, before a weight is read.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "engine/memory_plan.h"
#include "models/model.h"
#include "ops/null_backend.h"

namespace nanovllm {
namespace {

Json config_of(const Architecture& architecture, const char* changes) {
  Json config = Json::parse(
      R"({"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 100,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
          "max_position_embeddings": 512, "hidden_act": "silu"})");
  config["architectures"] = {architecture.name};
  config.update(Json::parse(changes));
  return config;
}

/// As an engine would open it: the configuration, then the memory of its steps. Empty: accepted.
std::string refusal(const Json& json, const EngineConfig& engine = {}) {
  try {
    NullBackend ops;
    plan_memory(ops, parse_model_config(json, config_defaults), engine, DType::f32, {});
    return {};
  } catch (const Error& error) {
    // Whether it fits is another question: NullBackend has no memory.
    return error.kind() == ErrorKind::device ? std::string() : error.what();
  }
}

void expect_rope(const RopeParameters& rope, const Json& expected, const std::string& name) {
  EXPECT_EQ(name_of(rope.type), expected.at("rope_type").get<std::string>()) << name;
  EXPECT_EQ(rope.theta, expected.at("rope_theta").get<double>()) << name;
  EXPECT_EQ(rope.factor, expected.value("factor", 1.0)) << name;
  if (expected.contains("original_max_position_embeddings")) {
    EXPECT_EQ(rope.original_max_position_embeddings,
              expected.at("original_max_position_embeddings").get<int64_t>())
        << name;
  }
  EXPECT_EQ(rope.low_freq_factor, expected.value("low_freq_factor", 1.0)) << name;
  EXPECT_EQ(rope.high_freq_factor, expected.value("high_freq_factor", 4.0)) << name;
  EXPECT_EQ(rope.beta_fast, expected.value("beta_fast", 32.0)) << name;
  EXPECT_EQ(rope.beta_slow, expected.value("beta_slow", 1.0)) << name;
  EXPECT_EQ(rope.truncate, expected.value("truncate", true)) << name;
}

void expect_equal(const ModelConfig& config, const Json& written, const Json& expected,
                  const std::string& name) {
  for (const auto& [key, value] : {std::pair{"vocab_size", config.vocab_size},
                                   {"hidden_size", config.hidden_size},
                                   {"intermediate_size", config.intermediate_size},
                                   {"num_hidden_layers", config.num_hidden_layers},
                                   {"num_attention_heads", config.num_attention_heads}})
    EXPECT_EQ(value, written.at(key).get<int64_t>()) << name << " " << key;
  for (const auto& [key, value] : {std::pair{"head_dim", config.head_dim},
                                   {"num_key_value_heads", config.num_key_value_heads},
                                   {"max_position_embeddings", config.max_position_embeddings},
                                   {"sliding_window", config.sliding_window}})
    EXPECT_EQ(value, expected.at(key).get<int64_t>()) << name << " " << key;
  for (const auto& [key, value] : {std::pair{"tie_word_embeddings", config.tie_word_embeddings},
                                   {"qkv_bias", config.qkv_bias},
                                   {"output_bias", config.output_bias},
                                   {"mlp_bias", config.mlp_bias}})
    EXPECT_EQ(value, expected.at(key).get<bool>()) << name << " " << key;
  EXPECT_EQ(config.rms_norm_eps, expected.at("rms_norm_eps").get<double>()) << name;
  EXPECT_EQ(config.eos_token_ids, expected.at("eos_token_id").get<std::vector<int64_t>>()) << name;
  EXPECT_EQ(config.bos_token_id ? Json(*config.bos_token_id) : Json(), expected.at("bos_token_id"))
      << name;
  const Json dtype = !config.dtype                  ? Json()
                     : *config.dtype == DType::bf16 ? Json("bfloat16")
                                                    : Json("float16");
  EXPECT_EQ(dtype, expected.at("dtype")) << name;

  std::vector<std::string> types;
  for (const AttentionType type : config.layer_types)
    types.push_back(type == AttentionType::full ? "full_attention" : "sliding_attention");
  EXPECT_EQ(Json(types), expected.at("layer_types")) << name;

  expect_rope(config.rope, expected.at("rope_parameters"), name);
  EXPECT_NEAR(config.rope.attention_factor, expected.at("attention_factor").get<double>(), 1e-12)
      << name;

  std::vector<int64_t> sparse;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i)
    if (config.moe && config.moe->is_sparse(i)) sparse.push_back(i);
  EXPECT_EQ(Json(sparse), expected.at("sparse_layers")) << name;
  const Json moe = config.moe
                       ? Json({config.moe->num_experts, config.moe->num_experts_per_tok,
                               config.moe->moe_intermediate_size, config.moe->norm_topk_prob})
                       : Json();
  EXPECT_EQ(moe, expected.at("experts")) << name;
}

TEST(Architectures, ReadBothSpellingsAsTransformersDoes) {
  const Json cases =
      read_json_file(std::string(NANOVLLM_SOURCE_DIR) + "/tests/data/configs/cases.json");
  ASSERT_GE(cases.size(), 35u);
  for (const Json& c : cases) {
    const std::string name = c.at("name");
    expect_equal(parse_model_config(c.at("old"), config_defaults), c.at("old"), c.at("expected"),
                 name + " (4)");
    expect_equal(parse_model_config(c.at("new"), config_defaults), c.at("old"), c.at("expected"),
                 name + " (5)");
  }
}

TEST(Architectures, TheBenchmarkShapesHaveTheParametersTheirNamesPromise) {
  const std::string configs = std::string(NANOVLLM_SOURCE_DIR) + "/bench/configs/";
  // Parameters in billions as the model cards state them.
  for (const auto& [name, billions] : {std::pair{"qwen3-0.6b", 0.6},
                                       {"qwen3-1.7b", 1.7},
                                       {"qwen3-4b", 4.0},
                                       {"qwen3-8b", 8.2},
                                       {"qwen3-14b", 14.8},
                                       {"qwen3-32b", 32.8},
                                       {"qwen3-30b-a3b", 30.5}}) {
    const ModelConfig config = load_model_config(configs + name, config_defaults);
    EXPECT_NEAR(static_cast<double>(config.approximate_parameters()) / 1e9, billions, 0.051)
        << name;
    EXPECT_EQ(config.head_dim, 128) << name;
    EXPECT_TRUE(config.warnings.empty()) << name;
  }
}

// docs/contract.md: where one rank gives the bytes of two. The 4B's down has k = 9,728.
TEST(Architectures, ADenseModelIsInHalvesWhereItsSizesAllow) {
  const std::string configs = std::string(NANOVLLM_SOURCE_DIR) + "/bench/configs/";
  for (const auto& [name, is_in_halves] : {std::pair{"qwen3-0.6b", true},
                                           {"qwen3-1.7b", true},
                                           {"qwen3-4b", true},
                                           {"qwen3-8b", true},
                                           {"qwen3-14b", true},
                                           {"qwen3-32b", true},
                                           {"qwen3-30b-a3b", false}}) {
    ModelConfig config = load_model_config(configs + name, config_defaults);
    EXPECT_EQ(config.is_in_halves(), is_in_halves) << name;
    for (const int64_t k : {11008, 8960, 11136}) {  // Qwen2.5-3B's, 1.5B's, none's
      config.intermediate_size = k;
      EXPECT_EQ(config.is_in_halves(), is_in_halves && k != 11136) << name << " " << k;
    }
    config.intermediate_size = 9728;
    config.output_bias = true;
    EXPECT_FALSE(config.is_in_halves()) << name;
  }
}

TEST(Architectures, OthersAreRefusedByNameBeforeTheirFields) {
  const std::string found = refusal(Json::parse(
      R"({"architectures": ["Qwen2_5_VLFor\nConditionalGeneration"], "text_config": {}})"));
  EXPECT_EQ(found.find("config.json: architecture \"Qwen2_5_VLFor\\nConditionalGeneration\" is not "
                       "supported: use Qwen3ForCausalLM, "),
            0u)
      << found;
}

TEST(Architectures, RefuseByNameWhatChangesTheMathematics) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"rope_parameters": {"rope_type": "mystery", "rope_theta": 1e4}})",
       R"(RoPE type "mystery" is not supported)"},
      {R"({"rope_scaling": {"type": "longrope", "factor": 4, "long_factor": [1]}})",
       R"(RoPE type "longrope" is not supported)"},
      {R"({"rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4]}})",
       "mrope_section is not supported"},
      {R"({"partial_rotary_factor": 0.5})", "partial_rotary_factor 0.5 is not supported"},
      {R"({"hidden_act": "gelu_pytorch_tanh"})", R"(hidden_act "gelu_pytorch_tanh")"},
      {R"({"quantization_config": {"quant_method": "aqlm"}})",
       R"(quantization_config.quant_method "aqlm" is not supported)"},
      {R"({"layer_types": ["full_attention", "chunked_attention", "full_attention"]})",
       R"(layer_types: "chunked_attention" is not supported)"},
      {R"({"layer_types": ["full_attention", "sliding_attention", "full_attention"]})",
       "layer_types"},
  };
  for (const Architecture& architecture : architectures()) {
    EXPECT_EQ(refusal(config_of(architecture, "{}")), "") << architecture.name;
    for (const auto& [changes, message] : cases) {
      const std::string found = refusal(config_of(architecture, changes));
      EXPECT_EQ(found.find("config.json: "), 0u) << architecture.name << changes << found;
      EXPECT_NE(found.find(message), std::string::npos) << architecture.name << changes << found;
    }
  }
}

TEST(Architectures, ALengthBeyondTheModelsOwnNeedsTheOverride) {
  for (const Architecture& architecture : architectures()) {
    const Json config = config_of(architecture, "{}");
    EXPECT_EQ(refusal(config, {.max_model_len = 512}), "") << architecture.name;
    const std::string found = refusal(config, {.max_model_len = 513});
    EXPECT_NE(found.find("max_model_len 513 is beyond the model's 512 positions"),
              std::string::npos)
        << found;
    EXPECT_EQ(refusal(config, {.max_model_len = 513, .allow_long_max_model_len = true}), "");
  }
}

// Qwen's way to long prompts is this addition to config.json alone, and vLLM's limit is the
// product.
TEST(Architectures, YarnStretchesTheModelsPositions) {
  for (const Architecture& architecture : architectures()) {
    const Json config = config_of(architecture, R"({"rope_scaling": {"rope_type": "yarn",
        "factor": 4.0, "original_max_position_embeddings": 256}})");
    EXPECT_EQ(refusal(config, {.max_model_len = 1024}), "") << architecture.name;
    EXPECT_NE(refusal(config, {.max_model_len = 1025}).find("1024 positions"), std::string::npos);
    const Json shorter = config_of(architecture, R"({"rope_scaling": {"rope_type": "yarn",
        "factor": 1.5, "original_max_position_embeddings": 256}})");
    EXPECT_EQ(refusal(shorter, {.max_model_len = 512}), "") << architecture.name;
  }
}

}  // namespace
}  // namespace nanovllm
