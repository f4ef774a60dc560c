// nanovllm chat as a user of a pipe sees it: a message per line in, an answer per message out.
#include <algorithm>

#include <gtest/gtest.h>
#include <signal.h>

#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

ProcessResult chat(const std::string& input, std::vector<std::string> more = {},
                   ProcessOptions options = {}) {
  options.input = input;
  std::vector<std::string> arguments = {"chat", demo_model(),   "-q", "--temperature",
                                        "0",    "--max-tokens", "24"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return nanovllm_program(arguments, options);
}

/// The answer of `generate` to a conversation: the reference of every answer here.
std::string answer_to(const Json& messages) {
  ProcessOptions options;
  options.input =
      Json({{"messages", messages}, {"sampling_params", {{"temperature", 0}, {"max_tokens", 24}}}})
          .dump() +
      "\n";
  const auto result = nanovllm_program({"generate", demo_model(), "-q", "--input", "-"}, options);
  return result.lines().at(0).at("text").get<std::string>();
}

Json message(const std::string& role, const std::string& content) {
  return {{"role", role}, {"content", content}};
}

TEST(Chat, EveryAnswerKnowsTheConversation) {
  Json messages = {message("system", "Be brief."), message("user", "Hello!")};
  const std::string first = answer_to(messages);
  messages.push_back(message("assistant", first));
  messages.push_back(message("user", "What is 3 + 4?"));
  const std::string second = answer_to(messages);
  const auto result = chat("Hello!\nWhat is 3 + 4?\n", {"--system", "Be brief."});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output, first + "\n" + second + "\n");
  EXPECT_EQ(result.errors, "");
}

// As in vLLM's parse_chat_messages and the server: no content is an empty text, and arguments that
// are JSON text are objects.
TEST(Chat, ALineMayHaveAConversationAsOpenAisClientsHoldIt) {
  const auto prompt_of = [](const std::string& answer) {
    ProcessOptions options;
    options.input = R"({"messages":[{"role":"user","content":"x"},{"role":"assistant",)" + answer +
                    R"(}],"sampling_params":{"max_tokens":1}})" + "\n";
    const auto result = nanovllm_program({"generate", demo_model(), "-q", "--input", "-"}, options);
    return result.lines().at(0).at("prompt_token_ids");
  };
  const std::string call = R"("tool_calls":[{"function":{"name":"f","arguments":)";
  const Json expected = prompt_of(R"("content":"",)" + call + R"({"a":1}}}])");
  ASSERT_GT(expected.size(), 0u);
  EXPECT_EQ(prompt_of(R"("content":null,)" + call + R"("{\"a\":1}"}}])"), expected);
  EXPECT_EQ(prompt_of(call + R"({"a":1}}}])"), expected);
}

TEST(Chat, CommandsForgetRepeatAndEnd) {
  const std::string hello = answer_to(Json::array({message("user", "Hello!")}));
  const auto result = chat("Hello!\n/again\n/clear\nHello!\n/exit\nnever read\n");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output, hello + "\n" + hello + "\n" + hello + "\n");
}

TEST(Chat, ABackslashContinuesTheMessage) {
  EXPECT_EQ(chat("What is\\\n3 + 4?\n").output,
            answer_to(Json::array({message("user", "What is\n3 + 4?")})) + "\n");
  EXPECT_EQ(chat("Hello!\\").output, answer_to(Json::array({message("user", "Hello!\n")})) + "\n");
}

TEST(Chat, NothingToSayIsNoError) {
  const auto result = chat("\n\n");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output + result.errors, "");
}

TEST(Chat, AMessageThatCannotBeAnsweredIsTakenBackAndTheNextOneServed) {
  const auto result = chat("bad \xff\n/nope\n/again\n" + std::string(5000, 'x') + " y\nHello!\n",
                           {"--max-model-len", "256"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.output, answer_to(Json::array({message("user", "Hello!")})) + "\n");
  for (const char* part : {"error: line 1 is not valid UTF-8\n", "unknown command \"/nope\"",
                           "there is no answer yet", "max_model_len 256"})
    EXPECT_NE(result.errors.find(part), std::string::npos) << part << " in " << result.errors;
}

TEST(Chat, AModelWithoutATemplateIsNamedAtOnce) {
  TempDirectory directory;
  for (const auto& file : std::filesystem::directory_iterator(demo_model()))
    if (file.path().filename() != "tokenizer_config.json")
      std::filesystem::create_symlink(file.path(), directory.path() / file.path().filename());
  const auto result = nanovllm_program({"chat", directory.path(), "-q"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.errors.find("no chat template in tokenizer_config.json"), std::string::npos)
      << result.errors;
}

TEST(Chat, ARefusalOfTheTemplateIsOneLine) {
  TempDirectory directory;
  for (const auto& file : std::filesystem::directory_iterator(demo_model()))
    std::filesystem::create_symlink(file.path(), directory.path() / file.path().filename());
  write_file(directory.path() / "chat_template.jinja", R"({{ raise_exception('never\nhere') }})");
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"chat"}, {"generate", "--chat", "--prompt", "x"}}) {
    ProcessOptions options;
    options.input = "Hello!\n";
    std::vector<std::string> all = arguments;
    all.insert(all.end(), {"-q", "--model", directory.path()});
    const auto result = nanovllm_program(all, options);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.output, "");
    EXPECT_EQ(result.errors, "error: never here\n");
  }
}

// An answer of 2,000 tokens does not fit the pipe before the signal; the second one is not stopped.
TEST(Chat, CtrlCStopsAnAnswerAndTheConversationGoesOn) {
  ProcessOptions options;
  options.signal_when = [](const std::string& output) { return output.empty() ? 0 : SIGINT; };
  const auto result =
      chat("Tell me a story\n/clear\nHello!\n", {"--max-tokens", "2000", "--ignore-eos"}, options);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  // Two answers, the first one cut short.
  EXPECT_GT(result.output.size(), 2u);
  EXPECT_EQ(result.output.back(), '\n');
}

TEST(Chat, TerminationDuringAnAnswerEndsTheProgram) {
  ProcessOptions options;
  options.signal_when = [](const std::string& output) { return output.empty() ? 0 : SIGTERM; };
  const auto result = chat("Tell me a story\nHello!\n", with_endless({}), options);
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_EQ(std::count(result.output.begin(), result.output.end(), '\n'), 1) << result.output;
}

TEST(Chat, LinesMayEndAsOnWindows) {
  const auto result = chat("What is 3 + 4?\r\n/exit\r\nnever read\r\n");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.output, answer_to(Json::array({message("user", "What is 3 + 4?")})) + "\n");
}

}  // namespace
}  // namespace nanovllm
