// How keys and values are kept: what the option and the checkpoint say, and what it takes.
#include "weights/kv_cache.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "nanovllm/params.h"

#include "engine/idle_backend.h"
#include "engine/memory_plan.h"
#include "io/quantised/quantization.h"
#include "io/safetensors/checkpoint.h"
#include "unit/io/tensor_file.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

class Device final : public NullBackend {
 public:
  explicit Device(bool has_e4m3) : has_e4m3_(has_e4m3) {}
  MemoryInfo memory() const override { return {size_t{1} << 40, size_t{1} << 40}; }
  bool has_e4m3_cache() const override { return has_e4m3_; }

 private:
  bool has_e4m3_;
};

/// A compressed-tensors configuration with this kv_cache_scheme.
std::shared_ptr<const QuantizationConfig> config_of(const std::string& scheme,
                                                    std::vector<std::string>* warnings = nullptr) {
  Json json = Json::parse(R"({"quantization_config": {"quant_method": "compressed-tensors",
      "format": "int-quantized", "config_groups": {"a": {"targets": ["Linear"],
      "weights": {"num_bits": 8, "strategy": "channel"}}}}})");
  json["quantization_config"]["kv_cache_scheme"] = Json::parse(scheme);
  std::vector<std::string> some;
  return std::make_shared<const QuantizationConfig>(
      *JsonObject(json, "config.json", ErrorKind::model).optional_object("quantization_config"),
      warnings ? *warnings : some);
}
const char *kStatic = R"({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false,
                          "symmetric": true})",
           *kDynamic = R"({"num_bits": 8, "type": "float", "dynamic": true})";

template <class Body>
std::string refusal(ErrorKind kind, Body body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "accepted";
}

TEST(KvCacheDtype, FollowsTheOptionThenTheCheckpointThenTheModel) {
  const Device able(true), other(false);
  const auto scheme = config_of(kStatic), dynamic = config_of(kDynamic), none = config_of("null");
  const auto dtype = [&](const Device& device, const auto& config, const char* asked) {
    return kv_cache_dtype(device, config.get(), asked, DType::bf16);
  };
  EXPECT_EQ(dtype(able, scheme, "auto"), DType::e4m3);
  EXPECT_EQ(dtype(able, dynamic, "auto"), DType::e4m3);
  EXPECT_EQ(dtype(other, scheme, "auto"), DType::bf16);
  EXPECT_EQ(dtype(able, none, "auto"), DType::bf16);
  EXPECT_EQ(dtype(able, scheme, "bfloat16"), DType::bf16);
  EXPECT_EQ(dtype(able, none, "fp8"), DType::e4m3);
  EXPECT_EQ(dtype(able, none, "fp8_e4m3"), DType::e4m3);
  EXPECT_EQ(kv_cache_dtype(able, nullptr, "auto", DType::f32), DType::f32);
  EXPECT_EQ(kv_cache_dtype(able, nullptr, "fp8", DType::f32), DType::e4m3);
  EXPECT_NE(describe_kv_cache(scheme.get(), DType::bf16).find("ignored"), std::string::npos);
  EXPECT_NE(describe_kv_cache(scheme.get(), DType::e4m3).find("checkpoint's"), std::string::npos);
  EXPECT_NE(describe_kv_cache(nullptr, DType::e4m3).find("each token and head"), std::string::npos);
  EXPECT_EQ(describe_kv_cache(none.get(), DType::bf16), "");
}

TEST(KvCacheDtype, WhatCannotBeIsRefusedByName) {
  const Device able(true), other(false);
  const auto said = [](const Device& device, const char* asked, DType dtype) {
    return refusal(ErrorKind::invalid_argument,
                   [&] { kv_cache_dtype(device, nullptr, asked, dtype); });
  };
  EXPECT_EQ(said(other, "fp8", DType::bf16),
            "kv_cache_dtype fp8 is not supported on null: use auto or bfloat16");
  EXPECT_EQ(said(able, "fp8_e5m2", DType::bf16),
            "kv_cache_dtype \"fp8_e5m2\" is not known: use auto, bfloat16 or fp8");
  EXPECT_EQ(said(able, "bfloat16", DType::f32),
            "kv_cache_dtype bfloat16 does not go with dtype f32: use auto or fp8");
}

TEST(KvCacheScheme, OfOtherNumbersIsIgnoredWithANote) {
  for (const char* scheme :
       {R"({"num_bits": 8, "type": "int"})", R"({"num_bits": 4, "type": "float"})",
        R"({"num_bits": 8, "type": "float", "symmetric": false})",
        R"({"num_bits": 8, "type": "float", "strategy": "channel"})",
        R"({"num_bits": 8, "type": "float", "dynamic": "local"})"}) {
    std::vector<std::string> warnings;
    EXPECT_EQ(config_of(scheme, &warnings)->kv_cache_scheme(), KvCacheScheme::none) << scheme;
    ASSERT_EQ(warnings.size(), 1u) << scheme;
    EXPECT_NE(warnings[0].find("kv_cache_scheme is ignored"), std::string::npos) << warnings[0];
  }
  EXPECT_NE(refusal(ErrorKind::model, [] { config_of(R"({"num_bits": "8", "type": "float"})"); })
                .find("kv_cache_scheme.num_bits"),
            std::string::npos);
}

TEST(KvScales, AreReadForEachLayerAndRefusedByName) {
  const TempDirectory directory;
  const auto number = [](float value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof value);
  };
  const std::string layer = "model.layers.0.self_attn.";
  std::string k_name = "k_scale", v_name = "v_scale";
  // Two heads' scales of keys: those from `first` on of as many as `heads`.
  const auto read = [&](const std::string& dtype, const std::vector<int64_t>& shape,
                        const std::string& k_scale, int64_t heads = 2, int64_t first = 0) {
    std::vector<StoredBytes> tensors(2);
    tensors[0] = {layer + k_name, dtype, k_scale, shape};
    tensors[1] = {layer + v_name, "BF16", std::string("\x80\x3f", 2), {}};
    if (dtype.empty()) tensors.erase(tensors.begin());
    write_tensors(directory.path() / "model.safetensors", tensors);
    const Checkpoint checkpoint(directory.path().string());
    std::vector<KvCache> layers(1);
    layers[0].k = layers[0].v = kv_pages(nullptr, DType::e4m3, {1, 2, 8, 32}, {});
    IdleCounts counts;
    IdleBackend device(counts);
    const Buffer scales =
        load_kv_scales(device, checkpoint, config_of(kStatic).get(), heads, first, layers);
    EXPECT_EQ(layers[0].v_scales.ptr<float>()[1], 1.0f);
    const float* k = layers[0].k_scales.ptr<float>();
    return std::vector<float>(k, k + 2);
  };
  using Shape = std::vector<int64_t>;
  k_name = "k_proj.output_scale", v_name = "v_proj.output_scale";  // vLLM's get_cache_scale
  EXPECT_EQ(read("F32", {1}, number(0.5f)), std::vector<float>(2, 0.5f));
  k_name = "k_proj.k_scale", v_name = "v_proj.v_scale";  // ModelOpt's
  EXPECT_EQ(read("F32", {}, number(0.125f)), std::vector<float>(2, 0.125f));
  k_name = "k_scale", v_name = "v_scale";
  EXPECT_EQ(read("F32", {1}, number(0.25f)), std::vector<float>(2, 0.25f));
  EXPECT_EQ(read("F32", {4, 1, 1}, number(1) + number(2) + number(3) + number(4), 4, 2),
            (std::vector<float>{3, 4}));
  const auto expect = [&](const char* said, auto... how) {
    const std::string found = refusal(ErrorKind::model, [&] { read(how...); });
    EXPECT_NE(found.find(said), std::string::npos) << found;
    EXPECT_NE(found.find(layer + "k_scale"), std::string::npos) << found;
  };
  expect("lacks tensor", "", Shape{1}, "");
  expect("asks for one number", "F32", Shape{3}, number(1) + number(1) + number(1));
  expect("asks for one number", "I32", Shape{1}, number(1));
  for (const float wrong : {0.0f, -1.0f, 0x1p-101f, 0x1p+101f, INFINITY, NAN})
    expect("from 2^-100 to 2^100", "F32", Shape{2}, number(1) + number(wrong));
}

TEST(MemoryPlan, AnFp8CacheHasANumberAByteAndAScaleOfEachRow) {
  ModelConfig model;
  model.architecture = "LlamaForCausalLM";
  model.vocab_size = 64;
  model.hidden_size = 256;
  model.intermediate_size = 64;
  model.num_hidden_layers = 3;
  model.num_attention_heads = 4;
  model.num_key_value_heads = 2;
  model.head_dim = 128;
  model.max_position_embeddings = 512;
  EngineConfig config;
  config.block_size = 16;
  config.cpu_kvcache_bytes = 64 << 20;
  Device device(true);
  const MemoryPlan plain = plan_memory(device, model, config, DType::bf16, {});
  config.kv_cache_dtype = "fp8";
  for (const int ranks : {1, 2}) {
    const MemoryPlan plan = plan_memory(device, model, config, DType::bf16, {0, ranks});
    EXPECT_EQ(plan.cache_dtype, DType::e4m3);
    const auto rows = static_cast<size_t>(2 * 3 * (2 / ranks));  // of a token, on this rank
    EXPECT_EQ(plan.bytes_per_block, 16 * (rows * (128 + 4) + 4));
    EXPECT_EQ(
        plan.workspace,
        plan_memory(device, model, EngineConfig{.cpu_kvcache_bytes = 64 << 20, .block_size = 16},
                    DType::bf16, {0, ranks})
            .workspace);
    if (ranks == 2) continue;
    EXPECT_NEAR(static_cast<double>(plan.num_blocks) / static_cast<double>(plain.num_blocks),
                256.0 / 132, 0.01);
  }
}

}  // namespace
}  // namespace nanovllm
