#include "engine/request_checks.h"

#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "nanovllm/error.h"

namespace nanovllm {
namespace {

constexpr int64_t kVocab = 100;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN(),
                 kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min(),
                  kMax = std::numeric_limits<int64_t>::max();

/// A change to the defaults, and what the message must name.
struct Row {
  std::function<void(SamplingParams&)> change;
  std::vector<std::string> named;
};

void expect_problem(const std::optional<std::string>& problem,
                    const std::vector<std::string>& named) {
  ASSERT_TRUE(problem) << named.front();
  EXPECT_EQ(problem->find('\n'), std::string::npos);
  for (const std::string& fragment : named)
    EXPECT_NE(problem->find(fragment), std::string::npos) << fragment << ": " << *problem;
}

TEST(RequestChecks, DefaultsAndLimitsAreAcceptable) {
  const std::vector<std::function<void(SamplingParams&)>> good = {
      [](auto&) {},
      [](auto& p) { p.temperature = 0; },
      [](auto& p) { p.temperature = -0.0; },
      [](auto& p) { p.temperature = 1e-300; },
      [](auto& p) { p.top_p = 1e-300; },
      [](auto& p) { p.top_k = -1; },
      [](auto& p) { p.top_k = kMax; },
      [](auto& p) { p.min_p = 1; },
      [](auto& p) { p.max_tokens = kMax; },
      [](auto& p) { p.min_tokens = p.max_tokens; },
      [](auto& p) {
        p.stop = {"\n", "caf\xc3\xa9", std::string(1, '\0')};
      },
      [](auto& p) { p.stop = std::vector<std::string>(64, std::string(1024, 'x')); },
      [](auto& p) { p.stop_token_ids = std::vector<int64_t>(128, kVocab - 1); },
      [](auto& p) {
        p.logprobs = 0;
        p.prompt_logprobs = 20;
      },
      [](auto& p) { p.seed = kMin; },
      [](auto& p) {
        p.presence_penalty = -2;
        p.frequency_penalty = 2;
        p.repetition_penalty = 1e-4;
        for (int64_t id = 0; id < kVocab; ++id) p.logit_bias[id] = id % 2 ? 100 : -100;
      },
      [](auto& p) { p.bad_words = std::vector<std::string>(128, std::string(1024, 'x')); },
  };
  for (size_t i = 0; i < good.size(); ++i) {
    SamplingParams params;
    good[i](params);
    const auto problem = problem_with(params, kVocab);
    EXPECT_FALSE(problem) << i << ": " << *problem;
  }
}

TEST(RequestChecks, EveryParameterOutOfRangeIsNamedWithItsValue) {
  std::vector<Row> rows;
  const auto add = [&](std::function<void(SamplingParams&)> change,
                       std::vector<std::string> named) {
    rows.push_back({std::move(change), std::move(named)});
  };
  for (const double bad : {-1e-9, -1.0, kNan, kInfinity, -kInfinity, 1e5})
    add([=](auto& p) { p.temperature = bad; }, {"temperature is"});
  for (const double bad : {0.0, -0.1, 1.0001, kNan, kInfinity})
    add([=](auto& p) { p.top_p = bad; }, {"top_p is"});
  for (const int64_t bad : {int64_t{-2}, kMin})
    add([=](auto& p) { p.top_k = bad; }, {"top_k is", std::to_string(bad)});
  for (const double bad : {-0.1, 1.0001, kNan, kInfinity})
    add([=](auto& p) { p.min_p = bad; }, {"min_p is"});
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, kMin})
    add([=](auto& p) { p.max_tokens = bad; }, {"max_tokens is", std::to_string(bad)});
  for (const int64_t bad : {int64_t{-1}, int64_t{17}, kMax})
    add([=](auto& p) { p.min_tokens = bad; }, {"min_tokens is", std::to_string(bad), "16"});
  for (const double bad : {-2.01, 2.01, kNan, kInfinity}) {
    add([=](auto& p) { p.presence_penalty = bad; }, {"presence_penalty", "from -2 to 2"});
    add([=](auto& p) { p.frequency_penalty = bad; }, {"frequency_penalty", "from -2 to 2"});
  }
  for (const double bad : {-1.0, 0.0, 1e-5, 1e5, kNan})
    add([=](auto& p) { p.repetition_penalty = bad; }, {"repetition_penalty", "from 0.0001"});
  for (const int64_t bad : {int64_t{-1}, kVocab, kMax})
    add([=](auto& p) { p.logit_bias = {{1, 1}, {bad, 1}}; }, {"logit_bias", std::to_string(bad)});
  for (const double bad : {-100.5, 101.0, kNan})
    add([=](auto& p) { p.logit_bias[5] = bad; }, {"logit_bias of 5", "from -100 to 100"});
  add(
      [](auto& p) {
        for (int64_t id = 0; id < 1025; ++id) p.logit_bias[id] = 1;
      },
      {"logit_bias", "1025", "1024"});
  for (const int64_t bad : {int64_t{-1}, kVocab, kMax})
    add(
        [=](auto& p) {
          p.allowed_token_ids = {1, bad};
        },
        {"allowed_token_ids", std::to_string(bad)});
  add([](auto& p) { p.bad_words = {"ok", ""}; }, {"bad_words has", "0 bytes"});
  add([](auto& p) { p.bad_words = std::vector<std::string>(129, "x"); }, {"bad_words", "129"});
  add([](auto& p) { p.bad_words = {"\xff"}; }, {"bad_words", "UTF-8"});
  add([](auto& p) { p.stop = {"ok", ""}; }, {"stop has", "0 bytes"});
  add([](auto& p) { p.stop = {std::string(1025, 'x')}; }, {"stop has", "1025"});
  add([](auto& p) { p.stop = std::vector<std::string>(65, "x"); }, {"stop has", "65", "64"});
  for (const char* bad : {"\xc3", "a\xff", "\xa9", "\xed\xa0\x80", "\xc0\xaf"})
    add([=](auto& p) { p.stop = {bad}; }, {"stop", "UTF-8"});
  add(
      [](auto& p) {
        p.stop = {"x"};
        p.detokenize = false;
      },
      {"stop", "detokenize"});
  for (const int64_t bad : {int64_t{-1}, kVocab, kMax, int64_t{1} << 32})
    add(
        [=](auto& p) {
          p.stop_token_ids = {0, bad};
        },
        {"stop_token_ids has", std::to_string(bad), "99"});
  add([](auto& p) { p.stop_token_ids = std::vector<int64_t>(129, 1); },
      {"stop_token_ids has", "129", "128"});
  for (const int bad : {-1, 21, std::numeric_limits<int>::max()}) {
    add([=](auto& p) { p.logprobs = bad; }, {"logprobs is", std::to_string(bad), "20"});
    add([=](auto& p) { p.prompt_logprobs = bad; },
        {"prompt_logprobs is", std::to_string(bad), "20"});
  }
  for (const Row& row : rows) {
    SamplingParams params;
    row.change(params);
    expect_problem(problem_with(params, kVocab), row.named);
  }
}

TEST(RequestChecks, LogprobsNeverExceedTheVocabulary) {
  SamplingParams params;
  params.logprobs = 8;
  EXPECT_TRUE(problem_with(params, 7));
  EXPECT_FALSE(problem_with(params, 8));
}

TEST(RequestChecks, APromptHasTokensAndAllOfTheVocabulary) {
  const auto problem = [](std::vector<int32_t> ids) {
    return problem_with(std::span<const int32_t>(ids), kVocab);
  };
  EXPECT_FALSE(problem({0, 99}));
  expect_problem(problem({}), {"prompt is empty"});
  expect_problem(problem({5, -1}), {"prompt_token_ids[1] is -1", "99"});
  expect_problem(problem({5, 6, 100}), {"prompt_token_ids[2] is 100", "99"});
}

TEST(RequestChecks, EveryEngineOptionOutOfRangeIsNamed) {
  EXPECT_NO_THROW(check_config({}));
  const std::vector<std::pair<std::function<void(EngineConfig&)>, std::string>> rows = {
      {[](auto& c) { c.max_model_len = -2; }, "max_model_len is -2"},
      {[](auto& c) { c.max_num_seqs = 0; }, "max_num_seqs is 0"},
      {[](auto& c) { c.max_num_seqs = 65537; }, "max_num_seqs is 65537"},
      {[](auto& c) { c.max_num_batched_tokens = -5; }, "max_num_batched_tokens is -5"},
      {[](auto& c) { c.max_num_batched_tokens = kMax; }, "max_num_batched_tokens is"},
      {[](auto& c) { c.gpu_memory_utilization = 0; }, "gpu_memory_utilization is 0"},
      {[](auto& c) { c.gpu_memory_utilization = 1.01; }, "gpu_memory_utilization is 1.01"},
      {[](auto& c) { c.gpu_memory_utilization = kNan; }, "gpu_memory_utilization is nan"},
      {[](auto& c) { c.num_gpu_blocks_override = -1; }, "num_gpu_blocks_override is -1"},
      {[](auto& c) { c.num_gpu_blocks_override = kMax; }, "num_gpu_blocks_override is"},
      {[](auto& c) { c.cpu_kvcache_bytes = -1; }, "cpu_kvcache_bytes is -1"},
      {[](auto& c) { c.block_size = 4; }, "block_size is 4"},
      {[](auto& c) { c.block_size = 24; }, "block_size is 24"},
      {[](auto& c) { c.block_size = 512; }, "block_size is 512"},
      {[](auto& c) { c.block_size = std::numeric_limits<int>::min(); }, "block_size is"},
      {[](auto& c) { c.tensor_parallel_size = 0; }, "tensor_parallel_size is 0"},
      {[](auto& c) { c.num_threads = -1; }, "num_threads is -1"},
      {[](auto& c) { c.load_format = "gguf"; }, "load_format is gguf"},
      {[](auto& c) { c.kv_events.publisher = "kafka"; }, "publisher is kafka"},
      {[](auto& c) { c.kv_events = {.enable_kv_cache_events = true, .endpoint = ""}; },
       "endpoint is empty"},
      {[](auto& c) { c.kv_events = {.enable_kv_cache_events = true, .max_queue_size = 0}; },
       "max_queue_size is 0"},
      {[](auto& c) {
         c.kv_events.enable_kv_cache_events = true;
         c.enable_prefix_caching = false;
       },
       "without prefix caching"},
  };
  for (const auto& [change, named] : rows) {
    EngineConfig config;
    change(config);
    try {
      check_config(config);
      ADD_FAILURE() << named;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace nanovllm
