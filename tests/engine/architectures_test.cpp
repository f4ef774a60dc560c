// Every architecture of the table: what would change its mathematics is refused by name, before a
// weight is read.
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
    plan_memory(ops, parse_model_config(json), engine, DType::f32, {});
    return {};
  } catch (const Error& error) {
    // What fits is another question: NullBackend has no memory.
    return error.kind() == ErrorKind::device ? std::string() : error.what();
  }
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
      {R"({"quantization_config": {"quant_method": "awq"}})",
       R"(quantization_config (quant_method "awq"))"},
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
    EXPECT_NE(found.find("max_model_len 513 is beyond the model's max_position_embeddings 512"),
              std::string::npos)
        << found;
    EXPECT_EQ(refusal(config, {.max_model_len = 513, .allow_long_max_model_len = true}), "");
  }
}

}  // namespace
}  // namespace nanovllm
