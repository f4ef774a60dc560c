// nanovllm generate --input: JSON lines in, JSON lines out.
#include <gtest/gtest.h>

#include "e2e/generate.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

TEST(Generate, JsonLinesHaveTheFieldsOfTheContract) {
  const auto lines = answers(
      R"({"id": "a", "prompt": "What is", "sampling_params": {"max_tokens": 4, "temperature": 0, "ignore_eos": true}})"
      "\n");
  ASSERT_EQ(lines.size(), 1u);
  std::vector<std::string> keys;
  for (const auto& [key, value] : lines[0].items()) keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{"id", "prompt_token_ids", "text", "token_ids",
                                            "finish_reason", "metrics"}));
  EXPECT_EQ(lines[0]["id"], "a");
  EXPECT_EQ(lines[0]["token_ids"].size(), 4u);
  EXPECT_EQ(lines[0]["finish_reason"], "length");
  EXPECT_GT(lines[0]["metrics"]["time_to_first_token"].get<double>(), 0);
}

TEST(Generate, AnswersComeInInputOrderAndBadLinesCostTheOthersNothing) {
  // A long one first: it finishes last.
  const std::string requests =
      R"({"prompt": "Tell me", "sampling_params": {"max_tokens": 60, "ignore_eos": true, "temperature": 0}})"
      "\n"
      R"({"id": "bad field", "promt": "x"})"
      "\n"
      "\n"
      R"({"id": "bad json", )"
      "\n"
      R"({"id": "empty", "prompt": ""})"
      "\n"
      R"({"id": 7, "prompt_token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "ignore_eos": true}})"
      "\n"
      R"({"id": "vocabulary", "prompt_token_ids": [99999999]})"
      "\n"
      R"({"id": "last", "prompt": "What", "sampling_params": {"max_tokens": 1}})";
  ProcessOptions options;
  options.input = requests;
  const auto result = nanovllm_program(generate({"--input", "-"}), options);
  EXPECT_EQ(result.exit_code, 1);
  const auto lines = result.lines();
  ASSERT_EQ(lines.size(), 7u) << result.output;
  EXPECT_EQ(lines[0]["id"], 0);
  EXPECT_EQ(lines[0]["token_ids"].size(), 60u);
  EXPECT_EQ(lines[1]["finish_reason"], "error");
  EXPECT_NE(lines[1]["error"].get<std::string>().find(
                "line 2: unknown field \"promt\"; did you mean prompt?"),
            std::string::npos)
      << lines[1];
  EXPECT_TRUE(lines[2]["id"].is_null());
  EXPECT_NE(lines[2]["error"].get<std::string>().find("line 4"), std::string::npos) << lines[2];
  EXPECT_EQ(lines[3]["id"], "empty");
  EXPECT_EQ(lines[3]["finish_reason"], "error");
  EXPECT_EQ(lines[4]["id"], 7);
  EXPECT_EQ(lines[4]["prompt_token_ids"], (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(lines[4]["token_ids"].size(), 2u);
  EXPECT_EQ(lines[5]["finish_reason"], "error");
  EXPECT_EQ(lines[6]["id"], "last");
  EXPECT_NE(result.errors.find("error: 4 of 7 requests failed"), std::string::npos)
      << result.errors;
}

// vLLM's SamplingParams.__post_init__(); llama.cpp's clients send it with every request.
TEST(Generate, ASeedOfMinusOneIsNone) {
  const auto tokens_with = [](const std::string& seed) {
    const std::string line =
        R"({"prompt": "Once", "sampling_params": {"temperature": 5, "max_tokens": 8)" + seed +
        "}}\n";
    const auto lines = answers(line + line);
    EXPECT_EQ(lines.size(), 2u);
    return std::pair(lines.at(0)["token_ids"], lines.at(1)["token_ids"]);
  };
  const auto none = tokens_with(""), minus_one = tokens_with(R"(, "seed": -1)"),
             given = tokens_with(R"(, "seed": -2)");
  EXPECT_NE(none.first, none.second);
  EXPECT_EQ(minus_one, none);
  EXPECT_EQ(given.first, given.second);
}

TEST(Generate, WritesTheSameToAFileAsToStandardOutput) {
  TempDirectory directory;
  const std::string in = directory.path() / "in.jsonl", out = directory.path() / "out.jsonl";
  write_file(in, chat_line("What is 4 + 5?", {{"temperature", 0}, {"max_tokens", 16}}));
  const auto result = nanovllm_program(generate({"--input", in, "--output", out}));
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output, "");
  const auto lines = json_lines(file_text(out));
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0]["text"].get<std::string>().find("9"), std::string::npos) << lines[0];
}

TEST(Generate, SeededRequestGivesTheSameTextAloneAndInABatch) {
  const Json params = {
      {"temperature", 1.3}, {"seed", 42}, {"max_tokens", 40}, {"ignore_eos", true}};
  const std::string wanted = chat_line("Tell me a story.", params, 1);
  std::string batch;
  for (int i = 10; i < 30; ++i)
    batch += chat_line("What is " + std::to_string(i) + " + 7?",
                       {{"max_tokens", i}, {"temperature", 0.9}}, i);
  const auto alone = answers(wanted);
  const auto among =
      answers(batch + wanted + batch, {"--max-num-seqs", "8", "--max-num-batched-tokens", "24"});
  ASSERT_EQ(among.size(), 41u);
  EXPECT_EQ(alone[0]["token_ids"].size(), 40u);
  EXPECT_EQ(among[20]["token_ids"], alone[0]["token_ids"]);
  EXPECT_EQ(among[20]["text"], alone[0]["text"]);
}

TEST(Generate, StopStringsEndTheTextBeforeThem) {
  const auto whole =
      answers(chat_line("What is 12 + 13?", {{"temperature", 0}, {"max_tokens", 30}}));
  const auto text = whole[0]["text"].get<std::string>();
  ASSERT_NE(text.find("25"), std::string::npos) << text;
  const auto cut = answers(
      chat_line("What is 12 + 13?", {{"temperature", 0}, {"max_tokens", 30}, {"stop", "25"}}));
  EXPECT_EQ(cut[0]["text"], text.substr(0, text.find("25")));
  EXPECT_EQ(cut[0]["finish_reason"], "stop");
}

TEST(Generate, LogprobsNameTheChosenTokenFirst) {
  const auto lines = answers(
      R"({"prompt": "What is", "sampling_params": {"max_tokens": 3, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": true}})"
      "\n");
  const Json& line = lines.at(0);
  ASSERT_EQ(line["logprobs"].size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const Json& candidates = line["logprobs"][i];
    EXPECT_EQ(candidates[0]["token_id"], line["token_ids"][i]);
    EXPECT_EQ(candidates[0]["rank"], 1);  // greedy
    EXPECT_LE(candidates[0]["logprob"].get<double>(), 0);
    ASSERT_EQ(candidates.size(), 3u);  // the chosen one and two more
    EXPECT_EQ(candidates[1]["rank"], 1);
    EXPECT_EQ(candidates[2]["rank"], 2);
    // A float of seven digits or so, not a double of seventeen.
    for (const Json& candidate : candidates)
      EXPECT_LE(candidate["logprob"].dump().size(), 14u) << candidate;
  }
  ASSERT_EQ(line["prompt_logprobs"].size(), line["prompt_token_ids"].size());
  EXPECT_TRUE(line["prompt_logprobs"][0].is_null());
  EXPECT_EQ(line["prompt_logprobs"][1][0]["token_id"], line["prompt_token_ids"][1]);
}

// As a program writes them that has vLLM's SamplingParams: all fields, those with nothing to say,
// too.
TEST(Generate, FieldsOfVllmsThatAskForNothingMayBeThere) {
  const auto lines = answers(
      R"({"prompt": "x", "sampling_params": {"temperature": 0, "max_tokens": 3}}
{"prompt": "x", "sampling_params": {"temperature": 0, "max_tokens": 3, "n": 1, "best_of": null, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": null, "bad_words": [], "allowed_token_ids": null, "structured_outputs": null, "spaces_between_special_tokens": true, "seed": null, "stop": [], "stop_token_ids": [], "logprobs": null, "prompt_logprobs": null, "output_kind": 0, "extra_args": null}}
)");
  EXPECT_EQ(lines[1].value("error", ""), "");
  EXPECT_EQ(lines[1]["token_ids"], lines[0]["token_ids"]);
}

TEST(Generate, TokenIdsNeedNoTokenizer) {
  TempDirectory directory;
  for (const char* file : {"config.json", "model.safetensors"})
    std::filesystem::create_symlink(demo_model() + "/" + file, directory.path() / file);
  ProcessOptions options;
  options.input =
      R"({"prompt_token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "ignore_eos": true}})"
      "\n";
  const auto result = nanovllm_program(
      {"generate", directory.path(), "-q", "--skip-tokenizer-init", "--input", "-"}, options);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.lines().at(0)["token_ids"].size(), 2u);
  EXPECT_EQ(result.lines().at(0)["text"], "");
}

TEST(Generate, AThousandLinesThroughATinyCacheKeepTheirOrder) {
  std::string requests;
  for (int i = 0; i < 1000; ++i)
    requests += R"({"id": )" + std::to_string(i) + R"(, "prompt_token_ids": [)" +
                std::to_string(1 + i % 1000) + R"(, 5], "sampling_params": {"max_tokens": )" +
                std::to_string(1 + i % 5) +
                R"(, "ignore_eos": true}})"
                "\n";
  const auto lines = answers(requests, {"--num-gpu-blocks-override", "12", "--block-size", "8",
                                        "--max-num-seqs", "4", "--max-model-len", "32"});
  ASSERT_EQ(lines.size(), 1000u);
  for (int i = 0; i < 1000; ++i) {
    ASSERT_EQ(lines[static_cast<size_t>(i)]["id"], i);
    ASSERT_EQ(lines[static_cast<size_t>(i)]["token_ids"].size(), static_cast<size_t>(1 + i % 5));
  }
}

// Results wait for the first request's, which takes a while; meanwhile the rest of the input does.
TEST(Generate, ResultsThatWaitForAnEarlierOneAreBounded) {
  ProcessOptions options;
  options.input =
      R"({"prompt_token_ids": [5], "sampling_params": {"max_tokens": 800, "ignore_eos": true}})"
      "\n";
  constexpr size_t kLines = 12'000;
  const std::string refused =
      R"({"prompt_token_ids": [], "id": ")" + std::string(900, 'x') + "\"}\n";
  for (size_t i = 0; i < kLines; ++i) options.input += refused;
  const auto result = nanovllm_program(generate({"--input", "-"}), options);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.lines().size(), kLines + 1);
  // 4,096 results, one read ahead and a pipe's buffer.
  EXPECT_LT(result.input_before_output, 4200 * refused.size() + (512u << 10));
}

TEST(Generate, APromptBeyondAnyContextIsNeitherEncodedNorKept) {
  std::string requests;
  for (int i = 0; i < 10; ++i)
    requests += Json({{"prompt", std::string(size_t{4} << 20, 'x')}, {"id", i}}).dump() + "\n";
  ProcessOptions options;
  options.input =
      requests + R"({"prompt": "x", "id": "last", "sampling_params": {"max_tokens": 1}})";
  const auto result = nanovllm_program(generate({"--input", "-"}), options);
  const auto lines = result.lines();
  ASSERT_EQ(lines.size(), 11u);
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(lines[i]["prompt_token_ids"], Json::array());
    EXPECT_NE(lines[i]["error"].get<std::string>().find("the prompt is too long: 4194304 bytes, "),
              std::string::npos)
        << lines[i];
  }
  EXPECT_EQ(lines[10]["token_ids"].size(), 1u);
  // One that is only a little too long is counted exactly, and not repeated either.
  std::string words;
  for (int i = 0; i < 3000; ++i) words += " x";
  const auto line = json_lines(nanovllm_program(generate({"--json", "--prompt", words})).output);
  EXPECT_NE(line.at(0)["error"].get<std::string>().find("the prompt is too long: 3000 tokens"),
            std::string::npos)
      << line;
  EXPECT_EQ(line.at(0)["prompt_token_ids"], Json::array());
}

}  // namespace
}  // namespace nanovllm
