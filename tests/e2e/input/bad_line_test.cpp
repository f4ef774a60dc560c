// Requests with something wrong: each fails by itself, with its reason, and the others have their
// answers.
#include <sstream>

#include <gtest/gtest.h>

#include "e2e/process.h"

namespace nanovllm {
namespace {

struct BadLine {
  const char* line;
  const char* fragment;  // of its error
};

TEST(BadRequest, FailsAloneWithAReason) {
  const std::string long_id = R"({"prompt": "x", "id": ")" + std::string(1025, 'x') + "\"}";
  std::vector<BadLine> bad = {
      {R"({"prompt": ""})", "empty"},
      {R"({"prompt_token_ids": []})", "empty"},
      {R"({"prompt_token_ids": [1, 1536]})", "1536"},
      {R"({"prompt_token_ids": [-1]})", "prompt_token_ids"},
      {R"({"prompt_token_ids": [1099511627776]})", "got 1099511627776"},
      {R"({"prompt_token_ids": [1.5]})", "got 1.5"},
      {R"({"prompt_token_ids": [true]})", "got true"},
      {R"({"prompt_token_ids": [[]]})", "got a list of 0"},
      {R"({"prompt_token_ids": "abc"})", "prompt_token_ids must be a list of integers"},
      {R"({"prompt": 5})", "prompt must be a string"},
      {R"({"prompt": "x", "prompt_token_ids": [1]})",
       "only one of prompt, prompt_token_ids and messages"},
      {R"({"id": 1})", "needs one of prompt, prompt_token_ids and messages"},
      {R"({"prompt": "x", "temperature": 0})",
       "unknown field \"temperature\": it belongs in sampling_params"},
      {"[", "JSON over several lines"},
      {R"(  "prompt": "x",)", "JSON over several lines"},
      {"id,prompt", "not text or CSV"},
      {R"([{"prompt": "x"}])", "must be a JSON object, not a list: each line is one request"},
      {R"({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}})",
       "an OpenAI batch line"},
      {R"({"prompt": "x", "sampling_params": {"temprature": 0}})",
       "\"sampling_params.temprature\"; did you mean temperature?"},
      {R"({"prompt": "x", "sampling_params": {"temperature": -0.5}})", "temperature"},
      {R"({"prompt": "x", "sampling_params": {"temperature": 1e400}})", "line"},
      {R"({"prompt": "x", "sampling_params": {"temperature": NaN}})", "line"},
      {R"({"prompt": "x", "sampling_params": {"temperature": "0.7"}})", "got \"0.7\""},
      {R"({"prompt": "x", "sampling_params": {"seed": 1.5}})", "seed must be an integer"},
      {R"({"prompt": "x", "sampling_params": {"seed": 18446744073709551616}})", "seed"},
      {R"({"prompt": "x", "sampling_params": {"top_p": 0}})", "top_p"},
      {R"({"prompt": "x", "sampling_params": {"top_p": 1.5}})", "top_p"},
      {R"({"prompt": "x", "sampling_params": {"top_k": -7}})", "top_k"},
      {R"({"prompt": "x", "sampling_params": {"min_p": 2}})", "min_p"},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": 0}})", "max_tokens"},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": 1.5}})", "max_tokens"},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": 99999999999999999999}})", "max_tokens"},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": "10"}})", "got \"10\""},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": true}})", "got true"},
      {R"({"prompt": "x", "sampling_params": {"max_tokens": 1e30}})", "max_tokens"},
      {R"({"prompt": "x", "sampling_params": {"min_tokens": -1}})", "min_tokens"},
      {R"({"prompt": "x", "sampling_params": {"min_tokens": 9, "max_tokens": 3}})", "min_tokens"},
      {R"({"prompt": "x", "sampling_params": {"logprobs": 21}})", "logprobs"},
      {R"({"prompt": "x", "sampling_params": {"stop": 3}})", "stop"},
      {R"({"prompt": "x", "sampling_params": {"stop": [""]}})", "stop"},
      {R"({"prompt": "x", "sampling_params": {"stop_token_ids": [99999]}})", "stop_token_ids"},
      {R"({"prompt": "x", "sampling_params": {"stop_token_ids": [1536], "min_tokens": 2}})",
       "1536"},
      {R"({"prompt": "x", "sampling_params": {"stop_token_ids": [-1]}})", "got -1"},
      {R"({"prompt": "x", "sampling_params": {"n": 129}})",
       "n is 129: it must be between 1 and 128"},
      {R"({"prompt": "x", "sampling_params": {"n": 0}})",
       "sampling_params.n must be an integer from 1"},
      {R"({"prompt": "x", "sampling_params": {"presence_penalty": 2.01}})",
       "presence_penalty is 2.01: it must be from -2 to 2"},
      {R"({"prompt": "x", "sampling_params": {"frequency_penalty": -2.01}})", "frequency_penalty"},
      {R"({"prompt": "x", "sampling_params": {"repetition_penalty": 0}})", "repetition_penalty"},
      {R"({"prompt": "x", "sampling_params": {"repetition_penalty": -1}})", "repetition_penalty"},
      {R"({"prompt": "x", "sampling_params": {"best_of": 2}})",
       "sampling_params.best_of must be 1"},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"abc": 1}}})",
       "sampling_params.logit_bias must be an object whose names are token ids, got \"abc\""},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"05": 1}}})", "logit_bias"},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"5": null}}})",
       "sampling_params.logit_bias.5 must be a number"},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"-1": 1}}})", "logit_bias has -1"},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"1536": 1}}})",
       "logit_bias has 1536: ids are between 0 and 1535"},
      {R"({"prompt": "x", "sampling_params": {"logit_bias": {"5": 100.5}}})",
       "logit_bias of 5 is 100.5: it must be from -100 to 100"},
      {R"({"prompt": "x", "best_of": 1})", "unknown field \"best_of\""},
      {R"({"prompt": "x", "sampling_params": []})", "sampling_params must be an object"},
      {R"({"messages": [{"content": "x"}]})", "role"},
      {R"({"messages": {"role": "user"}})", "messages must be a list"},
      {R"({"messages": []})", "messages must be a list of at least one message, got a list of 0"},
      {R"({"messages": [{"role": "user", "content": null}]})", "chat_template"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]})",
       "this engine takes text alone"},
      {R"({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"})",
       "unknown field \"chat_template\""},
      {R"({"prompt": "x", "chat_template_kwargs": {}})", "goes with messages only"},
      {R"({"prompt": "x", "id": {}})", "id must be a string or an integer"},
      {long_id.c_str(), "id must have at most 1024 bytes"},
      {R"({"prompt": "x", "prompt": "y"})", "line"},
      {R"([1, 2])", "must be a JSON object"},
      {R"({"prompt": "x")", "line"},
      {R"({"prompt": "x",})", "line"},
      {R"({"prompt": "x"} more)", "line"},
      {R"({"prompt": "x" /* remark */})", "line"},
      {R"({"prompt": "\ud800"})", "surrogate"},
      {"{\"prompt\": \"\xff\xfe\"}", "line"},
  };
  ProcessOptions options;
  const std::string good =
      R"({"id": "good", "prompt": "What is", "sampling_params": {"temperature": 0, "max_tokens": 3}})"
      "\n";
  for (const BadLine& b : bad) options.input += good + b.line + "\n";
  const std::string deep = "{\"prompt\": \"x\", \"unknown\": " + std::string(100'000, '[');
  bad.push_back({deep.c_str(), "nested more than 64 levels"});
  options.input += good + deep + "\n";
  // Longer than the model allows, by its text.
  std::string longest(5000, ' ');
  for (size_t i = 0; i < longest.size(); i += 2) longest[i] = 'x';
  options.input += good + Json({{"prompt", longest}}).dump() + "\n";

  const auto result = nanovllm_program({"generate", demo_model(), "-q", "--input", "-"}, options);
  EXPECT_EQ(result.exit_code, 1);
  const auto lines = result.lines();
  ASSERT_EQ(lines.size(), 2 * (bad.size() + 1));
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i % 2 == 0) {
      EXPECT_EQ(lines[i]["id"], "good");
      EXPECT_EQ(lines[i]["token_ids"], lines[0]["token_ids"]);
      EXPECT_NE(lines[i]["finish_reason"], "error");
      continue;
    }
    const std::string fragment = i / 2 < bad.size() ? bad[i / 2].fragment : "max_model_len";
    EXPECT_EQ(lines[i]["finish_reason"], "error") << lines[i];
    EXPECT_NE(lines[i]["error"].get<std::string>().find(fragment), std::string::npos)
        << fragment << " is not in " << lines[i];
    EXPECT_EQ(lines[i]["error"].get<std::string>().find('\n'), std::string::npos);
  }
}

TEST(BadRequest, OnTheCommandLineIsAnErrorLine) {
  const auto result = nanovllm_program({"generate", demo_model(), "-q", "--prompt", ""});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(result.errors.find("error: "), 0u) << result.errors;
  EXPECT_NE(result.errors.find("empty"), std::string::npos) << result.errors;
  for (const char* style : {"--chat", "--json", "--quiet"}) {  // --quiet: the text alone
    const auto no_text = nanovllm_program({"generate", demo_model(), style, "--prompt", "ab\xff"});
    EXPECT_EQ(no_text.exit_code, 1) << style;
    EXPECT_NE(no_text.errors.find("error: the text is not valid UTF-8 at byte 2"),
              std::string::npos)
        << no_text.errors;
  }
}
}  // namespace
}  // namespace nanovllm
