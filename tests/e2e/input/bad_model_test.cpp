// Model directories with something wrong: one line that names it, exit code 3.
#include <algorithm>

#include <gtest/gtest.h>

#include "e2e/process.h"
#include "unit/io/tensor_file.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

/// A copy of the bundled model that a test may break.
class BadModel : public testing::Test {
 protected:
  BadModel() {
    for (const auto& entry : std::filesystem::directory_iterator(demo_model()))
      std::filesystem::create_symlink(entry.path(), path(entry.path().filename()));
  }
  std::filesystem::path path(const std::filesystem::path& file) const {
    return directory_.path() / file;
  }

  /// Replaces a file, which is a link into the bundled model so far.
  void replace(const std::string& file, const std::string& text) {
    std::filesystem::remove(path(file));
    write_file(path(file), text);
  }
  void change_config(const std::string& field, const Json& value) {
    Json config = Json::parse(file_text(path("config.json")));
    config[field] = value;
    replace("config.json", config.dump());
  }
  template <class Change>
  void change_tensors(Change change) {
    auto tensors = read_tensors(path("model.safetensors"));
    change(tensors);
    std::filesystem::remove(path("model.safetensors"));
    write_tensors(path("model.safetensors"), tensors);
  }

  /// Generation fails with code 3 and one line with all the fragments in it.
  void expect_refusal(const std::vector<std::string>& fragments, int exit_code = 3) {
    const auto result = nanovllm_program(
        {"generate", directory_.path(), "-q", "--prompt", "x", "--max-tokens", "1"});
    EXPECT_EQ(result.exit_code, exit_code) << result.errors;
    EXPECT_EQ(result.output, "");
    EXPECT_EQ(result.errors.find("error: "), 0u) << result.errors;
    EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1) << result.errors;
    for (const std::string& fragment : fragments)
      EXPECT_NE(result.errors.find(fragment), std::string::npos)
          << fragment << " is not in: " << result.errors;
  }

  TempDirectory directory_;
};

TEST_F(BadModel, EveryFileIsNamedWithItsPath) {
  replace("generation_config.json", R"({"temperature": 20000})");
  expect_refusal(
      {path("generation_config.json").string() + ": temperature must be from 0 to 10000"});
  replace("generation_config.json", "{}");
  change_config("hidden_size", -1);
  expect_refusal({path("config.json").string() + ": hidden_size"});
  std::filesystem::remove(path("config.json"));
  std::filesystem::create_symlink(demo_model() + "/config.json", path("config.json"));
  change_tensors([](auto& tensors) { tensors.erase(tensors.begin()); });
  expect_refusal({directory_.path().string() + ": the checkpoint lacks tensor"});
  replace("tokenizer.json", "{}");
  expect_refusal({path("tokenizer.json").string()});
  // The library's parameters have the names of options here.
  std::filesystem::remove(path("tokenizer.json"));
  expect_refusal({path("tokenizer.json").string() + " is missing", "(--skip-tokenizer-init)"});
}

TEST_F(BadModel, IsSoundBeforeItIsBroken) {
  EXPECT_EQ(
      nanovllm_program({"generate", directory_.path(), "-q", "--prompt", "x", "--max-tokens", "1"})
          .exit_code,
      0);
}

TEST(NoModel, DirectoryIsNamed) {
  const auto result = nanovllm_program({"generate", "/no/such/model", "--prompt", "x"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.errors.find("/no/such/model"), std::string::npos) << result.errors;
}

TEST_F(BadModel, NoConfig) {
  std::filesystem::remove(path("config.json"));
  expect_refusal({"config.json"});
}

TEST_F(BadModel, UnknownArchitectureIsRefusedByName) {
  change_config("architectures", {"FalconForCausalLM"});
  expect_refusal({"FalconForCausalLM", "Qwen3ForCausalLM"});
}

TEST_F(BadModel, BadJsonHasAPlace) {
  replace("config.json", R"({"architectures": ["Qwen3ForCausalLM"],, })");
  expect_refusal({"config.json", "byte"});
}

TEST_F(BadModel, UnknownRopeTypeIsRefusedByName) {
  change_config("rope_scaling", {{"rope_type", "helical"}, {"factor", 2.0}});
  expect_refusal({"config.json", "helical"});
}

TEST_F(BadModel, MissingTensor) {
  change_tensors([](auto& tensors) {
    std::erase_if(tensors, [](auto& t) { return t.name == "model.layers.3.mlp.up_proj.weight"; });
  });
  expect_refusal({"model.layers.3.mlp.up_proj.weight"});
}

TEST_F(BadModel, ExtraTensor) {
  change_tensors([](auto& tensors) {
    tensors.push_back({"model.layers.0.adapter.weight", "BF16", std::string(8, '\0'), {4}});
  });
  expect_refusal({"model.layers.0.adapter.weight"});
}

TEST_F(BadModel, DuplicateTensor) {
  std::string file = file_text(path("model.safetensors"));
  // Two keys of one name: the second layer's norm takes the name of the first's.
  const std::string other = "model.layers.0.input_layernorm.weight";
  const std::string second = "model.layers.1.input_layernorm.weight";
  file.replace(file.find(second), second.size(), other);
  replace("model.safetensors", file);
  expect_refusal({"model.layers.0.input_layernorm.weight"});
}

TEST_F(BadModel, TruncatedFile) {
  const std::string file = file_text(path("model.safetensors"));
  replace("model.safetensors", file.substr(0, file.size() - 1000));
  expect_refusal({"model.safetensors"});
}

// Whether it is cut in time is chance: early, as the file is opened, it is a truncated one.
TEST_F(BadModel, AFileThatIsCutWhileItIsReadIsALine) {
  const std::string whole = file_text(path("model.safetensors"));
  const std::string script =
      "\"$0\" generate \"$1\" --device cpu -q --prompt x & "
      "until grep -q safetensors /proc/$!/maps || ! kill -0 $!; do :; done; "
      "truncate -s 1000000 \"$1/model.safetensors\"; wait $!";
  for (int i = 0; i < 5; ++i) {
    replace("model.safetensors", whole);
    const auto result = run_process(
        "/bin/sh", {"-c", script, NANOVLLM_BINARY_DIR "/bin/nanovllm", directory_.path()});
    if (result.exit_code == 0) continue;
    EXPECT_EQ(result.exit_code, 3) << result.errors;
    EXPECT_EQ(result.errors.find("error: "), 0u) << result.errors;
    return;
  }
  GTEST_SKIP() << "the weights were always read before their file was cut";
}

TEST_F(BadModel, WrongShape) {
  change_tensors([](auto& tensors) {
    for (auto& t : tensors)
      if (t.name == "model.layers.2.self_attn.q_proj.weight")
        t.shape = {t.shape[0] * 2, t.shape[1] / 2};
  });
  expect_refusal({"model.layers.2.self_attn.q_proj.weight"});
}

TEST_F(BadModel, WrongType) {
  change_tensors([](auto& tensors) {
    for (auto& t : tensors)
      if (t.name == "model.norm.weight") t.dtype = "I16";
  });
  expect_refusal({"model.norm.weight", "I16"});
}

TEST_F(BadModel, MissingShard) {
  Json map;
  for (const auto& t : read_tensors(path("model.safetensors")))
    map[t.name] = "model-00001-of-00002.safetensors";
  map["model.norm.weight"] = "model-00002-of-00002.safetensors";
  change_tensors([](auto& tensors) {
    std::erase_if(tensors, [](auto& t) { return t.name == "model.norm.weight"; });
  });
  std::filesystem::rename(path("model.safetensors"), path("model-00001-of-00002.safetensors"));
  write_file(path("model.safetensors.index.json"), Json({{"weight_map", map}}).dump());
  expect_refusal({"model-00002-of-00002.safetensors"});
}

TEST_F(BadModel, NoWeights) {
  std::filesystem::remove(path("model.safetensors"));
  expect_refusal({"safetensors"});
}

TEST_F(BadModel, NoTokenizer) {
  std::filesystem::remove(path("tokenizer.json"));
  expect_refusal({"/tokenizer.json is missing", "--skip-tokenizer-init"});
  write_file(path("tokenizer.model"), "x");
  expect_refusal({"/tokenizer.json is missing", "tokenizer.model is not read", "save_pretrained"});
}

TEST_F(BadModel, UnknownTokenizer) {
  Json tokenizer = Json::parse(file_text(path("tokenizer.json")));
  tokenizer["model"] = {{"type", "Unigram"}, {"vocab", Json::array()}};
  replace("tokenizer.json", tokenizer.dump());
  expect_refusal({"tokenizer.json", "Unigram"});
}

TEST_F(BadModel, TokensBeyondTheVocabulary) {
  const Json tokenizer = Json::parse(file_text(path("tokenizer.json")));
  Json more = tokenizer;
  more["model"]["vocab"]["beyond"] = 1536;
  replace("tokenizer.json", more.dump());
  expect_refusal({"tokenizer.json has the id 1536", "vocab_size is 1536"});
  // One that was added for training alone, as many fine-tuned models have it, loads.
  more = tokenizer;
  Json token = tokenizer["added_tokens"][0];
  token["id"] = 1536;
  token["content"] = "<|pad|>";
  more["added_tokens"].push_back(token);
  replace("tokenizer.json", more.dump());
  const auto result =
      nanovllm_program({"generate", directory_.path(), "--prompt", "<|pad|>", "--max-tokens", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(result.errors.find("token \"<|pad|>\" is text like any other"), std::string::npos)
      << result.errors;
}

TEST_F(BadModel, ANotANumberInTheLogitsFailsThatRequestAlone) {
  // The embedding row of one token becomes NaN: with tied weights its logit, too, so every request
  // meets it.
  change_tensors([](auto& tensors) {
    for (auto& t : tensors)
      if (t.name == "model.embed_tokens.weight") {
        const size_t row = t.bytes.size() / static_cast<size_t>(t.shape[0]);
        for (size_t i = 0; i < row; i += 2)
          t.bytes[700 * row + i] = '\xc0', t.bytes[700 * row + i + 1] = '\x7f';
      }
  });
  ProcessOptions options;
  options.input = R"({"prompt_token_ids": [700]})"
                  "\n";
  const auto result =
      nanovllm_program({"generate", directory_.path(), "-q", "--input", "-"}, options);
  EXPECT_EQ(result.exit_code, 1) << result.errors;
  EXPECT_EQ(result.lines().at(0)["finish_reason"], "error");
  EXPECT_NE(result.lines().at(0)["error"].get<std::string>().find("not finite"), std::string::npos)
      << result.output;
}

}  // namespace
}  // namespace nanovllm
