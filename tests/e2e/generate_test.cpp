// nanovllm generate on the bundled model: what comes out, where, and in which order.
#include "e2e/generate.h"

#include <gtest/gtest.h>

#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

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

TEST(Generate, ARecommendedRepetitionPenaltyIsFollowed) {
  TempDirectory directory;
  for (const auto& file : std::filesystem::directory_iterator(demo_model()))
    if (file.path().filename() != "generation_config.json")
      std::filesystem::create_symlink(file.path(), directory.path() / file.path().filename());
  write_file(directory.path() / "generation_config.json",
             R"({"repetition_penalty": 5, "do_sample": false})");
  const std::vector<std::string> arguments = {"generate", directory.path(), "--prompt",
                                              "x",        "--max-tokens",   "20"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), arguments.begin(), arguments.end());
    return nanovllm_program(more).output;
  };
  const std::string recommended = with({}), asked_for = with({"--repeat-penalty", "5"}),
                    plain = with({"--repetition-penalty", "1"});
  EXPECT_EQ(recommended, asked_for);
  EXPECT_NE(recommended, plain);
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
  // The tree that `hf download nano/demo` leaves: refs/main names the commit whose files are in
  // snapshots.
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
        {"HF_HUB_CACHE", ""}, {"HF_HOME", ""}, {"XDG_CACHE_HOME", ""}, {"HOME", directory.path()}};
    options.environment[variable] = folder;
    return nanovllm_program({"generate", model, "-q", "--prompt", "x", "--max-tokens", "1"},
                            options);
  };
  EXPECT_EQ(run("HF_HUB_CACHE", directory.path() / "hub", "nano/demo").exit_code, 0);
  EXPECT_EQ(run("HF_HOME", directory.path(), "nano/demo").exit_code, 0);
  EXPECT_EQ(run("HUGGINGFACE_HUB_CACHE", directory.path() / "hub", "nano/demo").exit_code, 0);
  EXPECT_EQ(run("HF_HOME", "~/", "nano/demo").exit_code, 0);  // as a service's file may have it
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
  // A path that is no file, or never ends, is not read.
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
