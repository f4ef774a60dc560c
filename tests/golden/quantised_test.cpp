// Weights that stay quantised in memory: every quantised checkpoint gives the bytes that it gives
// with its weights dequantised while they are loaded, on one rank and on two.
#include "devices.h"
#include "grammar_llm.h"
#include "same_output.h"

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

TEST_P(QuantisedWeights, GiveTheBytesOfThePlainNumbersThatTheyStandFor) {
  const auto& [name, target] = GetParam();
  const std::string directory = (goldens() / name).string();
  SKIP_WITHOUT(target, directory);
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
  const std::vector<SamplingParams> all(prompts.size(), params);
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    EngineConfig config = config_for(target);
    config.tensor_parallel_size = ranks;
    if (ranks == 2 && std::string(target.device) == "cuda") continue;  // perhaps there is one
    GrammarLLM kept(directory, config), plain(directory, config, dequantised);
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

INSTANTIATE_TEST_SUITE_P(All, QuantisedWeights,
                         testing::Combine(testing::ValuesIn(quantised_goldens()),
                                          testing::Values(kTargets[1], kTargets[3])),
                         case_name);

}  // namespace
}  // namespace nanovllm
