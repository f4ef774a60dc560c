// config.json and generation_config.json: what transformers reads from a file is what we read, in
// both spellings, and what we cannot honour is refused by field and value.
#include "io/model_config.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "io/generation_config.h"
#include "io/quantised/quantization.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

/// Of an architecture that slides in all layers, and of others: io knows none by itself.
ConfigDefaults defaults_of(const std::string& architecture) {
  if (architecture == "MistralForCausalLM") return {.sliding = SlidingLayers::all};
  return {.use_sliding_window = false, .sliding = SlidingLayers::by_layer};
}

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::model);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "accepted";
}

/// A small valid configuration in the spelling of transformers 4.
Json small() {
  return Json::parse(
      R"({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
    "eos_token_id": 7, "torch_dtype": "bfloat16"})");
}

Json small_with(const char* changes) {
  Json config = small();
  config.update(Json::parse(changes));
  return config;
}

void expect_refused(const char* changes, std::string_view message) {
  const std::string found = refusal([&] { parse_model_config(small_with(changes), defaults_of); });
  EXPECT_EQ(found.find("config.json: "), 0u) << found;
  EXPECT_NE(found.find(message), std::string::npos) << changes << "\n  " << found;
}

TEST(ModelConfig, NamesTheFieldAndTheValueItRefuses) {
  expect_refused(R"({"hidden_size": "abc"})",
                 R"(hidden_size must be an integer from 1 to 1048576, got "abc")");
  expect_refused(R"({"hidden_size": 0})",
                 "hidden_size must be an integer from 1 to 1048576, got 0");
  expect_refused(R"({"hidden_size": -1})", "got -1");
  expect_refused(R"({"hidden_size": 1099511627776})", "got 1099511627776");
  expect_refused(R"({"hidden_size": 18446744073709551615})", "got 18446744073709551615");
  expect_refused(R"({"hidden_size": 64.0})", "got 64.0");
  expect_refused(R"({"hidden_size": true})", "got true");
  expect_refused(R"({"hidden_size": [64]})", "got a list of 1");
  expect_refused(R"({"hidden_size": null})", "hidden_size is missing");
  expect_refused(R"({"vocab_size": 0})", "vocab_size must be");
  expect_refused(R"({"num_hidden_layers": 100000})",
                 "num_hidden_layers must be an integer from 1 to 4096");
  expect_refused(R"({"num_attention_heads": 15})",
                 "num_attention_heads is 15, not divisible by num_key_value_heads 2");
  expect_refused(R"({"head_dim": 33})", "head_dim is 33, must be even");
  expect_refused(R"({"head_dim": 2048})", "head_dim must be an integer from 1 to 1024");
  expect_refused(R"({"architectures": ["LlamaForCausalLM"], "head_dim": null, "hidden_size": 66})",
                 "hidden_size is 66, not divisible by num_attention_heads 4");
  expect_refused(R"({"rms_norm_eps": -1})", "rms_norm_eps must be from 0 to 1, got -1");
  expect_refused(R"({"rms_norm_eps": "1e-6"})", "rms_norm_eps must be a number");
  expect_refused(R"({"tie_word_embeddings": 1})",
                 "tie_word_embeddings must be true or false, got 1");
  expect_refused(R"({"eos_token_id": 1000})",
                 "eos_token_id must be an integer from 0 to 999, got 1000");
  expect_refused(R"({"eos_token_id": [1, -1]})",
                 "eos_token_id must be an integer from 0 to 999, got -1");
  expect_refused(R"({"vocab_size": 16777216, "hidden_size": 1048576})", "more than 2^40");
  expect_refused(
      R"({"hidden_size": 1048576, "intermediate_size": 1048576, "num_hidden_layers": 4096})",
      "parameters, more than 2^40");
  EXPECT_EQ(refusal([] { parse_model_config(Json::array(), defaults_of); }),
            "config.json: must be a JSON object, got a list of 0");
}

TEST(ModelConfig, RefusesByNameWhatWouldGiveOtherNumbers) {
  expect_refused(
      R"({"quantization_config": {"quant_method": "bitsandbytes"}})",
      R"(quantization_config.quant_method "bitsandbytes" is not supported: use compressed-tensors)");
  // As MLX writes it, in older files alone.
  expect_refused(R"({"quantization": {"group_size": 64, "bits": 4}})",
                 "quantization.quant_method is missing, as in MLX's files");
  expect_refused(R"({"hidden_act": "gelu"})", R"(hidden_act "gelu" is not supported: use silu)");
  expect_refused(R"({"torch_dtype": "float8_e4m3fn"})",
                 R"(torch_dtype "float8_e4m3fn" is not supported)");
  expect_refused(
      R"({"layer_types": ["full_attention", "linear_attention", "full_attention"]})",
      R"(layer_types: "linear_attention" is not supported: use full_attention or sliding_attention)");
  expect_refused(R"({"layer_types": ["full_attention"]})",
                 "layer_types has 1 entries, num_hidden_layers is 3");
  expect_refused(R"({"layer_types": ["full_attention", "sliding_attention", "full_attention"]})",
                 "layer_types names sliding_attention, but sliding_window is not set");
  expect_refused(R"({"architectures": ["MistralForCausalLM"], "sliding_window": 16,
                     "layer_types": ["full_attention", "full_attention", "full_attention"]})",
                 "layer_types differ from what MistralForCausalLM does");
  expect_refused(R"({"partial_rotary_factor": 0.5})",
                 "partial_rotary_factor 0.5 is not supported for Qwen3ForCausalLM");
}

TEST(ModelConfig, LooksTheArchitectureUpBeforeItsFields) {
  const Json other = Json::parse(
      R"({"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": {}})");
  std::string asked;
  const std::string found = refusal([&] {
    parse_model_config(other, [&](const std::string& architecture) -> ConfigDefaults {
      asked = architecture;
      fail(ErrorKind::model, "not today");
    });
  });
  EXPECT_EQ(asked, "Qwen2_5_VLForConditionalGeneration");
  EXPECT_EQ(found, "not today");
  expect_refused(R"({"architectures": null})", "architectures is missing");
  expect_refused(R"({"architectures": []})", "architectures is missing");
  expect_refused(R"({"architectures": "Qwen3ForCausalLM"})",
                 "architectures must be a list of strings");
}

// As in transformers: a quantiser may add the one to a file that has the other.
TEST(ModelConfig, DtypeGoesBeforeTorchDtype) {
  const Json both = small_with(R"({"dtype": "float32"})");
  EXPECT_EQ(parse_model_config(both, defaults_of).dtype, DType::f32);
  EXPECT_EQ(parse_model_config(small_with(R"({"dtype": null})"), defaults_of).dtype, DType::bf16);
}

// As transformers' MODEL_FOR_CAUSAL_LM_MAPPING_NAMES has them.
TEST(ModelConfig, WithoutArchitecturesTheModelTypeNamesTheClass) {
  const auto of = [](const char* changes) {
    return parse_model_config(small_with(changes), defaults_of).architecture;
  };
  EXPECT_EQ(of(R"({"architectures": null, "model_type": "qwen3_moe"})"), "Qwen3MoeForCausalLM");
  EXPECT_EQ(of(R"({"architectures": [], "model_type": "llama"})"), "LlamaForCausalLM");
  EXPECT_EQ(of(R"({"architectures": null, "model_type": "seed_oss"})"), "SeedOssForCausalLM");
  EXPECT_EQ(of(R"({"model_type": "llama"})"), "Qwen3ForCausalLM");
}

TEST(ModelConfig, RefusesRopeItCannotComputeByName) {
  expect_refused(
      R"({"rope_scaling": {"type": "longrope", "short_factor": [1]}})",
      R"(RoPE type "longrope" is not supported: use default, linear, dynamic, llama3 or yarn)");
  expect_refused(R"({"rope_parameters": {"rope_type": "mystery"}})",
                 R"(RoPE type "mystery" is not supported)");
  expect_refused(R"({"rope_theta": 0})", "rope_theta must be a number greater than 0, got 0");
  expect_refused(R"({"rope_theta": "NaN"})", "rope_theta must be a number");
  expect_refused(R"({"rope_scaling": {"type": "linear"}})", "rope_scaling.factor is missing");
  expect_refused(R"({"rope_scaling": {"type": "linear", "factor": 0.5}})",
                 "rope_scaling.factor must be at least 1, got 0.5");
  expect_refused(R"({"rope_scaling": {"rope_type": "llama3", "factor": 8}})",
                 "rope_scaling.low_freq_factor is missing");
  expect_refused(
      R"({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}})",
      "high_freq_factor is 4, must be greater than low_freq_factor 4");
  expect_refused(
      R"({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}})",
      "beta_fast is 1");
  expect_refused(R"({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 4}})",
                 "rope_theta is 1, must be greater than 1 for RoPE type yarn");
  expect_refused(R"({"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}})",
                 "mrope_section is not supported");
  expect_refused(R"({"rope_parameters": {"full_attention": {"rope_type": "default"}}})",
                 "RoPE per layer type is not supported");
  expect_refused(R"({"rope_scaling": 2})", "rope_scaling must be an object, got 2");
}

TEST(ModelConfig, RefusesMoreExpertsPerTokenThanThereAre) {
  const auto parse = [](int64_t per_token) {
    Json config = small();
    config.update({{"num_experts", 4}, {"num_experts_per_tok", per_token}});
    return parse_model_config(
        config, [](const std::string&) { return ConfigDefaults{.num_experts = 128}; });
  };
  EXPECT_EQ(refusal([&] { parse(5); }),
            "config.json: num_experts_per_tok is 5, more than num_experts 4");
  EXPECT_EQ(parse(4).moe->num_experts_per_tok, 4);
}

TEST(ModelConfig, RopeScalingGoesBeforeRopeParameters) {
  const auto factor = [](const char* changes) {
    return parse_model_config(small_with(changes), defaults_of).rope.factor;
  };
  EXPECT_EQ(factor(R"({"rope_parameters": {"rope_type": "linear", "factor": 3, "rope_theta": 1e6},
                       "rope_scaling": {"rope_type": "linear", "factor": 2}})"),
            2);
  EXPECT_EQ(factor(R"({"rope_parameters": {"rope_type": "linear", "factor": 3, "rope_theta": 1e6},
                       "rope_scaling": {}})"),
            3);
}

// 0.1 ln(4) + 1, YaRN's own factor; with both fields a quotient, as transformers has it.
TEST(ModelConfig, YarnTakesMscaleWithMscaleAllDimOnly) {
  const auto attention_factor = [](const char* fields) {
    Json config = small();
    config["rope_scaling"] = Json::parse(fields);
    config["rope_scaling"].update({{"rope_type", "yarn"}, {"factor", 4}});
    return parse_model_config(config, defaults_of).rope.attention_factor;
  };
  const double yarn = 0.1 * std::log(4.0) + 1;
  EXPECT_DOUBLE_EQ(attention_factor("{}"), yarn);
  EXPECT_DOUBLE_EQ(attention_factor(R"({"mscale": 0.5})"), yarn);
  EXPECT_DOUBLE_EQ(attention_factor(R"({"mscale_all_dim": 0.5})"), yarn);
  EXPECT_DOUBLE_EQ(attention_factor(R"({"mscale": 2, "mscale_all_dim": 0.5})"),
                   (0.2 * std::log(4.0) + 1) / (0.05 * std::log(4.0) + 1));
}

TEST(ModelConfig, WarnsAboutWhatItIgnores) {
  const ModelConfig config = parse_model_config(
      small_with(
          R"({"auto_map": {"AutoModel": "x.Y"}, "pad_token_id": -1, "bos_token_id": 5000,
          "dual_chunk_attention_config": {"chunk_size": 262144},
          "rope_scaling": {"rope_type": "linear", "factor": 2, "finetuned": true}})"),
      defaults_of);
  ASSERT_EQ(config.warnings.size(), 5u);
  EXPECT_NE(config.warnings[0].find("auto_map is ignored"), std::string::npos);
  EXPECT_NE(config.warnings[1].find("dual_chunk_attention_config"), std::string::npos);
  EXPECT_NE(config.warnings[2].find("\"finetuned\""), std::string::npos);
  EXPECT_NE(config.warnings[3].find("bos_token_id 5000"), std::string::npos);
  EXPECT_NE(config.warnings[4].find("pad_token_id -1"), std::string::npos);
  EXPECT_FALSE(config.pad_token_id || config.bos_token_id);
}

TEST(ModelConfig, ReadsOnlyTheFieldsThatTheArchitectureHas) {
  const Json config = small_with(
      R"({"attention_bias": true, "mlp_bias": true, "num_experts": 4, "num_experts_per_tok": 2, "use_sliding_window": true,
          "sliding_window": 16, "head_dim": null, "num_key_value_heads": null})");
  const auto read = [&](const ConfigDefaults& defaults) {
    return parse_model_config(config, [&](const std::string&) { return defaults; });
  };
  const ModelConfig none = read({});
  EXPECT_FALSE(none.qkv_bias || none.output_bias || none.mlp_bias || none.moe);
  EXPECT_EQ(none.sliding_window, 0);
  EXPECT_EQ(none.head_dim, 16);
  const ModelConfig all = read({.head_dim = 8,
                                .num_experts = 2,
                                .attention_bias = false,
                                .mlp_bias = false,
                                .sliding = SlidingLayers::all});
  EXPECT_TRUE(all.qkv_bias && all.output_bias && all.mlp_bias);
  EXPECT_EQ(all.moe->num_experts, 4);
  EXPECT_EQ(all.sliding_window, 16);
  EXPECT_EQ(all.head_dim, 16);  // null: as in SeedOssConfig, no default
  EXPECT_EQ(read({.use_sliding_window = false, .sliding = SlidingLayers::all}).sliding_window, 16);
  const ModelConfig apart = read({.attention_bias = false, .attention_out_bias = false});
  EXPECT_TRUE(apart.qkv_bias);
  EXPECT_FALSE(apart.output_bias);
}

class InDirectory : public testing::Test {
 protected:
  void write(const char* name, const std::string& text) {
    std::ofstream(directory_ / name) << text;
  }
  TempDirectory temp_;
  std::filesystem::path directory_ = temp_.path();
};

TEST_F(InDirectory, SaysWhichPartOfAModelDirectoryIsMissing) {
  const std::string path = directory_;
  EXPECT_EQ(refusal([&] { load_model_config(path + "/none", defaults_of); }),
            path +
                "/none: no such directory; give a Hugging Face model directory (nothing is "
                "downloaded)");
  EXPECT_EQ(refusal([&] { load_model_config(path, defaults_of); }),
            path + ": no config.json: not a Hugging Face model directory");
  write("adapter_config.json", "{}");  // PEFT's
  EXPECT_NE(refusal([&] { load_model_config(path, defaults_of); }).find("adapter (LoRA) is merged"),
            std::string::npos);
  std::filesystem::create_directory(directory_ / "snapshots");  // as in the hub's cache
  EXPECT_NE(refusal([&] { load_model_config(path, defaults_of); }).find("give one of those in its"),
            std::string::npos);
  write("config.json", "{\"a\": }");
  EXPECT_NE(refusal([&] {
              load_model_config(path, defaults_of);
            }).find("/config.json: not valid JSON at byte 6"),
            std::string::npos);
  EXPECT_NE(refusal([&] {
              load_model_config(path + "/config.json", defaults_of);
            }).find("is not a directory"),
            std::string::npos);
  write("config.json", std::string(17 << 20, ' '));
  EXPECT_NE(refusal([&] { load_model_config(path, defaults_of); }).find("more than the limit of"),
            std::string::npos);
  write("config.json", small().dump());
  EXPECT_EQ(load_model_config(path, defaults_of).hidden_size, 64);
}

// As AutoRound writes it for a mixture of 48 layers with 128 experts.
TEST_F(InDirectory, EachExpertsWeightsMayHaveASchemeOfTheirOwn) {
  Json config = small(), own = Json::object();
  for (int i = 0; i < 48 * 128 * 3; ++i)
    own.get_ref<Json::object_t&>().emplace_back(
        fmt::format("model.layers.{}.mlp.experts.{}.up_proj", i / 384, i % 384),
        Json{{"bits", 8}, {"group_size", 64}, {"sym", true}, {"data_type", "int"}});
  config["quantization_config"] = {{"quant_method", "auto-round"},
                                   {"packing_format", "auto_round:auto_gptq"},
                                   {"bits", 4},
                                   {"group_size", 128},
                                   {"extra_config", std::move(own)}};
  write("config.json", config.dump());
  const ModelConfig read = load_model_config(directory_, defaults_of);
  EXPECT_EQ(read.quantization->find("model.layers.47.mlp.experts.383.up_proj")->bits, 8);
  EXPECT_EQ(read.quantization->find("model.layers.48.mlp.experts.0.up_proj")->bits, 4);
}

TEST_F(InDirectory, GenerationConfigIsOptionalButNeverMalformed) {
  const std::string path = directory_;
  EXPECT_TRUE(load_generation_config(path, 1000).eos_token_ids.empty());
  write("generation_config.json",
        R"({"bos_token_id": 3, "do_sample": true, "eos_token_id": [5, 3], "temperature": 0.6,
                                      "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"})");
  const GenerationConfig config = load_generation_config(path, 1000);
  EXPECT_EQ(config.eos_token_ids, (std::vector<int64_t>{5, 3}));
  EXPECT_EQ(config.do_sample, true);
  EXPECT_EQ(config.temperature, 0.6);
  EXPECT_EQ(config.top_k, 20);
  EXPECT_EQ(config.top_p, 0.95);
  EXPECT_FALSE(config.min_p || config.repetition_penalty || config.max_new_tokens);
  write("generation_config.json", "{");
  EXPECT_NE(refusal([&] { load_generation_config(path, 1000); }).find("not valid JSON at byte"),
            std::string::npos);
}

TEST(GenerationConfig, RefusesValuesThatNoSamplerTakes) {
  const auto message = [](const char* text) {
    return refusal([&] { parse_generation_config(Json::parse(text), 1000); });
  };
  EXPECT_EQ(message(R"({"temperature": -0.5})"),
            "generation_config.json: temperature must be from 0 to 10000, got -0.5");
  EXPECT_EQ(message(R"({"top_p": 1.5})"),
            "generation_config.json: top_p must be from 0 to 1, got 1.5");
  EXPECT_NE(
      message(R"({"eos_token_id": 1000})").find("eos_token_id must be an integer from 0 to 999"),
      std::string::npos);
  EXPECT_NE(message(R"({"top_k": 2.5})").find("top_k must be an integer"), std::string::npos);
  EXPECT_EQ(message(R"({"repetition_penalty": 0})"),
            "generation_config.json: repetition_penalty must be from 0.0001 to 10000, got 0");
  EXPECT_EQ(message(R"({"eos_token_id": 3, "temperature": null})"), "accepted");
}

}  // namespace
}  // namespace nanovllm
