// A quantization_config: the modules that it leaves plain, and the formats of its schemes.
#include "io/quantised/quantization.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace nanovllm {
namespace {

QuantizationConfig parse(const char* text) {
  const Json json = {{"quantization_config", Json::parse(text)}};
  std::vector<std::string> warnings;
  return QuantizationConfig(
      *JsonObject(json, "config.json", ErrorKind::model).optional_object("quantization_config"),
      warnings);
}

TEST(QuantizationConfig, ListsOfModulesSayWhichArePlain) {
  const auto is_plain = [](const QuantizationConfig& c, const char* name) {
    return c.find(name) == nullptr;
  };
  // transformers' and vLLM's lists: whole names, and parts of names.
  const auto fp8 = parse(R"({"quant_method": "fp8", "modules_to_not_convert":
      ["lm_head", "gate", "model.layers.1.mlp", "model.layers.2.self_attn.o_proj"]})");
  EXPECT_TRUE(is_plain(fp8, "lm_head"));
  EXPECT_TRUE(is_plain(fp8, "model.embed_tokens"));
  EXPECT_TRUE(is_plain(fp8, "model.layers.0.mlp.gate"));
  EXPECT_FALSE(is_plain(fp8, "model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(is_plain(fp8, "model.layers.1.mlp.gate_proj"));
  EXPECT_FALSE(is_plain(fp8, "model.layers.11.mlp.gate_proj"));
  EXPECT_TRUE(is_plain(fp8, "model.layers.2.self_attn.o_proj"));
  EXPECT_FALSE(is_plain(fp8, "model.layers.2.self_attn.q_proj"));
  // AutoAWQ's list, GPTQ's list of what is quantised, and GPTQModel's rules (re.match).
  const auto awq = parse(R"({"quant_method": "awq", "version": "gemm", "bits": 4,
      "group_size": 128, "modules_to_not_convert": ["mlp.down_proj"]})");
  EXPECT_TRUE(is_plain(awq, "model.layers.1.mlp.down_proj"));
  EXPECT_FALSE(is_plain(awq, "model.layers.1.mlp.up_proj"));
  const auto parts = parse(R"({"quant_method": "awq", "w_bit": 4, "q_group_size": 64,
      "modules_to_not_convert": ["self_attn", "layers.0."]})");
  EXPECT_TRUE(is_plain(parts, "model.layers.1.self_attn.q_proj"));
  EXPECT_TRUE(is_plain(parts, "model.layers.0.mlp.up_proj"));
  EXPECT_FALSE(is_plain(parts, "model.layers.10.mlp.up_proj"));
  EXPECT_EQ(parts.find("model.layers.1.mlp.up_proj")->group_size, 64);
  const auto some = parse(R"({"quant_method": "gptq", "bits": 4, "group_size": 128,
      "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]})");
  EXPECT_FALSE(is_plain(some, "model.layers.7.self_attn.q_proj"));
  EXPECT_FALSE(is_plain(some, "model.layers.0.mlp.up_proj"));
  EXPECT_TRUE(is_plain(some, "model.layers.0.mlp.down_proj"));
  const auto rules = parse(R"({"quant_method": "gptq", "bits": 4, "group_size": 128,
      "dynamic": {"-:.*\\.1\\..*down_proj": {}}})");
  EXPECT_TRUE(is_plain(rules, "model.layers.1.mlp.down_proj"));
  EXPECT_FALSE(is_plain(rules, "model.layers.11.mlp.down_proj"));
  // As ModelCloud/TinyLlama-1.1B-Chat-v1.0-GPTQ-4bits-dynamic-cfg has them; vLLM's re.match.
  const auto changed = parse(R"({"quant_method": "gptq", "bits": 4, "group_size": 128,
      "desc_act": true, "dynamic": {"-:model\\.layers\\.([2-9]\\d*|[1-9]\\d+)\\..*": {},
      ".*\\.1\\..*": {"bits": 8, "group_size": 32, "desc_act": false}, "+:.*o_proj": {"sym": false}}})");
  const auto q_proj = [&](int layer) {
    return changed.find(fmt::format("model.layers.{}.self_attn.q_proj", layer));
  };
  EXPECT_EQ(q_proj(0)->bits + q_proj(0)->group_size, 4 + 128);
  EXPECT_TRUE(q_proj(0)->is_ordered && q_proj(0)->symmetric);
  EXPECT_EQ(q_proj(1)->bits + q_proj(1)->group_size, 8 + 32);
  EXPECT_FALSE(q_proj(1)->is_ordered);
  EXPECT_EQ(q_proj(2), nullptr);
  EXPECT_EQ(q_proj(11), nullptr);
  EXPECT_FALSE(changed.find("model.layers.0.self_attn.o_proj")->symmetric);
  EXPECT_EQ(changed.find("model.layers.1.self_attn.o_proj")->bits, 8);
  EXPECT_EQ(changed.describe(), "int4 (gptq)");
  // The first rule that matches counts, be it of the one kind or the other (GPTQModel's
  // dynamic_get).
  const auto first = parse(R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {
      "+:.*q_proj": {"bits": 8}, "-:.*self_attn": {}, ".*": {"group_size": 64}}})");
  EXPECT_EQ(first.find("model.layers.0.self_attn.q_proj")->bits, 8);
  EXPECT_TRUE(is_plain(first, "model.layers.0.self_attn.k_proj"));
  EXPECT_EQ(first.find("model.layers.0.mlp.up_proj")->group_size, 64);
  EXPECT_EQ(first.describe(), "int4 (gptq)");
  // compressed-tensors: names in full, expressions from the first character on (re.match).
  const auto packed = parse(R"({"quant_method": "compressed-tensors", "format": "pack-quantized",
      "ignore": ["lm_head", "re:.*mlp\\.gate$", "re:layers.3"], "config_groups": {"a": {"targets": ["Linear"],
      "weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}}})");
  EXPECT_TRUE(is_plain(packed, "lm_head"));
  EXPECT_TRUE(is_plain(packed, "model.layers.0.mlp.gate"));
  EXPECT_FALSE(is_plain(packed, "model.layers.0.mlp.gate_proj"));
  EXPECT_FALSE(is_plain(packed, "model.layers.3.mlp.up_proj"));
  // A name or an expression goes before a class.
  const auto mixed =
      parse(R"({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {
      "a": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}},
      "b": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "strategy": "tensor"}}}})");
  EXPECT_EQ(mixed.find("model.layers.0.self_attn.q_proj")->scales, QuantScales::tensor);
  EXPECT_EQ(mixed.find("model.layers.0.mlp.up_proj")->scales, QuantScales::channel);
}

// vLLM's AutoRoundConfig.get_layer_config: names, then expressions by re.search, in their order.
TEST(QuantizationConfig, AutoRoundsModulesHaveSchemesOfTheirOwn) {
  const auto config = parse(R"({"quant_method": "auto-round", "bits": 4, "group_size": 128,
      "sym": true, "packing_format": "auto_round:auto_gptq", "extra_config": {
      "layers\\.[0-3]\\..*down_proj": {"bits": 8, "group_size": 32}, "down_proj$": {"bits": 16},
      "model.layers.1.mlp.down_proj": {"sym": false}, "model.layers.2.mlp.up_proj": {"bits": 16},
      "model.layers.3.mlp.up_proj": {"bits": 8}, "model.layers.4.mlp.up_proj": {"bits": 8}}})");
  const auto has = [&](const char* module, int bits, int64_t group_size, bool symmetric) {
    const QuantScheme* scheme = config.find(module);
    return scheme && scheme->bits == bits && scheme->group_size == group_size &&
           scheme->symmetric == symmetric;
  };
  EXPECT_TRUE(has("model.layers.0.mlp.up_proj", 4, 128, true));
  EXPECT_TRUE(has("model.layers.0.mlp.down_proj", 8, 32, true));
  EXPECT_TRUE(has("model.layers.1.mlp.down_proj", 4, 128, false));
  EXPECT_EQ(config.find("model.layers.2.mlp.up_proj"), nullptr);
  EXPECT_TRUE(has("model.layers.3.mlp.up_proj", 8, 128, true));
  EXPECT_TRUE(has("model.layers.4.mlp.up_proj", 8, 128, true));
  EXPECT_EQ(config.find("model.layers.4.mlp.down_proj"), nullptr);
  EXPECT_EQ(config.describe(), "int4 (auto-round)");
}

// Weights for which quantised activations are defined (docs/contract.md), and others.
TEST(QuantizationConfig, AFormatSaysHowTheRowsThatMeetItAreQuantised) {
  using Rows = WeightFormat::Rows;
  const auto kept = [](QuantStorage storage, QuantScales scales, QuantActivations activations,
                       int bits = 8) {
    QuantScheme scheme;
    scheme.storage = storage;
    scheme.bits = bits;
    scheme.group_size = 64;
    scheme.scales = scales;
    scheme.activations = activations;
    return scheme.kept_format(128, 512);
  };
  const auto e4m3 = QuantStorage::e4m3, int8 = QuantStorage::int8;
  EXPECT_EQ(kept(e4m3, QuantScales::channel, QuantActivations::token),
            WeightFormat(WeightFormat::e4m3, 384, Rows::token));
  EXPECT_EQ(kept(e4m3, QuantScales::tensor, QuantActivations::tensor),
            WeightFormat(WeightFormat::e4m3, 384, Rows::tensor));
  EXPECT_EQ(kept(e4m3, QuantScales::block, QuantActivations::group),
            WeightFormat(WeightFormat::e4m3, 128, Rows::group));
  EXPECT_EQ(kept(e4m3, QuantScales::channel, QuantActivations::none),
            WeightFormat(WeightFormat::e4m3, 384));
  EXPECT_EQ(kept(int8, QuantScales::channel, QuantActivations::token),
            WeightFormat(WeightFormat::int8, 384, Rows::token));
  EXPECT_EQ(kept(int8, QuantScales::channel, QuantActivations::tensor),
            WeightFormat(WeightFormat::int8, 384));
  EXPECT_FALSE(WeightFormat(WeightFormat::int8, 384, Rows::token).has_zeros());
  for (const QuantStorage storage : {QuantStorage::packed, int8}) {
    EXPECT_EQ(kept(storage, QuantScales::group, QuantActivations::token, 4),
              WeightFormat(WeightFormat::int4, 64, Rows::token));
    EXPECT_EQ(kept(storage, QuantScales::channel, QuantActivations::token, 4),
              WeightFormat(WeightFormat::int4, 384, Rows::token));
    EXPECT_EQ(kept(storage, QuantScales::group, QuantActivations::none, 4),
              WeightFormat(WeightFormat::int4, 64));
  }
  EXPECT_FALSE(WeightFormat(WeightFormat::int4, 64, Rows::token).has_zeros());
}

TEST(QuantizationConfig, AnExpressionThatTakesForeverIsRefused) {
  const auto config = parse(R"({"quant_method": "compressed-tensors", "format": "int-quantized",
      "ignore": ["re:(.+)+q$"], "config_groups": {"a": {"targets": ["Linear"],
      "weights": {"num_bits": 8, "strategy": "channel"}}}})");
  try {
    config.find("model.layers.0.self_attn.q_proj.model.layers.0.self_attn.q_proj");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("takes too long"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace nanovllm
