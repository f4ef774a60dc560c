// Quantised checkpoints: the numbers that the published layouts stand for (tools/make_quantised.py
// packs them with numpy and says what they are), and every changed part of a scheme, by name.
#include "io/quantised/quantized_weight.h"

#include <functional>
#include <random>

#include <gtest/gtest.h>

#include "io/model_config.h"
#include "unit/io/tensor_file.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

const std::string kAttention = "model.layers.0.self_attn.q_proj";

fs::path fixture(const std::string& name) {
  return fs::path(NANOVLLM_SOURCE_DIR) / "tests/data/goldens" / ("quantised-" + name);
}

ConfigDefaults defaults_of(const std::string& architecture) {
  return {.num_experts = architecture == "Qwen3MoeForCausalLM" ? 128 : 0};
}

std::vector<std::string> fixtures() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(fixture("x").parent_path()))
    if (const std::string name = entry.path().filename(); name.starts_with("quantised-"))
      names.push_back(name.substr(10));
  return names;
}

/// FNV-1a of 64 bits.
std::string digest(const std::vector<std::byte>& bytes) {
  uint64_t value = 0xcbf29ce484222325;
  for (const std::byte b : bytes) value = (value ^ static_cast<uint8_t>(b)) * 0x100000001b3;
  return fmt::format("{:016x}", value);
}

/// The weight's [n, k], from config.json.
std::pair<int64_t, int64_t> shape_of(const ModelConfig& c, const std::string& module) {
  const int64_t q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim,
                inner = c.moe ? c.moe->moe_intermediate_size : c.intermediate_size;
  if (module.ends_with("q_proj")) return {q, c.hidden_size};
  if (module.ends_with("k_proj") || module.ends_with("v_proj")) return {kv, c.hidden_size};
  if (module.ends_with("o_proj")) return {c.hidden_size, q};
  if (module.ends_with("down_proj")) return {c.hidden_size, inner};
  return {inner, c.hidden_size};
}

std::vector<std::byte> read(const QuantizedWeight& weight, const WeightBlock& block) {
  std::vector<std::byte> out(static_cast<size_t>(block.rows() * block.cols()) * 2);
  weight.dequantise(out.data(), DType::bf16, block);
  return out;
}

TEST(QuantizedWeight, HasTheNumbersOfItsLayoutToTheBit) {
  ASSERT_GE(fixtures().size(), 12u);
  for (const std::string& name : fixtures()) {
    const std::string directory = fixture(name).string();
    const ModelConfig config = load_model_config(directory, defaults_of);
    const Checkpoint checkpoint(directory);
    const Json golden = read_json_file(directory + "/golden.json");
    for (const auto& [module, expected] : golden["weights"].items()) {
      SCOPED_TRACE(name + " " + module);
      const QuantScheme* scheme = config.quantization->find(module);
      ASSERT_NE(scheme, nullptr);
      const auto [n, k] = shape_of(config, module);
      const QuantizedWeight weight(checkpoint, module, *scheme, n, k);
      EXPECT_EQ(digest(read(weight, {0, n, 0, k})), expected.get<std::string>());
    }
  }
}

// A rank holds any rows and columns, whatever packs and groups they cut.
TEST(QuantizedWeight, AnyBlockHasTheNumbersOfTheWhole) {
  std::mt19937 random(1);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (const std::string& name : fixtures()) {
    const std::string directory = fixture(name).string();
    const ModelConfig config = load_model_config(directory, defaults_of);
    const Checkpoint checkpoint(directory);
    const auto [n, k] = shape_of(config, kAttention);
    const QuantizedWeight weight(checkpoint, kAttention, *config.quantization->find(kAttention), n,
                                 k);
    const auto whole = read(weight, {0, n, 0, k});
    for (int i = 0; i < 30; ++i) {
      const int64_t row = pick(0, n - 1), column = pick(0, k - 1);
      const WeightBlock block{row, pick(row + 1, n), column,
                              i % 4 == 0 ? column + 1 : pick(column + 1, k)};
      const auto part = read(weight, block);
      for (int64_t r = 0; r < block.rows(); ++r)
        ASSERT_TRUE(std::equal(part.begin() + r * block.cols() * 2,
                               part.begin() + (r + 1) * block.cols() * 2,
                               whole.begin() + ((row + r) * k + column) * 2))
            << name << " rows " << row << " columns " << column;
    }
  }
}

/// Fixtures with something changed.
class ChangedScheme : public testing::Test {
 protected:
  using Change = std::function<void(std::vector<StoredBytes>&)>;

  /// The refusal of q_proj of the fixture, its quantization_config updated and its tensors
  /// changed.
  std::string refusal(const std::string& name, const char* update, const Change& change = {}) {
    Json json = read_json_file(fixture(name) / "config.json");
    json["quantization_config"].merge_patch(Json::parse(update));
    auto tensors = read_tensors(fixture(name) / "model.safetensors");
    if (change) change(tensors);
    write_tensors(directory_.path() / "model.safetensors", tensors);
    try {
      const ModelConfig config = parse_model_config(json, defaults_of);
      const Checkpoint checkpoint(directory_.path().string());
      const QuantScheme* scheme = config.quantization->find(kAttention);
      if (!scheme) return "plain";
      const auto [n, k] = shape_of(config, kAttention);
      read(QuantizedWeight(checkpoint, kAttention, *scheme, n, k), {0, n, 0, k});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::model);
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      return error.what();
    }
    return "accepted";
  }
  void expect(const std::string& said, const std::string& name, const char* update,
              const Change& change = {}) {
    const std::string found = refusal(name, update, change);
    EXPECT_NE(found.find(said), std::string::npos) << name << " " << update << ": " << found;
  }

  static StoredBytes& find(std::vector<StoredBytes>& tensors, const std::string& end) {
    for (StoredBytes& t : tensors)
      if (t.name == kAttention + end) return t;
    throw std::runtime_error("no tensor " + end);
  }
  static Change without(const std::string& end) {
    return [=](auto& tensors) {
      std::erase_if(tensors, [&](const auto& t) { return t.name == kAttention + end; });
    };
  }
  /// The first element replaced by these bytes.
  static Change first(const std::string& end, const std::string& bytes) {
    return [=](auto& tensors) { find(tensors, end).bytes.replace(0, bytes.size(), bytes); };
  }
  static Change shaped(const std::string& end, std::vector<int64_t> shape) {
    return [=](auto& tensors) { find(tensors, end).shape = shape; };
  }

  TempDirectory directory_;
};

TEST_F(ChangedScheme, UnchangedItIsAccepted) {
  for (const std::string& name : fixtures()) EXPECT_EQ(refusal(name, "{}"), "accepted") << name;
}

TEST_F(ChangedScheme, FieldsAreRefusedByName) {
  const std::string weights = "quantization_config.config_groups.group_0.weights.",
                    inputs = "quantization_config.config_groups.group_0.input_activations.";
  const auto group = [](const std::string& part, const std::string& fields) {
    return R"({"config_groups": {"group_0": {")" + part + R"(": )" + fields + "}}}";
  };
  const auto expect_group = [&](const std::string& said, const char* name, const char* part,
                                const char* fields) {
    expect(said, name, group(part, fields).c_str());
  };
  expect("quant_method \"quark\"", "packed-128", R"({"quant_method": "quark"})");
  expect("quant_method is missing, as in MLX's files", "packed-128", R"({"quant_method": null})");
  expect("format \"marlin-24\"", "packed-128", R"({"format": "marlin-24"})");
  expect("quantization_status \"calibration\"", "packed-128",
         R"({"quantization_status": "calibration"})");
  expect("transform_config", "packed-128", R"({"transform_config": {"config_groups": {}}})");
  expect("moe_sparsity_config", "packed-32-experts",
         R"({"moe_sparsity_config": {"method": "prune", "num_experts": [3, 4]}})");
  expect("sparsity_config.format \"2:4\"", "packed-128",
         R"({"sparsity_config": {"format": "2:4"}})");
  expect("config_groups is missing", "packed-128", R"({"config_groups": null})");
  expect("group_1.weights is missing: attention's own activations are not quantised", "packed-128",
         R"({"config_groups": {"group_1": {"targets": ["re:.*self_attn$"],
             "input_activations": {"type": "float", "num_bits": 8, "strategy": "tensor"}}}})");
  expect("not an expression", "packed-128", R"({"ignore": ["re:(("]})");
  expect_group(weights + "group_size 96", "packed-128", "weights", R"({"group_size": 96})");
  expect_group(weights + "num_bits 3", "packed-128", "weights", R"({"num_bits": 3})");
  expect_group(weights + "type \"float\"", "packed-128", "weights", R"({"type": "float"})");
  expect_group(weights + "strategy \"tensor_group\"", "packed-128", "weights",
               R"({"strategy": "tensor_group"})");
  expect_group(weights + "strategy is not supported", "packed-128", "weights",
               R"({"strategy": "block", "group_size": null, "block_structure": [128, 128]})");
  // An observer made the scales, and changes nothing that is read.
  expect_group("accepted", "packed-128", "weights", R"({"observer": "one of tomorrow's"})");
  expect_group(weights + "actorder", "packed-128", "weights", R"({"actorder": "backwards"})");
  expect_group(weights + "dynamic true", "packed-128", "weights", R"({"dynamic": true})");
  expect_group(weights + "symmetric false", "fp8-channel", "weights", R"({"symmetric": false})");
  expect_group(weights + "block_structure", "fp8-channel", "weights",
               R"({"strategy": "block", "block_structure": [64, 64]})");
  expect_group(weights + "block_structure", "fp8-channel", "weights", R"({"strategy": "block"})");
  // A text, as compressed-tensors reads early files.
  expect_group(inputs + "strategy \"token\" is not supported with weights in blocks", "fp8-channel",
               "weights", R"({"strategy": "block", "block_structure": "128x128"})");
  expect_group(inputs + "strategy \"tensor\" with dynamic true", "fp8-channel", "input_activations",
               R"({"strategy": "tensor"})");
  expect_group(inputs + "type \"int\"", "fp8-channel", "input_activations", R"({"type": "int"})");
  expect_group(inputs + "num_bits 4", "int8-channel", "input_activations", R"({"num_bits": 4})");
  expect_group(inputs + "type \"float\"", "w4a8-64", "input_activations", R"({"type": "float"})");
  expect_group(inputs + "num_bits is not supported", "w4a8-32-packed-experts", "weights",
               R"({"symmetric": false})");
  expect_group(inputs + "num_bits is not supported", "w4a8-32-packed-experts", "weights",
               R"({"num_bits": 8})");
  expect_group(weights + "strategy is not supported", "w4a8-64", "weights", R"({"num_bits": 8})");
  expect_group(weights + "actorder is not supported", "w4a8-64", "weights",
               R"({"actorder": "group"})");
  expect_group(weights + "num_bits 3", "w4a8-64", "weights", R"({"num_bits": 3})");
  expect("output_activations", "int8-channel",
         R"({"config_groups": {"group_0": {"output_activations": {"num_bits": 8}}}})");
  expect("bits 2", "gptq-64-zeros", R"({"bits": 2})");
  expect("group_size 16", "gptq-64-zeros", R"({"group_size": 16})");
  expect("checkpoint_format \"marlin\"", "gptq-64-zeros", R"({"checkpoint_format": "marlin"})");
  expect("pack_dtype \"int8\"", "gptq-64-zeros", R"({"pack_dtype": "int8"})");
  expect("accepted", "gptq-64-zeros", R"({"dynamic": {"+:x": {"bits": 8}, "-:y": {}}})");
  expect("quantization_config.dynamic..*.bits 3", "gptq-64-zeros",
         R"({"dynamic": {".*": {"bits": 3}}})");
  expect("bits is missing", "gptq-64-zeros", R"({"bits": null})");
  expect("version \"gemv\"", "awq-64-experts", R"({"version": "gemv"})");
  expect("format \"gemv_fast\"", "awq-64-experts",
         R"({"version": null, "format": "gemv_fast"})");  // as transformers 5 reads it
  expect("zero_point false", "awq-64-experts", R"({"zero_point": false})");
  expect("bits 8", "awq-64-experts", R"({"bits": 8})");
  expect("weight_block_size", "fp8-blocks", R"({"weight_block_size": [64, 128]})");
  expect("fmt \"e5m2\"", "fp8-blocks", R"({"fmt": "e5m2"})");
  expect("scale_fmt \"ue8m0\"", "fp8-blocks", R"({"scale_fmt": "ue8m0"})");
  expect("activation_scheme \"static\"", "fp8-blocks", R"({"activation_scheme": "static"})");
}

// As in vLLM, where AutoRound's files are read as GPTQ's or AWQ's.
TEST_F(ChangedScheme, AutoRoundHasTheLayoutsOfGptqAndAwq) {
  const auto with = [](const std::string& packing, const char* more) {
    return R"({"quant_method": "auto-round", "packing_format": "auto_round:)" + packing + "\"" +
           more + "}";
  };
  expect("accepted", "gptq-64-zeros", with("auto_gptq", "").c_str(), without(".g_idx"));
  expect("accepted", "awq-64-experts", with("auto_awq", "").c_str());
  expect(
      "accepted", "gptq-64-zeros",
      with("auto_gptq", R"(, "extra_config": {"model.layers.0.mlp.gate": {"bits": 16}})").c_str());
  const std::string itself = R"(, "extra_config": {")" + kAttention + R"(": {"bits": )";
  expect("plain", "gptq-64-zeros", with("auto_gptq", (itself + "16}}").c_str()).c_str());
  expect("asks for I32[32, 128]", "gptq-64-zeros",
         with("auto_gptq", (itself + "8}}").c_str()).c_str());
  expect("accepted", "awq-64-experts",
         with("auto_awq", R"(, "extra_config": {"mlp": {"bits": 4, "sym": true}})").c_str());
  expect("\"mlp\" is not supported: one scheme for all modules of AWQ's layout", "awq-64-experts",
         with("auto_awq", R"(, "extra_config": {"mlp": {"group_size": 32}})").c_str());
  expect(
      "data_type \"mx_fp\"", "gptq-64-zeros",
      with("auto_gptq", R"(, "extra_config": {"x": {"bits": 4, "data_type": "mx_fp"}})").c_str());
  expect("packing_format \"auto_round:llm_compressor\"", "gptq-64-zeros",
         with("llm_compressor", "").c_str());
  expect("data_type \"mx_fp\"", "gptq-64-zeros",
         with("auto_gptq", R"(, "data_type": "mx_fp")").c_str());
}

// As vLLM reads NVIDIA's FP8 checkpoints (ModelOptFp8Config), whose tensors are those of static
// FP8.
TEST_F(ChangedScheme, ModelOptsFp8HasStaticScalesOfTensors) {
  const auto with = [](const char* more) {
    return std::string(R"({"quant_method": "modelopt", "format": null, "config_groups": null, )") +
           more + "}";
  };
  const auto said = [&](const char* found, const char* more, const Change& change = {}) {
    expect(found, "fp8-tensor-static", with(more).c_str(), change);
  };
  said("accepted", R"("quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.gate"])");
  said("lacks", R"("quant_algo": "FP8")", without(".input_scale"));
  said("plain", R"("quant_algo": "FP8", "ignore": ["model.layers.*.self_attn*"])");
  said("accepted", R"("quant_algo": "FP8", "ignore": ["model.layers.*.self", "odel*", "model"])");
  said("plain", R"("quant_algo": "FP8", "exclude_modules": ["model.layers.0.self_attn.q_proj"])");
  std::string many = R"("quant_algo": "FP8", "ignore": ["model.layers.0.self_attn.q_proj")";
  for (int i = 0; i < 1000; ++i) many += fmt::format(R"(, "model.layers.{}.mlp.gate")", i);
  said("plain", (many + "]").c_str());
  said("quant_algo \"NVFP4\"", R"("quant_algo": "NVFP4")");
}

TEST(QuantizationConfig, ModelOptsMayStandInAFileOfItsOwn) {
  TempDirectory directory;
  Json config = read_json_file(fixture("fp8-tensor-static") / "config.json");
  config.erase("quantization_config");
  std::ofstream(directory.path() / "config.json") << config.dump();
  std::ofstream(directory.path() / "hf_quant_config.json")
      << R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8",
             "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}})";
  const auto quantization = load_model_config(directory.path(), defaults_of).quantization;
  ASSERT_NE(quantization, nullptr);
  EXPECT_EQ(quantization->method(), "modelopt");
  EXPECT_EQ(quantization->find(kAttention)->activations, QuantActivations::tensor);
  EXPECT_EQ(quantization->find("lm_head"), nullptr);
  EXPECT_EQ(quantization->kv_cache_scheme(), KvCacheScheme::fp8_static);
}

// Fields that are known, but not those of the file.
TEST_F(ChangedScheme, TensorsThatAreNotTheSchemesAreRefusedByName) {
  const std::string tensor = "tensor " + kAttention;
  expect(tensor + ".weight_scale is BF16[128, 1]", "packed-128",
         R"({"config_groups": {"group_0": {"weights": {"group_size": 64}}}})");
  expect(tensor + ".weight_packed is I32[128, 16]", "packed-128",
         R"({"config_groups": {"group_0": {"weights": {"num_bits": 8}}}})");
  expect("lacks " + tensor + ".weight_zero_point", "packed-128",
         R"({"config_groups": {"group_0": {"weights": {"symmetric": false}}}})");
  expect("lacks " + tensor + ".weight_g_idx", "packed-128",
         R"({"config_groups": {"group_0": {"weights": {"actorder": "group"}}}})");
  expect("sym is true", "gptq-64-zeros", R"({"sym": true})");
  expect(tensor + ".qzeros is I32[1, 16]", "gptq-128-ordered", R"({"group_size": 64})");
  expect("desc_act is false", "gptq-64-zeros", "{}",
         [](auto& tensors) {  // two columns change groups
           find(tensors, ".g_idx").bytes.replace(0, 1, 1, '\1').replace(64 * 4, 1, 1, '\0');
         });
  expect(tensor + ".qzeros is I32[2, 16]", "gptq-64-zeros", R"({"group_size": 32})");
  expect(tensor + ".qweight is I32[16, 128]", "gptq-64-zeros", R"({"bits": 8})");
  expect("sym is true", "gptq-128-ordered", R"({"checkpoint_format": "gptq_v2"})");
  expect(tensor + ".qzeros is I32[2, 16]", "awq-64-experts", R"({"group_size": 128})");
  expect("lacks " + tensor + ".weight_scale_inv", "fp8-channel",
         R"({"quant_method": "fp8", "weight_block_size": [128, 128]})");
  expect(tensor + ".weight_scale is F32[1]", "fp8-tensor-static",
         R"({"config_groups": {"group_0": {"weights": {"strategy": "channel"}}}})");
  expect("lacks " + tensor + ".input_scale", "fp8-tensor-static", "{}", without(".input_scale"));
  expect(
      tensor + ".weight is I8[128, 128]", "int8-channel",
      R"({"format": "float-quantized", "config_groups": {"group_0": {"weights": {"type": "float"},
             "input_activations": {"type": "float"}}}})");
}

TEST_F(ChangedScheme, MissingMisshapenAndImpossibleTensorsAreRefusedByName) {
  for (const auto& [name, ends] : std::map<std::string, std::vector<std::string>>{
           {"packed-128", {".weight_packed", ".weight_scale", ".weight_shape"}},
           {"packed-32-zeros-ordered", {".weight_zero_point", ".weight_g_idx"}},
           {"gptq-128-ordered", {".qweight", ".qzeros", ".scales", ".g_idx"}},
           {"awq-64-experts", {".qweight", ".qzeros", ".scales"}},
           {"fp8-channel", {".weight", ".weight_scale"}},
           {"fp8-blocks", {".weight", ".weight_scale_inv"}},
           {"int8-channel", {".weight", ".weight_scale"}}})
    for (const std::string& end : ends) {
      expect("lacks tensor " + kAttention + end, name, "{}", without(end));
      expect("tensor " + kAttention + end + " is ", name, "{}", [&](auto& tensors) {
        auto& shape = find(tensors, end).shape;
        shape.insert(shape.begin(), 1);
      });
    }
  const std::string zero(4, '\0'), nan("\0\0\xc0\x7f", 4), infinite("\0\0\x80\x7f", 4),
      negative("\0\0\x80\xbf", 4);
  for (const std::string& scale : {zero, nan, infinite, negative})
    expect("weight_scale_inv has a scale of ", "fp8-blocks", "{}",
           first(".weight_scale_inv", scale));
  expect("scales has a scale of nan", "gptq-64-zeros", "{}", first(".scales", "\xff\x7f"));
  expect("scales has a scale of 0", "awq-64-experts", "{}", first(".scales", std::string(2, '\0')));
  expect("weight_scale has a scale of inf", "int8-channel", "{}",
         first(".weight_scale", "\x80\x7f"));
  for (const std::string& scale : {zero, nan, infinite, negative})
    expect("input_scale has a scale of ", "fp8-tensor-static", "{}", first(".input_scale", scale));
  // 2^-101 and 2^101.
  for (const std::string& scale : {std::string("\0\0\0\x0d", 4), std::string("\0\0\0\x72", 4)})
    expect("scales of activations are from 2^-100 to 2^100", "fp8-tensor-static", "{}",
           first(".input_scale", scale));
  // 2^7 in f32 and bf16; 2^-101 in bf16.
  expect("weight_scale_inv has a scale of 128", "fp8-blocks", "{}",
         first(".weight_scale_inv", std::string("\0\0\0\x43", 4)));
  expect("weight_scale has a scale of 128", "int8-channel", "{}",
         first(".weight_scale", std::string("\0\x43", 2)));
  expect("from 2^-100 to below 2^7", "int8-channel", "{}",
         first(".weight_scale", std::string("\0\x0d", 2)));
  expect("has a zero point of 8, beyond 4 bits", "packed-32-zeros-ordered", "{}",
         [](auto& tensors) {
           auto& zeros = find(tensors, ".weight_zero_point");
           zeros.dtype = "I8";
           zeros.shape = {128, 4};
           zeros.bytes = std::string(128 * 4, '\x08');
         });
  expect("weight has a NaN", "fp8-channel", "{}", first(".weight", "\xff"));
  expect("weight_shape says [127, 128]", "packed-128", "{}", first(".weight_shape", "\x7f"));
  expect("does not put 32 columns into each of 4 groups", "packed-32-zeros-ordered", "{}",
         first(".weight_g_idx", std::string("\x04\0\0\0", 4)));
  expect("does not put 64 columns into each of 2 groups", "gptq-64-zeros", "{}",
         first(".g_idx", std::string("\x01\0\0\0", 4)));
  expect("cannot express", "gptq-64-zeros", "{}", first(".qzeros", "\x0f"));
  expect("sym is true", "gptq-128-ordered", "{}", first(".qzeros", "\x76"));
}

}  // namespace
}  // namespace nanovllm
