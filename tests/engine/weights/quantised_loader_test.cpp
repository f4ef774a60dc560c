// The loader and quantised checkpoints: which weights stay quantised, and which files are refused.
#include <algorithm>
#include <cstring>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "engine/weights/weight_loader_rig.h"
#include "io/quantised/quantization.h"

namespace nanovllm {
namespace {

/// A quantised model of tests/data/goldens whose tensors a test changes.
class QuantisedLoaderTest : public WeightLoaderTest {
 protected:
  void read(const std::string& name) {
    const auto path = std::filesystem::path(NANOVLLM_SOURCE_DIR) / "tests/data/goldens" / name;
    config_ = load_model_config(path.string(), config_defaults);
    tensors_ = read_tensors(path / "model.safetensors");
  }
  std::string refusal() {
    write(tensors_);
    try {
      load_shard(config_, checkpoint(), {});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::model);
      return error.what();
    }
    return "";
  }
  void add(const std::string& name, const std::string& dtype, const std::string& bytes,
           std::vector<int64_t> shape) {
    std::erase_if(tensors_, [&](const StoredBytes& t) { return t.name == name; });
    tensors_.push_back({name, dtype, bytes, std::move(shape)});
  }
  std::vector<StoredBytes> tensors_;
  const std::string module_ = "model.layers.0.self_attn.o_proj";
};

TEST_F(QuantisedLoaderTest, LeavesTensorsThatChangeNothing) {
  read("quantised-gptq-64-zeros");
  add(module_ + ".bias", "F16", std::string(256, '\0'), {128});
  for (const char* scale : {"k_scale", "kv_scale", "v_proj.output_scale"})
    add(std::string("model.layers.0.self_attn.") + scale, "F32", std::string(4, '\1'), {1});
  EXPECT_EQ(refusal(), "");
  add(module_ + ".bias", "F16", std::string(254, '\0') + "\1\1", {128});
  EXPECT_NE(refusal().find(module_ + ".bias has no place"), std::string::npos) << refusal();

  read("quantised-int8-channel");
  add(module_ + ".weight_zero_point", "I8", std::string(128, '\0'), {128, 1});
  EXPECT_EQ(refusal(), "");
  add(module_ + ".weight_zero_point", "I8", std::string(128, '\1'), {128, 1});
  EXPECT_NE(refusal().find(".weight_zero_point has no place"), std::string::npos) << refusal();
}

// Official FP8 checkpoints need not list the head: neither vLLM nor transformers quantises it.
TEST_F(QuantisedLoaderTest, TakesAPlainHeadWhereNumbersHaveTheNameOfPlainOnes) {
  read("quantised-fp8-blocks");
  Json fp8 = {
      {"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}}};
  std::vector<std::string> warnings;
  config_.quantization = std::make_shared<const QuantizationConfig>(
      *JsonObject(fp8, "", ErrorKind::model).optional_object("quantization_config"), warnings);
  ASSERT_NE(config_.quantization->find("lm_head"), nullptr);
  EXPECT_EQ(refusal(), "");
  const std::string up = "model.layers.0.mlp.up_proj";
  add(up + ".weight", "BF16", std::string(256 * 128 * 2, '\0'), {256, 128});
  EXPECT_NE(refusal().find(up + ".weight_scale_inv has no place"), std::string::npos) << refusal();
}

// Lists of plain modules leave out routers; names of packed tensors cannot be mistaken.
TEST_F(QuantisedLoaderTest, TakesAPlainWeightWherePackedOnesWouldHaveOtherNames) {
  read("quantised-awq-64-experts");
  for (const char* end : {".qweight", ".qzeros", ".scales"})
    std::erase_if(tensors_, [&](const StoredBytes& t) { return t.name == module_ + end; });
  EXPECT_NE(refusal().find("lacks tensor " + module_ + ".qweight"), std::string::npos) << refusal();
  add(module_ + ".weight", "F32", std::string(128 * 128 * 4, '\0'), {128, 128});
  EXPECT_EQ(refusal(), "");
}

/// Takes any quantised weight, beside quantised rows or not.
struct KeepingBackend : RecordingBackend {
  bool keeps(WeightFormat format, int64_t, int64_t, bool stacked) const override {
    return (quantises_rows || !format.quantises_rows()) && (keeps_stacks || !stacked);
  }
  void load_quantised(Weight dst, const QuantizedRows& rows) override {
    input_scales.push_back(rows.input_scale);
    EXPECT_EQ(std::ssize(rows.numbers), dst.n() * dst.k());
    EXPECT_EQ(std::ssize(rows.scales), dst.n() * dst.format.groups(dst.k()));
    quantised += dst.n() * dst.k();
  }
  bool quantises_rows = true, keeps_stacks = true;
  int64_t quantised = 0;
  std::vector<float> input_scales;
};

TEST_F(QuantisedLoaderTest, RowsThatMeetOneProductShareTheLargestScale) {
  const auto scale_of = [&](const std::string& module) {
    float scale = 0;
    for (const StoredBytes& t : tensors_)
      if (t.name == "model.layers.0." + module + ".input_scale")
        std::memcpy(&scale, t.bytes.data(), sizeof scale);
    EXPECT_GT(scale, 0) << module;
    return scale;
  };
  read("quantised-fp8-tensor-static");
  write(tensors_);
  for (const bool quantises_rows : {true, false}) {
    KeepingBackend backend;
    backend.quantises_rows = quantises_rows;
    std::vector<std::byte> storage(1 << 20);
    WeightLoader loader(backend, DType::bf16, {}, storage.data(), config_.quantization.get());
    find_architecture(config_.architecture).make(config_, {loader, {}});
    loader.load(checkpoint(), {});
    EXPECT_EQ(loader.num_row_quantising(), quantises_rows ? loader.num_quantised() : 0);
    EXPECT_EQ(loader.quantised_columns(), quantises_rows ? 192 : 0);  // down_proj's
    const std::string at = "self_attn.";
    const std::vector<float> want = {
        std::max({scale_of(at + "q_proj"), scale_of(at + "k_proj"), scale_of(at + "v_proj")}),
        scale_of(at + "o_proj"), std::max(scale_of("mlp.gate_proj"), scale_of("mlp.up_proj")),
        scale_of("mlp.down_proj")};
    EXPECT_EQ(backend.input_scales, quantises_rows ? want : std::vector<float>(4));
  }
}

TEST_F(QuantisedLoaderTest, SoDoAllExpertsOfALayer) {
  read("quantised-fp8-tensor-static-experts");
  write(tensors_);
  KeepingBackend backend;
  std::vector<std::byte> storage(1 << 20);
  WeightLoader loader(backend, DType::bf16, {}, storage.data(), config_.quantization.get());
  find_architecture(config_.architecture).make(config_, {loader, {}});
  loader.load(checkpoint(), {});
  const auto largest = [&](std::initializer_list<std::string> ends) {
    std::vector<float> scales;
    for (const StoredBytes& t : tensors_)
      for (const std::string& end : ends)
        if (t.name.ends_with(end + ".input_scale"))
          std::memcpy(&scales.emplace_back(), t.bytes.data(), sizeof(float));
    EXPECT_GT(std::set<float>(scales.begin(), scales.end()).size(), scales.size() / 2);
    return *std::max_element(scales.begin(), scales.end());
  };
  std::vector<float> want = {largest({"q_proj", "k_proj", "v_proj"}), largest({"o_proj"})};
  want.insert(want.end(), 4, largest({"gate_proj", "up_proj"}));
  want.insert(want.end(), 4, largest({"down_proj"}));
  EXPECT_EQ(backend.input_scales, want);
  EXPECT_EQ(loader.num_row_quantising(), loader.num_quantised());
}

TEST_F(QuantisedLoaderTest, ExpertsStayQuantisedWhereAllOfALayerHaveOneFormat) {
  KeepingBackend backend;
  const auto load = [&](Shard shard) {
    write(tensors_);
    backend.quantised = 0;
    std::vector<std::byte> storage(1 << 20);
    WeightLoader loader(backend, DType::bf16, shard, storage.data(), config_.quantization.get());
    find_architecture(config_.architecture).make(config_, {loader, {}});
    loader.load(checkpoint(), {});
    EXPECT_EQ(loader.num_quantised(), backend.quantised);
    return backend.quantised;
  };
  read("quantised-packed-32-experts");  // one layer; hidden 128, 4 experts of 64, groups of 32
  constexpr int64_t kAttention = 256 * 128 + 128 * 128, kMatrices = 4 * 64 * 128;
  EXPECT_EQ(load({}), kAttention + 3 * kMatrices);
  EXPECT_EQ(load({1, 2}), 192 * 128 + 128 * 64 + 3 * kMatrices / 2);  // one KV head for both
  backend.keeps_stacks = false;
  EXPECT_EQ(load({}), kAttention);
  backend.keeps_stacks = true;

  const std::string up = "model.layers.0.mlp.experts.2.up_proj";
  for (const char* end : {".weight_packed", ".weight_scale", ".weight_shape"})
    std::erase_if(tensors_, [&](const StoredBytes& t) { return t.name == up + end; });
  add(up + ".weight", "BF16", std::string(64 * 128 * 2, '\0'), {64, 128});
  Json json = read_json_file(std::string(NANOVLLM_SOURCE_DIR) +
                             "/tests/data/goldens/quantised-packed-32-experts/config.json");
  json["quantization_config"]["ignore"].push_back(up);
  config_ = parse_model_config(json, config_defaults);
  EXPECT_EQ(load({}), kAttention + kMatrices);  // down_proj's
}

TEST_F(QuantisedLoaderTest, WeightsStayQuantisedWhereTheBackendKeepsThem) {
  const auto load = [&](Shard shard) {
    write(tensors_);
    KeepingBackend backend;
    std::vector<std::byte> storage(1 << 20);
    WeightLoader loader(backend, DType::bf16, shard, storage.data(), config_.quantization.get());
    find_architecture(config_.architecture).make(config_, {loader, {}});
    loader.load(checkpoint(), {});
    EXPECT_EQ(loader.num_quantised(), backend.quantised);
    return backend.quantised;
  };
  read("quantised-gptq-64-zeros");  // one layer; hidden 128, 192 in the MLP, groups of 64
  constexpr int64_t kAttention = 256 * 128 + 128 * 128, kMlp = 3 * 192 * 128;
  EXPECT_EQ(load({}), kAttention + kMlp);
  // A half of down_proj's columns would cut a group.
  EXPECT_EQ(load({0, 2}), 192 * 128 + 128 * 64 + 192 * 128);
  EXPECT_EQ(load({1, 2}), load({0, 2}));

  for (const char* end : {".qweight", ".qzeros", ".scales", ".g_idx"})
    std::erase_if(tensors_, [&](const StoredBytes& t) { return t.name == module_ + end; });
  add(module_ + ".weight", "F32", std::string(128 * 128 * 4, '\0'), {128, 128});
  try {
    load({});
    ADD_FAILURE() << "there is no room for a plain weight";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::model);
    EXPECT_NE(std::string(error.what()).find("tensor " + module_ + ".weight is plain, but"),
              std::string::npos)
        << error.what();
  }
}

// Qwen3-Embedding has the architecture of a model for text, and names without "model.".
TEST_F(QuantisedLoaderTest, SaysThatAModelWithoutPrefixMakesEmbeddings) {
  read("quantised-fp8-blocks");
  for (StoredBytes& tensor : tensors_)
    if (tensor.name.starts_with("model.")) tensor.name.erase(0, 6);
  EXPECT_NE(refusal().find("those of a model that makes embeddings"), std::string::npos);
}

TEST_F(QuantisedLoaderTest, SaysWhereTheModelLiesWithinAnother) {
  for (const std::string around : {"base_model.model.model.", "model.language_model."}) {
    read("quantised-fp8-blocks");
    for (StoredBytes& tensor : tensors_)
      if (tensor.name.starts_with("model.")) tensor.name.replace(0, 6, around);
    EXPECT_NE(
        refusal().find("; it has " + around + "embed_tokens.weight: a model that lies within"),
        std::string::npos)
        << refusal();
  }
}

TEST_F(QuantisedLoaderTest, RefusesAFileThatIsQuantisedOtherwiseThanConfigSays) {
  read("quantised-fp8-blocks");
  config_.quantization.reset();
  EXPECT_NE(refusal().find("only F32, F16 and BF16 weights can be loaded: config.json has no "
                           "quantization_config"),
            std::string::npos)
      << refusal();
  read("quantised-packed-128");
  config_.quantization.reset();
  EXPECT_NE(
      refusal().find("q_proj.weight, which config.json's architecture needs; it is quantised, "
                     "and config.json has no quantization_config: add it"),
      std::string::npos)
      << refusal();
}

}  // namespace
}  // namespace nanovllm
