// Tensor parallelism: N ranks compute what one computes. Every golden model that N divides, on the
// CPU and on as many GPUs; one rank itself is compared with transformers in huggingface_test.cpp.
#include <cmath>
#include <cstring>
#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "devices.h"
#include "same_output.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

struct Split {
  std::string model;
  Target target;
  int ranks;
};
void PrintTo(const Split& split, std::ostream* out) { *out << split.model << " " << split.ranks; }

/// The rule, said once more: whole heads and equal parts of the MLP; ranks share KV heads where
/// these are fewer. The vocabulary is padded.
bool divides(const Json& config, int n) {
  const auto size = [&](const char* name) { return config[name].get<int>(); };
  const int kv = size("num_key_value_heads");
  const bool experts =
      !config.contains("moe_intermediate_size") || size("moe_intermediate_size") % n == 0;
  return size("num_attention_heads") % n == 0 && size("intermediate_size") % n == 0 && experts &&
         (kv % n == 0 || n % kv == 0);
}

std::vector<Split> splits() {
  std::vector<Split> list;
  for (const auto& entry : std::filesystem::directory_iterator(goldens()))
    for (const int n : {2, 3, 4, 8})
      if (divides(read_json_file(entry.path() / "config.json"), n))
        for (const Target& target : kTargets)
          list.push_back({entry.path().filename().string(), target, n});
  std::sort(list.begin(), list.end(), [](const Split& a, const Split& b) {
    return std::tie(a.model, a.ranks) < std::tie(b.model, b.ranks);
  });
  return list;
}

std::string split_name(const testing::TestParamInfo<Split>& info) {
  std::string name =
      fmt::format("{}_{}_ranks_{}", info.param.model, info.param.ranks, info.param.target.name);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

class Parallel : public testing::TestWithParam<Split> {
 protected:
  void SetUp() override {
    directory_ = (goldens() / GetParam().model).string();
    SKIP_WITHOUT(GetParam().target, directory_);
    golden_ = read_json_file(directory_ + "/golden.json");
    const bool f32 = std::string(GetParam().target.dtype) == "f32";
    tolerance_ = f32 ? 1e-4 : 2 * golden_["bf16_error"].get<double>();
    for (const Json& p : golden_["prompts"])
      prompts_.emplace_back(p["ids"].get<std::vector<int32_t>>());
  }
  /// An engine of `ranks` ranks; nothing where there are fewer GPUs. Ranks quantise the columns
  /// that they have of a row: as far apart as that takes them from plain activations.
  std::optional<LLM> make(int ranks) {
    EngineConfig config = config_for(GetParam().target);
    config.tensor_parallel_size = ranks;
    try {
      std::optional<LLM> llm(std::in_place, directory_, config);
      if (quantises_rows(llm->info()))
        tolerance_ = 2 * golden_["quantised_rows"][0]["error"].get<double>();
      return llm;
    } catch (const Error& error) {
      if (std::string(error.what()).find("does not exist") == std::string::npos) throw;
      return std::nullopt;
    }
  }
  static double largest_difference(const PositionLogprobs& a, const PositionLogprobs& b) {
    EXPECT_EQ(a.size(), b.size());
    double largest = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
      largest = std::max(largest, std::abs(double{a[i].logprob} - double{b[i].logprob}));
    return largest;
  }

  std::string directory_;
  Json golden_;
  double tolerance_ = 0;
  std::vector<Prompt> prompts_;
};

TEST_P(Parallel, PromptLogprobsAreThoseOfOneRank) {
  auto many = make(GetParam().ranks);
  if (!many) GTEST_SKIP() << "fewer than " << GetParam().ranks << " GPUs here";
  const SamplingParams params{.temperature = 0, .max_tokens = 1, .prompt_logprobs = 20};
  const auto expected = make(1)->generate(prompts_, params), got = many->generate(prompts_, params);
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].outputs[0].finish_reason, FinishReason::length) << got[i].error;
    ASSERT_EQ(got[i].prompt_logprobs.size(), expected[i].prompt_logprobs.size());
    for (size_t p = 1; p < got[i].prompt_logprobs.size(); ++p) {
      EXPECT_LE(largest_difference(got[i].prompt_logprobs[p], expected[i].prompt_logprobs[p]),
                tolerance_)
          << "prompt " << i << " position " << p;
    }
  }
}

TEST_P(Parallel, GreedyTokensAreThoseOfOneRank) {
  auto many = make(GetParam().ranks);
  if (!many) GTEST_SKIP() << "fewer than " << GetParam().ranks << " GPUs here";
  const SamplingParams params{.temperature = 0, .max_tokens = 64, .logprobs = 2};
  const auto expected = make(1)->generate(prompts_, params), got = many->generate(prompts_, params);
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].outputs[0].finish_reason, FinishReason::length) << got[i].error;
    for (size_t t = 0; t < got[i].outputs[0].token_ids.size(); ++t) {
      if (got[i].outputs[0].token_ids[t] != expected[i].outputs[0].token_ids[t]) {
        const PositionLogprobs& best = expected[i].outputs[0].logprobs[t];
        EXPECT_LT(best[1].logprob - best[2].logprob, 2 * tolerance_)
            << "prompt " << i << " token " << t;
        break;  // from here on it is another text
      }
      EXPECT_LE(largest_difference({got[i].outputs[0].logprobs[t][0]},
                                   {expected[i].outputs[0].logprobs[t][0]}),
                tolerance_);
    }
  }
}

// Run to run, alone or together, in chunks or at once; and two engines side by side.
TEST_P(Parallel, RunsAreBitwiseEqual) {
  auto first = make(GetParam().ranks);
  if (!first) GTEST_SKIP() << "fewer than " << GetParam().ranks << " GPUs here";
  EngineConfig config = config_for(GetParam().target);
  config.tensor_parallel_size = GetParam().ranks;
  config.max_num_batched_tokens = 48;
  config.block_size = 16;
  LLM second(directory_, config);
  SamplingParams params{.temperature = 0.8, .top_p = 0.9, .max_tokens = 24, .logprobs = 3};
  params.seed = 7;
  for (const Prompt& prompt : prompts_) second.add_request(prompt, params);
  std::vector<RequestOutput> together(prompts_.size());
  for (size_t i = 0; i < prompts_.size(); ++i) {
    for (RequestOutput& output : second.step())
      if (output.finished) together[static_cast<size_t>(output.request_id)] = std::move(output);
    const RequestOutput alone = first->generate({prompts_[i]}, params).front();
    while (!together[i].finished)
      for (RequestOutput& output : second.step())
        if (output.finished) together[static_cast<size_t>(output.request_id)] = std::move(output);
    ASSERT_EQ(alone.outputs[0].token_ids, together[i].outputs[0].token_ids) << "prompt " << i;
    for (size_t t = 0; t < alone.outputs[0].logprobs.size(); ++t)
      for (size_t j = 0; j < alone.outputs[0].logprobs[t].size(); ++j)
        EXPECT_EQ(std::memcmp(&alone.outputs[0].logprobs[t][j].logprob,
                              &together[i].outputs[0].logprobs[t][j].logprob, sizeof(float)),
                  0)
            << "prompt " << i << " token " << t;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Parallel, testing::ValuesIn(splits()), split_name);

/// A dense model whose row-parallel weights are in halves on one rank, of random weights: a wide
/// one, a narrow one; plain, of packed weights, and of E4M3 blocks that meet quantised rows.
class HalvedModel : public testing::TestWithParam<std::tuple<Target, const char*, const char*>> {
 protected:
  void SetUp() override {
    Json config = read_json_file(std::string(NANOVLLM_SOURCE_DIR) + "/bench/configs/" +
                                 std::get<1>(GetParam()) + "/config.json");
    for (const auto& [name, value] :
         std::initializer_list<std::pair<const char*, int>>{{"num_hidden_layers", 2},
                                                            {"num_attention_heads", 8},
                                                            {"num_key_value_heads", 2},
                                                            {"intermediate_size", 1280},
                                                            {"vocab_size", 1001},
                                                            {"bos_token_id", 0},
                                                            {"eos_token_id", 1}})
      config[name] = value;
    std::ofstream(directory_.path() / "config.json") << config.dump();
    SKIP_WITHOUT(std::get<Target>(GetParam()), directory_.path().string());
  }
  /// Prompts of random lengths at once, with every way of sampling; nothing where there are fewer
  /// GPUs than ranks.
  std::vector<RequestOutput> answers(int ranks) {
    EngineConfig config = config_for(std::get<Target>(GetParam()));
    config.load_format = "dummy";
    config.quantization = std::get<2>(GetParam());
    config.tensor_parallel_size = ranks;
    config.max_num_batched_tokens = 1100;  // products of many rows, too
    std::vector<Prompt> prompts;
    std::vector<SamplingParams> params;
    for (int i = 0; i < 12; ++i) {
      std::vector<int32_t> prompt;
      for (int j = 0; j <= 3 * i * i; ++j) prompt.push_back((7 * i + 331 * j) % 1000);
      prompts.emplace_back(std::move(prompt));
      params.push_back({.temperature = i % 2 * 0.8, .max_tokens = 4 + i, .logprobs = 5});
      params.back().prompt_logprobs = i % 3 == 0 ? std::optional<int>(3) : std::nullopt;
      params.back().seed = i;
      params.back().ignore_eos = true;
    }
    try {
      return LLM(directory_.path().string(), config).generate(prompts, params);
    } catch (const Error& error) {
      if (std::string(error.what()).find("does not exist") == std::string::npos) throw;
      return {};
    }
  }
  TempDirectory directory_;
};

// docs/contract.md: two ranks have the halves of k that one has products of.
TEST_P(HalvedModel, TwoRanksGiveTheBytesOfOne) {
  const auto two = answers(2);
  if (two.empty()) GTEST_SKIP() << "fewer than 2 GPUs here";
  const auto one = answers(1);
  ASSERT_EQ(one.size(), two.size());
  for (size_t i = 0; i < one.size(); ++i) {
    ASSERT_EQ(one[i].error, "");
    SCOPED_TRACE(testing::Message() << "request " << i);
    expect_same(one[i], two[i]);
  }
}

std::string name_of_halved(
    const testing::TestParamInfo<std::tuple<Target, const char*, const char*>>& test) {
  const std::string model = std::get<1>(test.param);
  return std::string(std::get<Target>(test.param).name) + (model[6] == '8' ? "Wide" : "Narrow") +
         (model.ends_with("fp8") ? "Fp8" : "") + (std::get<2>(test.param)[0] == 'i' ? "Int4" : "");
}
INSTANTIATE_TEST_SUITE_P(All, HalvedModel,
                         testing::Combine(testing::ValuesIn(kTargets),
                                          testing::Values("qwen3-8b", "qwen3-0.6b"),
                                          testing::Values("auto", "int4")),
                         name_of_halved);
INSTANTIATE_TEST_SUITE_P(OfBlocks, HalvedModel,
                         testing::Combine(testing::ValuesIn(kTargets),
                                          testing::Values("qwen3-8b-fp8", "qwen3-0.6b-fp8"),
                                          testing::Values("auto")),
                         name_of_halved);

TEST(ParallelSizes, WhatCannotBeDividedIsRefusedWithTheNumbersAndTheSizesThatWork) {
  EngineConfig config = config_for(kTargets[0]);
  const auto message = [&](const char* model, int ranks) -> std::string {
    config.tensor_parallel_size = ranks;
    for (const bool load : {false, true}) {
      try {
        if (load)
          LLM((goldens() / model).string(), config);
        else
          inspect((goldens() / model).string(), config);
        ADD_FAILURE() << model << " " << ranks;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
        if (load) return error.what();
      }
    }
    return "";
  };
  EXPECT_EQ(message("qwen3-parallel-tied", 3),
            "tensor_parallel_size 3 does not divide num_attention_heads (8); sizes that work: 1, "
            "2, 4, 8");
  EXPECT_EQ(message("llama-untied-biases", 2),
            "tensor_parallel_size 2 does not divide num_attention_heads (3); sizes that work: 1");
}

TEST(ParallelSizes, InspectTellsEveryRanksShare) {
  EngineConfig config = config_for(kTargets[0]);
  const std::string model = (goldens() / "llama-parallel-biases").string();
  const EngineInfo one = inspect(model, config);
  config.tensor_parallel_size = 4;
  const EngineInfo four = inspect(model, config);
  ASSERT_EQ(one.ranks.size(), 1u);
  ASSERT_EQ(four.ranks.size(), 4u);
  EXPECT_EQ(four.num_parameters, one.num_parameters);
  int64_t weights = 0;
  for (const RankInfo& rank : four.ranks) {
    EXPECT_LT(rank.weight_bytes, one.weight_bytes / 2);
    weights += rank.weight_bytes;
  }
  EXPECT_EQ(weights, four.weight_bytes);
  EXPECT_GT(four.ranks[0].weight_bytes, four.ranks[1].weight_bytes) << "rank 0 has the biases";
  LLM llm(model, config);
  ASSERT_EQ(llm.info().ranks.size(), 4u);
  EXPECT_EQ(llm.info().weight_bytes, four.weight_bytes);
}

}  // namespace
}  // namespace nanovllm
