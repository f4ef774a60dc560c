// The models that the public API loads: weights of every stored type, random ones, and what it
// refuses.
#include <cstring>

#include "llm_rig.h"
#include "unit/io/tensor_file.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

TEST(Loading, TheSameWeightsInEveryStoredTypeAreTheSameModel) {
  const auto tensors = read_tensors(goldens() / "qwen3-tied-gqa/model.safetensors");
  const auto stored_as = [&](const std::string& dtype) {
    auto changed = tensors;
    for (StoredBytes& t : changed) {
      if (t.dtype != "BF16") ADD_FAILURE() << t.name << " is " << t.dtype;
      std::string bytes;
      for (size_t i = 0; i < t.bytes.size(); i += 2) {
        uint16_t half;
        std::memcpy(&half, &t.bytes[i], 2);
        const uint32_t bits = uint32_t{half} << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        const auto rounded = static_cast<_Float16>(value);
        bytes.append(dtype == "F32" ? reinterpret_cast<const char*>(&value)
                                    : reinterpret_cast<const char*>(&rounded),
                     dtype == "F32" ? 4 : 2);
      }
      t.bytes = bytes;
      t.dtype = dtype;
    }
    return changed;
  };
  SamplingParams params = greedy(1);
  params.prompt_logprobs = 5;
  const auto expected =
      LLM(golden("qwen3-tied-gqa"), config_for(kCpu)).generate({ids(40)}, params).front();
  TempDirectory directory;
  std::filesystem::copy_file(goldens() / "qwen3-tied-gqa/config.json",
                             directory.path() / "config.json");
  for (const char* dtype : {"F32", "F16"}) {
    write_tensors(directory.path() / "model.safetensors", stored_as(dtype));
    const auto got =
        LLM(directory.path().string(), config_for(kCpu)).generate({ids(40)}, params).front();
    ASSERT_EQ(got.prompt_logprobs.size(), 40u);
    // A bf16 number is an f16 number too, unless it is tiny: below 2^-14 it loses up to 2^-25.
    for (size_t i = 1; i < 40; ++i)
      EXPECT_NEAR(got.prompt_logprobs[i][0].logprob, expected.prompt_logprobs[i][0].logprob, 1e-3);
    if (std::string(dtype) == "F32") {
      EXPECT_TRUE(same_bits(got.prompt_logprobs, expected.prompt_logprobs));
    }
  }
}

TEST(Loading, RandomWeightsNeedNothingButAConfigAndAreTheSeeds) {
  TempDirectory directory;
  std::filesystem::copy_file(goldens() / "qwen3-tied-gqa/config.json",
                             directory.path() / "config.json");
  EngineConfig config = config_for(kCpu);
  config.load_format = "dummy";
  SamplingParams params = greedy(8);
  params.logprobs = 3;
  const auto run = [&](uint64_t seed) {
    config.seed = seed;
    return LLM(directory.path().string(), config).generate({ids(20)}, params).front();
  };
  const auto first = run(1), again = run(1), other = run(2);
  EXPECT_EQ(first.outputs[0].finish_reason, FinishReason::length) << first.error;
  EXPECT_TRUE(same_bits(first.outputs[0].logprobs, again.outputs[0].logprobs));
  EXPECT_FALSE(same_bits(first.outputs[0].logprobs, other.outputs[0].logprobs));
}

TEST(Loading, TooManyEosIdsAreRefused) {
  TempDirectory directory;
  Json config = read_json_file(golden("qwen3-tied-gqa") + "/config.json");
  for (int i = 0; i < 129; ++i) config["eos_token_id"].push_back(i);
  std::ofstream(directory.path() / "config.json") << config.dump();
  EngineConfig options = config_for(kCpu);
  options.load_format = "dummy";
  try {
    LLM llm(directory.path().string(), options);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::model);
    expect_contains(error.what(), {"eos_token_id", "more than 128"});
  }
}

}  // namespace
}  // namespace nanovllm
