// Penalties, biases and words against Hugging Face's logits processors:
// tests/data/adjusted_answers.json, made by tools/make_adjusted_answers.py.
#include <nlohmann/json.hpp>

#include "io/request_json.h"
#include "llm_rig.h"

namespace nanovllm {
namespace {

class AdjustedAnswers : public testing::TestWithParam<Target> {};

TEST_P(AdjustedAnswers, AreThoseOfHuggingFacesProcessors) {
  SKIP_WITHOUT(GetParam(), demo());
  const Json cases =
      read_json_file(std::string(NANOVLLM_SOURCE_DIR) + "/tests/data/adjusted_answers.json");
  std::vector<Prompt> prompts;
  std::vector<SamplingParams> params;
  for (const Json& one : cases) {
    prompts.emplace_back(one["prompt"].get<std::string>());
    params.push_back(greedy(std::ssize(one["tokens"])));
    params.back().ignore_eos = true;
    read_sampling_params(JsonObject(one["params"], "params", ErrorKind::invalid_argument),
                         params.back());
  }
  EngineConfig config = config_for(GetParam());
  config.skip_tokenizer_init = false;
  LLM llm(demo(), config);
  const auto outputs = llm.generate(prompts, params);
  size_t compared = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& got = outputs[i].outputs[0].token_ids;
    ASSERT_EQ(got.size(), cases[i]["tokens"].size()) << outputs[i].error;
    for (size_t t = 0; t < got.size(); ++t, ++compared) {
      if (got[t] == cases[i]["tokens"][t].get<int32_t>()) continue;
      EXPECT_LT(cases[i]["gap"][t].get<double>(), 2e-3)
          << "token " << t << " of " << cases[i]["prompt"] << " with " << cases[i]["params"];
      break;  // from here on it is another text
    }
  }
  EXPECT_GT(compared, 40u * outputs.size());
}

INSTANTIATE_TEST_SUITE_P(All, AdjustedAnswers, testing::Values(kTargets[0], kTargets[2]),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace nanovllm
