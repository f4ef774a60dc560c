// Logits against Hugging Face transformers: tests/data/goldens, made by tools/make_goldens.py; of
// quantised checkpoints against float64 computation, by tools/make_quantised.py.
//
// f32: every log probability within 1e-4 and the greedy tokens equal. bf16: teacher-forced, errors
// within twice what transformers' own bf16 run shows on the same prompts; another likeliest token
// only where transformers' top-2 gap is below that bound. Where a device quantises activations,
// quantised checkpoints are compared within twice the error of numpy's run that does so, and
// closely with that run. Keys and values of FP8 are part of the computation (tools/make_fp8_kv.py).

#include <cmath>

#include <nlohmann/json.hpp>

#include "devices.h"

namespace nanovllm {
namespace {

using Case = std::tuple<std::string, Target>;

class HuggingFace : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const auto& [name, target] = GetParam();
    directory_ = (goldens() / name).string();
    SKIP_WITHOUT(target, directory_);
    golden_ = read_json_file(directory_ + "/golden.json");
    f32_ = std::string(target.dtype) == "f32";
    tolerance_ = f32_ ? 1e-4 : 2 * golden_["bf16_error"].get<double>();
    llm_.emplace(directory_, config_for(target));
    if (llm_->info().kv_cache_dtype != golden_.value("kv_cache_dtype", target.dtype))
      GTEST_SKIP() << "keys and values are " << llm_->info().kv_cache_dtype << " here";
    if (quantises_rows(llm_->info()))
      tolerance_ = 2 * golden_["quantised_rows"][0]["error"].get<double>();
  }

  std::vector<Prompt> prompts() const {
    std::vector<Prompt> list;
    for (const Json& p : golden_["prompts"])
      list.emplace_back(p["ids"].get<std::vector<int32_t>>());
    return list;
  }

  std::string directory_;
  Json golden_;
  bool f32_ = false;
  double tolerance_ = 0;
  std::optional<LLM> llm_;
};

TEST_P(HuggingFace, PromptLogprobsAgree) {
  const auto outputs = llm_->generate(
      prompts(), SamplingParams{.temperature = 0, .max_tokens = 1, .prompt_logprobs = 20});
  for (size_t i = 0; i < outputs.size(); ++i) {
    ASSERT_EQ(outputs[i].outputs[0].finish_reason, FinishReason::length) << outputs[i].error;
    const Json& expected = golden_["prompts"][i];
    ASSERT_EQ(outputs[i].prompt_logprobs.size(), expected["ids"].size());
    EXPECT_TRUE(outputs[i].prompt_logprobs[0].empty());
    for (size_t p = 0; p + 1 < expected["ids"].size(); ++p) {
      const PositionLogprobs& got = outputs[i].prompt_logprobs[p + 1];
      const Json& want = expected["logprobs"][p];
      ASSERT_EQ(got.size(), 21u);
      EXPECT_EQ(got[0].token_id, want[0][0].get<int32_t>());
      EXPECT_NEAR(got[0].logprob, want[0][1].get<double>(), tolerance_)
          << "prompt " << i << " position " << p;
      if (expected["gap"][p].get<double>() > 2 * tolerance_) {
        EXPECT_EQ(got[1].token_id, want[1][0].get<int32_t>());
      }
      for (size_t rank = 1; rank < want.size(); ++rank) {
        EXPECT_NEAR(got[rank].logprob, want[rank][1].get<double>(), tolerance_) << "rank " << rank;
        EXPECT_EQ(got[rank].rank, static_cast<int32_t>(rank));
      }
    }
  }
}

TEST_P(HuggingFace, GreedyTokensAgree) {
  const auto outputs =
      llm_->generate(prompts(), SamplingParams{.temperature = 0, .max_tokens = 64, .logprobs = 1});
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Json& expected = golden_["prompts"][i];
    ASSERT_EQ(outputs[i].outputs[0].token_ids.size(), expected["greedy"].size());
    for (size_t t = 0; t < outputs[i].outputs[0].token_ids.size(); ++t) {
      const double gap = expected["greedy_gap"][t].get<double>();
      if (outputs[i].outputs[0].token_ids[t] != expected["greedy"][t].get<int32_t>()) {
        EXPECT_LT(gap, 2 * tolerance_) << "prompt " << i << " token " << t;
        break;  // from here on it is another text
      }
      EXPECT_NEAR(outputs[i].outputs[0].logprobs[t][0].logprob,
                  expected["greedy_logprobs"][t].get<double>(), tolerance_);
    }
  }
}

// Log probabilities behind each token of the vocabulary. A number that f32's errors round to
// another bf16 changes all that comes behind it, so most rows agree to a few hundredths, and the
// best tenth of them more closely than any row of a run that leaves activations as they are.
TEST_P(HuggingFace, QuantisedActivationsAgree) {
  const auto& [name, target] = GetParam();
  const Json runs = golden_.value("quantised_rows", Json::array());
  if (!quantises_rows(llm_->info())) {
    EXPECT_TRUE(runs.empty() || f32_ || std::string(target.device) != "cpu") << "a CPU does";
    GTEST_SKIP() << "activations stay as they are";
  }
  for (int ranks = 1; ranks <= 2; ++ranks) {
    if (ranks > 1 && std::string(target.device) != "cpu") break;  // perhaps there is one GPU
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    EngineConfig config = config_for(target);
    config.tensor_parallel_size = ranks;
    LLM llm(directory_, config);
    const Json& run = runs[static_cast<size_t>(ranks - 1)];
    std::vector<Prompt> list;
    const auto vocab = static_cast<int32_t>(run["logprobs"].size());
    for (int32_t t = 0; t < vocab; ++t) list.emplace_back(std::vector{t, (t + 1) % vocab});
    const auto outputs =
        llm.generate(list, {.temperature = 0, .max_tokens = 1, .prompt_logprobs = 5});
    std::vector<double> errors;
    for (size_t t = 0; t < outputs.size(); ++t) {
      ASSERT_EQ(outputs[t].prompt_logprobs.size(), 2u) << outputs[t].error;
      const PositionLogprobs& got = outputs[t].prompt_logprobs[1];
      double& worst = errors.emplace_back(0);
      for (size_t i = 0; i < 6; ++i)
        worst = std::max(worst, std::abs(got[i].logprob - run["logprobs"][t][i].get<double>()));
      EXPECT_LE(worst, tolerance_) << "token " << t;
    }
    std::sort(errors.begin(), errors.end());
    const double near = run["near"].get<double>(), other = run["unquantised"].get<double>();
    if (std::string(target.device) == "cpu") {  // a GPU's products have larger errors
      EXPECT_LT(errors[errors.size() / 10], std::sqrt(near * other))
          << "f32's errors give " << near << ", plain activations " << other;
    }
  }
}

std::vector<std::string> models() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(goldens()))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, HuggingFace,
                         testing::Combine(testing::ValuesIn(models()), testing::ValuesIn(kTargets)),
                         case_name);

}  // namespace
}  // namespace nanovllm
