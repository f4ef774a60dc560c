// Checkpoint: a directory's weights are complete and consistent, or the thing that is wrong is
// named.
#include "io/safetensors/checkpoint.h"

#include <cstring>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "io/json.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

const std::string kData = std::string(NANOVLLM_SOURCE_DIR) + "/tests/data/safetensors/";
const std::string kFirst = "model-00001-of-00002.safetensors",
                  kSecond = "model-00002-of-00002.safetensors";
const std::string kIndex = "model.safetensors.index.json";

/// A file with one f32 each, by these names.
std::string shard(const std::vector<std::string>& names) {
  Json header = Json::object();
  for (size_t i = 0; i < names.size(); ++i)
    header[names[i]] = {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {4 * i, 4 * i + 4}}};
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + text + std::string(4 * names.size(), '\0');
}

class CheckpointIn : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& bytes) {
    std::ofstream(directory_ / name, std::ios::binary) << bytes;
  }
  void write_index(const Json& weight_map) {
    write(kIndex, Json{{"metadata", {{"total_size", 8}}}, {"weight_map", weight_map}}.dump());
  }

  std::string refusal() const {
    try {
      Checkpoint{directory_.string()};
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::model);
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      return error.what();
    }
    return "accepted";
  }
  void expect_refused(std::string_view part) const {
    const std::string message = refusal();
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }

  TempDirectory temp_;
  fs::path directory_ = temp_.path();
};

TEST(Checkpoint, ReadsShardsOfTheReferenceImplementation) {
  const Checkpoint checkpoint(kData + "sharded");
  EXPECT_EQ(checkpoint.names().size(), 3u);
  EXPECT_EQ(checkpoint.bytes(), 104u);
  const Json expected = read_json_file(kData + "values.json");
  for (const std::string& name : checkpoint.names()) {
    const StoredTensor* tensor = checkpoint.find(name);
    ASSERT_NE(tensor, nullptr);
    const Json& values = expected.at(name).at("values");
    EXPECT_EQ(Json(tensor->shape), expected.at(name).at("shape"));
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_EQ(static_cast<float>(tensor->view().ptr<bf16>()[i]),
                std::stod(values[i].get<std::string>()))
          << name << i;
  }
  EXPECT_EQ(checkpoint.find("lm_head.bias"), nullptr);
  EXPECT_EQ(checkpoint.file_of("lm_head.weight"), kData + "sharded/" + kSecond);
  checkpoint.release("lm_head.weight");
  EXPECT_NO_THROW(checkpoint.check_unchanged());
}

TEST_F(CheckpointIn, TheSingleFileComesBeforeTheIndex) {
  write("model.safetensors", shard({"a"}));
  write(kIndex, "nonsense");
  EXPECT_EQ(Checkpoint(directory_.string()).names(), std::vector<std::string>{"a"});
}

TEST_F(CheckpointIn, SaysWhyADirectoryHasNoWeights) {
  expect_refused("no weights: expected model.safetensors or model.safetensors.index.json");
  write("tokenizer.model", "x");
  expect_refused("no weights");
  write("model-q4.gguf", "GGUF");
  expect_refused("only \"model-q4.gguf\": GGUF is not read; use the model's safetensors");
  write("pytorch_model.bin", "x");
  expect_refused(
      "only \"pytorch_model.bin\": pickle weights are not loaded; convert to safetensors");
  write("adapter_model.safetensors", shard({"a"}));
  expect_refused("an adapter (LoRA) is merged into its model first");
  fs::rename(directory_ / "adapter_model.safetensors", directory_ / "gptq_model-4bit.safetensors");
  expect_refused("or that file needs the name of the first");
  fs::rename(directory_ / "gptq_model-4bit.safetensors", directory_ / "consolidated.safetensors");
  expect_refused("Mistral's own format is not read; download the files of those names");
  fs::remove(directory_ / "consolidated.safetensors");
  write(kFirst, shard({"a"}));
  expect_refused("has \"model-00001-of-00002.safetensors\" but neither model.safetensors nor");
  fs::remove_all(directory_);
  expect_refused("no such directory");
  std::ofstream(directory_) << "a file";
  expect_refused("is not a directory");
}

TEST_F(CheckpointIn, ADanglingLinkIsNamed) {
  fs::create_symlink("blobs/none", directory_ / "model.safetensors");
  expect_refused("model.safetensors: cannot be read: No such file or directory");
}

TEST_F(CheckpointIn, ShardsMayBeLinksAsInTheHuggingFaceCache) {
  write("blob", shard({"a"}));
  fs::create_symlink("blob", directory_ / kFirst);
  write_index({{"a", kFirst}});
  EXPECT_EQ(refusal(), "accepted");
}

TEST_F(CheckpointIn, AShardIsAPlainFileName) {
  for (const char* name : {"../x.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\b"}) {
    write_index({{"t", name}});
    expect_refused("must be a plain file name");
  }
  write_index({{"t", std::string("a\0b", 3)}});
  expect_refused("must be a plain file name");
  write_index({{"t", 3}});
  expect_refused("the shard of \"t\" must be a string, got 3");
}

// As in transformers: merged and requantised models come with indexes that nobody wrote anew.
TEST_F(CheckpointIn, TheIndexNamesTheShardsAndTheyTheirTensors) {
  write_index({{"a", kFirst}, {"b", kSecond}});
  write(kFirst, shard({"a"}));
  expect_refused("shard \"" + kSecond + "\" is missing");
  write(kSecond, shard({"a", "b"}));
  expect_refused("tensor \"a\" is in two files");
  write(kSecond, shard({"c"}));
  EXPECT_EQ(Checkpoint(directory_.string()).names(), (std::vector<std::string>{"a", "c"}));
  write(kSecond, shard({"b"}).substr(0, 40));
  expect_refused(kSecond + ": header length");
}

TEST_F(CheckpointIn, AnIndexWithoutAMapIsRefused) {
  write(kIndex, "{}");
  expect_refused("weight_map is missing");
  write(kIndex, R"({"weight_map": {}})");
  expect_refused("weight_map is empty");
  write(kIndex, R"({"weight_map": {"a": "x", "a": "y"}})");
  expect_refused("duplicate key \"a\"");
  write("model.safetensors", shard({}));
  expect_refused("holds no tensors");
}

}  // namespace
}  // namespace nanovllm
