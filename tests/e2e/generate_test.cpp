// nanovllm generate on the bundled model: what comes out, where, and in which order.
#include <gtest/gtest.h>

#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

using Arguments = std::vector<std::string>;

Arguments generate(Arguments more) {
  Arguments arguments = {"generate", demo_model(), "--quiet"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

// The answers of a file of requests, all of which have to be done.
std::vector<Json> answers(const std::string& requests, Arguments more = {}) {
  more.insert(more.begin(), {"--input", "-"});
  ProcessOptions options;
  options.input = requests;
  const ProcessResult result = nanovllm_program(generate(more), options);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  return result.lines();
}

std::string chat_line(const std::string& text, const Json& params = Json::object(), int id = 0) {
  Json line = {{"id", id}, {"sampling_params", params}};
  line["messages"] = Json::array({{{"role", "user"}, {"content", text}}});
  return line.dump() + "\n";
}

TEST(Generate, OnePromptGivesItsTextAloneOnStandardOutput) {
  const auto result = nanovllm_program(generate(
      {"--chat", "--prompt", "What is 23 + 45?", "--temperature", "0", "--max-tokens", "32"}));
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(result.output.find("68"), std::string::npos) << result.output;
  EXPECT_EQ(result.output.back(), '\n');
  EXPECT_EQ(result.output.find("Prompt:"), std::string::npos);
  EXPECT_EQ(result.errors, "");  // quiet
}

TEST(Generate, SeveralPromptsAreToldApart) {
  const auto result = nanovllm_program(generate({"--chat", "--prompt", "What is 2 + 3?", "--prompt",
                                                 "What is 40 - 4?", "--max-tokens", "32"}));
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  const size_t first = result.output.find("Prompt: What is 2 + 3?\nCompletion: ");
  const size_t second = result.output.find("Prompt: What is 40 - 4?\nCompletion: ");
  ASSERT_NE(first, std::string::npos) << result.output;
  ASSERT_NE(second, std::string::npos) << result.output;
  EXPECT_LT(first, second);
}

TEST(Generate, SaysOnceWhereItRuns) {
  const auto result =
      nanovllm_program({"generate", demo_model(), "--prompt", "x", "--max-tokens", "1"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.errors.find("note: running on cpu, 1 thread"), 0u) << result.errors;
  // And what was done, at the end.
  EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 2) << result.errors;
  EXPECT_NE(result.errors.find("\nnote: 1 request in "), std::string::npos) << result.errors;
  EXPECT_NE(result.errors.find(" s: 1 prompt tokens, 1 generated, "), std::string::npos)
      << result.errors;
}

TEST(Generate, TheEnginesSeedDecidesWhatRequestsWithoutOneDraw) {
  const auto drawn_with = [](const std::string& seed) {
    return answers(
        R"({"prompt_token_ids": [5], "sampling_params": {"temperature": 5, "ignore_eos": true}})",
        {"--seed", seed})[0]["token_ids"];
  };
  const Json one = drawn_with("1"), minus_one = drawn_with("-1");
  EXPECT_EQ(drawn_with("1"), one);
  EXPECT_EQ(drawn_with("-1"), minus_one);
  EXPECT_NE(one, minus_one);
}

TEST(Generate, ATextThatTheDefaultLengthCutIsSaidToBeCut) {
  const auto errors_of = [](const Arguments& arguments, const std::string& input = "") {
    ProcessOptions options;
    options.input = input;
    return nanovllm_program(arguments, options).errors;
  };
  const std::string cut = "cut after 16 tokens: --max-tokens N (-n N) gives more";
  EXPECT_NE(errors_of({"generate", demo_model(), "Once upon", "--ignore-eos"})
                .find("note: the text was " + cut),
            std::string::npos);
  EXPECT_NE(errors_of({"generate", demo_model(), "--ignore-eos", "-i", "-"},
                      R"({"prompt": "x"}
{"prompt": "x", "sampling_params": {"max_tokens": 16}}
)")
                .find("note: 1 of 2 texts were " + cut),
            std::string::npos);
  EXPECT_EQ(errors_of({"generate", demo_model(), "Once upon", "--ignore-eos", "-n", "16"})
                .find(" cut after "),
            std::string::npos);
  EXPECT_EQ(errors_of({"generate", demo_model(), "Once upon", "--ignore-eos", "-q"}), "");
}

TEST(Generate, ThePromptMayBeAnArgumentOrStandardInput) {
  const Arguments more = {"--temperature", "0", "--max-tokens", "8"};
  const auto text_of = [&](Arguments arguments, ProcessOptions options = {}) {
    arguments.insert(arguments.begin(), {"generate", "-q"});
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto result = nanovllm_program(arguments, options);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result.output;
  };
  const std::string expected = text_of({demo_model(), "--prompt", "What is 2 + 3?"});
  EXPECT_NE(expected, "\n");
  EXPECT_EQ(text_of({demo_model(), "What is 2 + 3?"}), expected);
  EXPECT_EQ(text_of({"-m", demo_model(), "What is 2 + 3?"}).size(), expected.size());
  ProcessOptions piped;
  piped.input = "What is 2 + 3?\n";
  EXPECT_EQ(text_of({demo_model()}, piped), expected);
  EXPECT_EQ(text_of({demo_model(), "-"}, piped), expected);
  // Where the environment names the model, the only argument is the prompt, unless it is a model.
  ProcessOptions named;
  named.environment["NANOVLLM_MODEL"] = demo_model();
  EXPECT_EQ(text_of({"What is 2 + 3?"}, named), expected);
  named.environment["NANOVLLM_MODEL"] = "/no/such/model";
  named.input = piped.input;
  EXPECT_EQ(text_of({demo_model()}, named), expected);
  const auto twice = nanovllm_program({"generate", demo_model(), "x", "--prompt", "y"});
  EXPECT_EQ(twice.exit_code, 2);
  EXPECT_NE(twice.errors.find("a prompt is given twice"), std::string::npos) << twice.errors;
}

TEST(Generate, TemplateVariablesReachThePromptsOfTheCommandLine) {
  TempDirectory directory;
  for (const auto& file : std::filesystem::directory_iterator(demo_model()))
    std::filesystem::create_symlink(file.path(), directory.path() / file.path().filename());
  write_file(directory.path() / "chat_template.jinja", "{{ answer }}{{ messages[0].content }}");
  const auto ids = [&](const Arguments& more) {
    Arguments arguments = {"generate", directory.path(), "--json", "-q", "-n", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return nanovllm_program(arguments).lines().at(0)["prompt_token_ids"];
  };
  EXPECT_EQ(ids({"--chat", "b", "--chat-template-kwargs", R"({"answer": "a "})"}), ids({"a b"}));
}

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

TEST(Generate, AddsAndSubtracts) {
  std::string requests;
  int count = 0;
  std::vector<std::string> expected;
  for (int a = 3; a < 100; a += 12)
    for (int b = 1; b <= a; b += 17) {
      const bool add = (a + b) % 2 == 0;
      const std::string question =
          "What is " + std::to_string(a) + (add ? " + " : " - ") + std::to_string(b) + "?";
      requests += chat_line(question, {{"temperature", 0}, {"max_tokens", 40}}, count++);
      expected.push_back(std::to_string(add ? a + b : a - b));
    }
  const auto lines = answers(requests);
  ASSERT_EQ(lines.size(), expected.size());
  int right = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto text = lines[i]["text"].get<std::string>();
    const size_t at = text.find(expected[i]);
    const bool ends = at != std::string::npos && (at + expected[i].size() == text.size() ||
                                                  !std::isdigit(text[at + expected[i].size()]));
    if (ends) ++right;
  }
  EXPECT_GE(right * 100, count * 97) << right << " of " << count;
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

TEST(Generate, OptionsStandInTheEnvironmentToo) {
  ProcessOptions options;
  options.environment = {{"NANOVLLM_MAX_TOKENS", "3"}, {"NANOVLLM_IGNORE_EOS", "1"}};
  const auto result = nanovllm_program(generate({"--prompt", "What", "--json"}), options);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.lines().at(0)["token_ids"].size(), 3u);
  const auto argument_wins =
      nanovllm_program(generate({"--prompt", "What", "--json", "--max-tokens", "2"}), options);
  EXPECT_EQ(argument_wins.lines().at(0)["token_ids"].size(), 2u);
}

/// models/demo with another generation_config.json.
struct ModelThatRecommends {
  explicit ModelThatRecommends(const Json& generation_config) {
    for (const auto& file : std::filesystem::directory_iterator(demo_model()))
      if (file.path().filename() != "generation_config.json")
        std::filesystem::create_symlink(file.path(), directory.path() / file.path().filename());
    write_file(directory.path() / "generation_config.json", generation_config.dump());
  }
  std::vector<Json> answers(const std::string& requests, Arguments more = {}) const {
    more.insert(more.begin(), {"generate", directory.path(), "-q", "--input", "-"});
    ProcessOptions options;
    options.input = requests;
    return nanovllm_program(more, options).lines();
  }
  TempDirectory directory;
};

// Each line's answer tells which of the two it took: the model's own lengths, and whether the one
// token of a top_k of 1 or any of a temperature of 10,000 is next.
TEST(Generate, OnlyALineWithoutParametersTakesTheModelsRecommendation) {
  const std::string without = R"({"prompt": "Tell me a"})"
                              "\n";
  const std::string with = R"({"prompt": "Tell me a", "sampling_params": {}})"
                           "\n";
  const auto greedy =
      answers(without, {"--temperature", "0", "--max-tokens", "30", "--ignore-eos"});
  {
    const ModelThatRecommends model(
        {{"temperature", 10000}, {"top_k", 1}, {"max_new_tokens", 30}, {"eos_token_id", 0}});
    const auto lines = model.answers(without + with, {"--ignore-eos"});
    ASSERT_EQ(lines.size(), 2u);
    EXPECT_EQ(lines[0]["token_ids"], greedy[0]["token_ids"]);
    EXPECT_EQ(lines[1]["token_ids"].size(), 16u) << "vLLM's default, not the model's";
    EXPECT_NE(model.answers(without, {"--ignore-eos", "--top-k", "0"})[0]["token_ids"],
              greedy[0]["token_ids"]);
    const auto classes = model.answers(without, {"--ignore-eos", "--generation-config", "vllm"});
    EXPECT_EQ(classes[0]["token_ids"].size(), 16u);
  }
  const ModelThatRecommends model(
      {{"do_sample", false}, {"temperature", 10000}, {"max_new_tokens", 30}});
  EXPECT_EQ(model.answers(without, {"--ignore-eos"})[0]["token_ids"], greedy[0]["token_ids"]);
}

TEST(Generate, ARecommendationThatIsNotFollowedIsNamed) {
  TempDirectory directory;
  for (const auto& file : std::filesystem::directory_iterator(demo_model()))
    if (file.path().filename() != "generation_config.json")
      std::filesystem::create_symlink(file.path(), directory.path() / file.path().filename());
  write_file(directory.path() / "generation_config.json", R"({"repetition_penalty": 1.05})");
  const std::vector<std::string> arguments = {"generate", directory.path(), "--prompt",
                                              "x",        "--max-tokens",   "1"};
  EXPECT_NE(nanovllm_program(arguments).errors.find(
                "note: generation_config.json: repetition_penalty 1.05 is ignored"),
            std::string::npos);
  write_file(directory.path() / "generation_config.json", R"({"repetition_penalty": 1.0})");
  EXPECT_EQ(nanovllm_program(arguments).errors.find("repetition_penalty"), std::string::npos);
}

TEST(Generate, VllmsNamesOfTheModelAndTheRanksAreUnderstood) {
  for (const std::string name : {"--model", "-m"}) {
    const auto result = nanovllm_program(
        {"generate", name, demo_model(), "-tp=2", "-q", "--prompt", "x", "--max-tokens", "1"});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
  }
  const auto two = nanovllm_program({"generate", demo_model(), "-tp", "2", "--prompt", "x",
                                     "--max_tokens", "1", "--enforce_eager", "--block_size=32"});
  EXPECT_EQ(two.exit_code, 0);
  EXPECT_NE(two.errors.find("note: 2 ranks, the first running on cpu"), std::string::npos);
}

TEST(Generate, FindsAModelInHuggingFacesCache) {
  // What `hf download nano/demo` leaves: refs/main names the commit whose files are in snapshots.
  TempDirectory directory;
  const auto repository = directory.path() / "hub" / "models--nano--demo";
  std::filesystem::create_directories(repository / "refs");
  std::filesystem::create_directories(repository / "snapshots");
  write_file(repository / "refs" / "main", "0123abcd");
  std::filesystem::create_directory_symlink(demo_model(), repository / "snapshots" / "0123abcd");
  const auto run = [&](const std::string& variable, const std::filesystem::path& folder,
                       const std::string& model) {
    ProcessOptions options;
    options.environment = {
        {"HF_HUB_CACHE", ""}, {"HF_HOME", ""}, {"XDG_CACHE_HOME", ""}, {"HOME", "/nowhere"}};
    options.environment[variable] = folder;
    return nanovllm_program({"generate", model, "-q", "--prompt", "x", "--max-tokens", "1"},
                            options);
  };
  EXPECT_EQ(run("HF_HUB_CACHE", directory.path() / "hub", "nano/demo").exit_code, 0);
  EXPECT_EQ(run("HF_HOME", directory.path(), "nano/demo").exit_code, 0);
  const auto other = run("HF_HOME", directory.path(), "nano/other");
  EXPECT_EQ(other.exit_code, 3);
  EXPECT_EQ(other.errors,
            "error: nano/other: no such directory, nor in Hugging Face's cache, " +
                (directory.path() / "hub").string() +
                "; \"hf download nano/other\" puts a model there (nothing is downloaded here)\n");
  // A download of one revision leaves no refs/main: the only snapshot is meant.
  std::filesystem::remove(repository / "refs" / "main");
  EXPECT_EQ(run("HF_HOME", directory.path(), "nano/demo").exit_code, 0);
  std::filesystem::create_directories(repository / "snapshots" / "4567cdef");
  EXPECT_NE(run("HF_HOME", directory.path(), "nano/demo").errors.find("several snapshots"),
            std::string::npos);
  std::filesystem::remove(repository / "snapshots" / "4567cdef");
  // What is no file, or never ends, is not read.
  std::filesystem::create_symlink("/dev/zero", repository / "refs" / "main");
  EXPECT_NE(run("HF_HOME", directory.path(), "nano/demo").errors.find("is not a regular file"),
            std::string::npos);
  std::filesystem::remove(repository / "refs" / "main");
  // A commit that leads out of the cache is none.
  write_file(repository / "refs" / "main", "../../../../etc");
  EXPECT_EQ(run("HF_HOME", directory.path(), "nano/demo").exit_code, 3);
}

TEST(Generate, NumbersMayBeWrittenAsOtherProgramsWriteThem) {
  // 10.0 for 10, as from a table of doubles; a top_k beyond every vocabulary is off, as in vLLM.
  const auto lines = answers(
      R"({"prompt": "x", "sampling_params": {"temperature": 0, "max_tokens": 3.0, "ignore_eos": true}}
{"prompt": "x", "sampling_params": {"temperature": 1e-400, "max_tokens": 3, "ignore_eos": true, "top_k": 2147483648}}
)");
  EXPECT_EQ(lines[0]["token_ids"].size(), 3u) << lines[0];
  EXPECT_EQ(lines[1]["token_ids"], lines[0]["token_ids"]) << lines[1];
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
    EXPECT_NE(lines[i]["error"].get<std::string>().find("the prompt has 4194304 bytes, "),
              std::string::npos)
        << lines[i];
  }
  EXPECT_EQ(lines[10]["token_ids"].size(), 1u);
  // One that is only a little too long is counted exactly, and not repeated either.
  std::string words;
  for (int i = 0; i < 3000; ++i) words += " x";
  const auto line = json_lines(nanovllm_program(generate({"--json", "--prompt", words})).output);
  EXPECT_NE(line.at(0)["error"].get<std::string>().find("the prompt has 3000 tokens"),
            std::string::npos)
      << line;
  EXPECT_EQ(line.at(0)["prompt_token_ids"], Json::array());
}

// The same answers on a GPU: "Cuda" in the name gives the label `gpu`.
TEST(GenerateCuda, AddsAndSubtracts) {
  if (nanovllm_program({"inspect", demo_model(), "--device", "cuda"}).exit_code == 4)
    GTEST_SKIP() << "no GPU";
  const auto lines =
      answers(chat_line("What is 12 + 13?", {{"temperature", 0}, {"max_tokens", 30}}) +
                  chat_line("What is 60 - 19?", {{"temperature", 0}, {"max_tokens", 30}}),
              {"--device", "cuda"});
  EXPECT_NE(lines.at(0)["text"].get<std::string>().find("25"), std::string::npos);
  EXPECT_NE(lines.at(1)["text"].get<std::string>().find("41"), std::string::npos);
}

}  // namespace
}  // namespace nanovllm
