// Weights that stay quantised in memory: every quantised checkpoint gives the bytes that it gives
// with its weights dequantised while they are loaded, on one rank and on two.
#include <fstream>

#include "devices.h"
#include "grammar_llm.h"
#include "io/quantised/quantize.h"
#include "io/quantised/quantized_weight.h"
#include "io/safetensors/checkpoint.h"
#include "models/model.h"
#include "same_output.h"
#include "unit/io/tensor_file.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

class QuantisedWeights : public testing::TestWithParam<std::tuple<std::string, Target>> {};

std::vector<std::string> quantised_goldens() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(goldens()))
    if (const std::string name = entry.path().filename(); name.starts_with("quantised-"))
      names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

struct Requests {
  std::vector<Prompt> prompts;
  std::vector<SamplingParams> params;
};

Requests requests() {
  SamplingParams params;
  params.max_tokens = 24;
  params.temperature = 0;
  params.logprobs = 3;
  params.prompt_logprobs = 1;
  std::vector<Prompt> prompts;
  for (const int length : {1, 3, 40}) {  // products of few rows and of many
    std::vector<int32_t> tokens;
    for (int i = 0; i < length; ++i) tokens.push_back((i * 29 + length) % 60);
    prompts.emplace_back(tokens);
  }
  return {prompts, std::vector<SamplingParams>(prompts.size(), params)};
}

TEST_P(QuantisedWeights, GiveTheBytesOfThePlainNumbersThatTheyStandFor) {
  const auto& [name, target] = GetParam();
  const std::string directory = (goldens() / name).string();
  SKIP_WITHOUT(target, directory);
  const auto [prompts, all] = requests();
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    EngineConfig config = config_for(target);
    config.tensor_parallel_size = ranks;
    if (ranks == 2 && std::string(target.device) == "cuda") continue;  // perhaps there is one
    // Products that quantise rows mean something else.
    GrammarLLM kept(directory, config, keeping<beside_plain_rows>),
        plain(directory, config, keeping<none>);
    EXPECT_FALSE(quantises_rows(kept.info()));
    const auto got = kept.generate(prompts, all), want = plain.generate(prompts, all);
    for (size_t i = 0; i < prompts.size(); ++i) expect_same(want[i], got[i]);
    const int64_t bytes = kept.info().weight_bytes, plain_bytes = plain.info().weight_bytes;
    EXPECT_LE(bytes, plain_bytes);
    if (name.ends_with("ordered"))  // columns that are not in the order of their groups
      EXPECT_EQ(bytes, plain_bytes);
    else if (bytes == plain_bytes)
      GTEST_SKIP() << kept.info().device << " keeps no quantised weights";
  }
}

/// Writes the quantised checkpoint `from` with the plain numbers that its weights stand for.
void write_plain(const std::string& from, const std::filesystem::path& to) {
  const ModelConfig model = load_model_config(from, config_defaults);
  const Checkpoint checkpoint(from);
  std::vector<StoredBytes> tensors;
  for (const std::string& name : checkpoint.names()) {
    const StoredTensor& tensor = *checkpoint.find(name);
    const std::string module = name.substr(0, name.rfind('.'));
    const bool is_packed = name.ends_with(".weight_packed");
    if (is_packed || tensor.dtype == "F8_E4M3") {
      const int64_t n = tensor.shape[0], k = tensor.shape[1] * (is_packed ? 8 : 1);
      const QuantizedWeight weight(checkpoint, module, *model.quantization->find(module), n, k);
      std::string bytes(static_cast<size_t>(n * k) * 2, '\0');
      weight.dequantise(reinterpret_cast<std::byte*>(bytes.data()), DType::bf16, {0, n, 0, k});
      tensors.push_back({module + ".weight", "BF16", std::move(bytes), {n, k}});
    } else if (name.ends_with(".weight")) {
      tensors.push_back(
          {name, tensor.dtype,
           std::string(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size()),
           tensor.shape});
    }
  }
  write_tensors(to / "model.safetensors", tensors);
  Json config = read_json_file(from + "/config.json");
  config.erase("quantization_config");
  std::ofstream(to / "config.json") << config.dump();
}

class QuantisedHere : public testing::TestWithParam<std::tuple<std::string, Target>> {};

// Quantised while it is loaded, kept so or not, and read from the files of `nanovllm quantize`: a
// plain checkpoint gives the same bytes. Only what is kept quantises activations, which fp8 and
// int8 ask for.
TEST_P(QuantisedHere, GivesTheSameBytesHoweverItIsKeptAndWhereverFrom) {
  const auto& [name, target] = GetParam();
  std::string directory = (goldens() / name).string();
  SKIP_WITHOUT(target, directory);
  const TempDirectory temp;
  if (name.starts_with("quantised-")) {
    write_plain(directory, temp.path());
    directory = temp.path().string();
  }
  const auto [prompts, all] = requests();
  std::vector<RequestOutput> unquantised;
  {
    GrammarLLM plain(directory, config_for(target));
    unquantised = plain.generate(prompts, all);
  }
  for (const std::string format : {"fp8", "int8", "int4", "w4a8"})
    for (const int ranks : {1, 2}) {
      if (format.find('4') != format.npos && name == "qwen3-moe-parallel")
        continue;  // no group fits
      SCOPED_TRACE(testing::Message() << format << " " << ranks << " ranks");
      EngineConfig config = config_for(target);
      config.tensor_parallel_size = ranks;
      if (ranks == 2 && std::string(target.device) == "cuda") continue;  // perhaps there is one
      const std::string written =
          (temp.path() / (format + "-" + std::to_string(ranks) + "-ranks")).string();
      write_quantised(directory, written, format, config_defaults, {}, 50'000);
      EXPECT_TRUE(std::filesystem::exists(written + "/model.safetensors.index.json"));
      GrammarLLM from_files(written, config);
      config.quantization = format;
      GrammarLLM kept(directory, config);
      config.dequantize = true;
      GrammarLLM plain(directory, config);
      const auto want = kept.generate(prompts, all), got = plain.generate(prompts, all),
                 read = from_files.generate(prompts, all);
      bool differs = false;
      for (size_t i = 0; i < prompts.size(); ++i) {
        if (format == "int4" || std::string(target.dtype) == "f32") expect_same(want[i], got[i]);
        expect_same(want[i], read[i]);
        for (size_t j = 1; j < want[i].prompt_token_ids.size(); ++j)
          differs = differs || want[i].prompt_logprobs[j][0].logprob !=
                                   unquantised[i].prompt_logprobs[j][0].logprob;
      }
      EXPECT_TRUE(differs) << "the format changes nothing";
      EXPECT_EQ(kept.info().weight_bytes, from_files.info().weight_bytes);
      EXPECT_LE(kept.info().weight_bytes, plain.info().weight_bytes);
      EXPECT_NE(kept.info().quantization.find("while loading"), std::string::npos);
    }
}

INSTANTIATE_TEST_SUITE_P(All, QuantisedHere,
                         testing::Combine(testing::Values("qwen3-tied-gqa", "qwen3-moe-parallel",
                                                          "quantised-packed-32-experts",
                                                          "quantised-fp8-blocks-experts"),
                                          testing::Values(kTargets[0], kTargets[1], kTargets[3])),
                         case_name);

INSTANTIATE_TEST_SUITE_P(All, QuantisedWeights,
                         testing::Combine(testing::ValuesIn(quantised_goldens()),
                                          testing::Values(kTargets[1], kTargets[3])),
                         case_name);

}  // namespace
}  // namespace nanovllm
