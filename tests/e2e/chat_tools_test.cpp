// chat --tools in a terminal, on a model that calls a tool and, once it has the result, says what
// comes of it.
#include <csignal>
#include <cstdlib>
#include <memory>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "nanovllm/error.h"

#include "cli/tools/tool_file.h"
#include "e2e/process.h"
#include "e2e/running.h"
#include "e2e/terminal.h"
#include "server/scripted_model.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

// The text before DONE is the answer to a question; a prompt that ends in DONE, as that behind a
// result does, leads to what follows it.
const std::string kAnswer =
    "A sum.\n<tool_call>\n{\"name\": \"calculator\", \"arguments\": {\"expression\": \"23 + 58\", "
    "\"note\": \"\\u001b[2J\\u202e\"}}\n</tool_call>DONE\x1b]It is 81.";
const std::string kTemplate =
    R"({#- <tool_call>{\"arguments\": ...}</tool_call> -#}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if messages[-1].role == 'tool' %}DONE{% else %}<|im_start|>assistant
{% endif %})";

class ChatTools : public testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(directory_);
    // DONE is a text of the model's, not a mark that its text leaves out.
    const fs::path file = fs::path(model_.path()) / "tokenizer.json";
    Json tokenizer = read_json_file(file);
    for (Json& token : tokenizer["added_tokens"])
      if (token["content"] == "DONE") token["special"] = false;
    write_file(file, tokenizer.dump());
  }

  /// The only tool runs `script`, whose $1 is a directory for what it has to say to the test.
  std::unique_ptr<Terminal> chat(const std::string& script) {
    write_file(directory_ / "tools.json",
               Json::array(
                   {{{"type", "function"},
                     {"command", {"sh", "-c", script, "sh", directory_.string()}},
                     {"function", {{"name", "calculator"}, {"parameters", {{"type", "object"}}}}}}})
                   .dump());
    return std::make_unique<Terminal>(
        std::vector<std::string>{"chat", model_.path(), "-q", "--temperature", "0", "--stop",
                                 "DONE", "--tools", (directory_ / "tools.json").string()});
  }
  fs::path of_script(const char* name) const { return directory_ / name; }

  ScriptedModel model_{kAnswer, kTemplate, {"DONE"}};
  const fs::path directory_ = fs::path(model_.path()) / "of_the_tool";
};

TEST_F(ChatTools, ACallIsShownAskedForAndRunAndItsResultAnswered) {
  ::setenv("HF_TOKEN", "hidden", 1);
  const auto terminal = chat("cat >$1/arguments; env >$1/environment; echo eighty-one");
  terminal->wait_for("> ");
  terminal->type("What is 23 + 58?\r");
  const std::string call = R"({"expression":"23 + 58","note":"\u001b[2J\u202e"})";
  const std::string seen = without_escapes(terminal->wait_for("run it? [y/N] "));
  EXPECT_NE(seen.find("A sum."), std::string::npos) << seen;
  EXPECT_NE(seen.find("calculator " + call + "\nruns [\"sh\",\"-c\""), std::string::npos) << seen;
  EXPECT_EQ(seen.find("tool_call"), std::string::npos) << seen;
  EXPECT_FALSE(fs::exists(of_script("arguments")));
  terminal->type("y\r");
  terminal->wait_for("\"eighty-one\\n\"");
  terminal->wait_for("\\u001b]It is 81.");  // nor can an answer act on the terminal
  EXPECT_EQ(file_text(of_script("arguments")), call + "\n");
  EXPECT_EQ(file_text(of_script("environment")).find("hidden"), std::string::npos);
  terminal->wait_for("> ");
  terminal->type("\x04");
  EXPECT_EQ(terminal->exit_code(), 0);
}

TEST_F(ChatTools, ACallThatIsNotAllowedIsNotRunAndATypedAheadYesDoesNotCount) {
  const auto terminal = chat("touch $1/ran");
  terminal->wait_for("> ");
  terminal->type("What is 23 + 58?\ryes\r");
  terminal->wait_for("run it? [y/N] ");
  terminal->type("no\r");
  terminal->wait_for("It is 81.");
  terminal->wait_for("> ");
  terminal->type("/again\r");
  terminal->wait_for("run it? [y/N] ");
  terminal->type("\x03");  // and no other answer
  terminal->wait_for("> ");
  terminal->type("\x04");
  const std::string rest = terminal->rest();
  EXPECT_EQ(rest.find("81"), std::string::npos) << rest;
  EXPECT_EQ(terminal->exit_code(), 0);
  EXPECT_FALSE(fs::exists(of_script("ran")));
}

TEST_F(ChatTools, CtrlCEndsTheCommandAndAllThatItStarted) {
  const auto terminal = chat("sleep 600 & echo $! >$1/new; mv $1/new $1/pid; sleep 600");
  terminal->wait_for("> ");
  terminal->type("What is 23 + 58?\r");
  terminal->wait_for("run it? [y/N] ");
  terminal->type("y\r");
  for (int i = 0; i < 600 && !fs::exists(of_script("pid")); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  terminal->type("\x03");
  terminal->wait_for("stopped by the user");
  terminal->wait_for("> ");
  EXPECT_TRUE(soon_ends(std::stoi(file_text(of_script("pid")))));
  terminal->type("\x04");
  EXPECT_EQ(terminal->exit_code(), 0);
}

TEST(ChatToolsOfTheDemo, ACalculationIsDoneByTheExamplesCalculator) {
  const TempDirectory directory;
  Json tools = read_json_file(NANOVLLM_SOURCE_DIR "/examples/tools/tools.json");
  for (Json& tool : tools)
    tool["command"][1] = NANOVLLM_SOURCE_DIR "/" + tool["command"][1].get<std::string>();
  write_file(directory.path() / "tools.json", tools.dump());
  Terminal terminal({"chat", NANOVLLM_SOURCE_DIR "/models/demo", "-q", "--temperature", "0",
                     "--tools", (directory.path() / "tools.json").string()});
  terminal.wait_for("> ");
  terminal.type("What is 348 * 71?\r");
  const std::string seen = without_escapes(terminal.wait_for("run it? [y/N] "));
  EXPECT_NE(seen.find(R"(calculator {"a":348,"op":"*","b":71})"), std::string::npos) << seen;
  terminal.type("y\r");
  terminal.wait_for("348 * 71 = 24708.");
  terminal.wait_for("> ");
  terminal.type("What is 5000 - 1?\r");
  terminal.wait_for("run it? [y/N] ");
  terminal.type("n\r");
  terminal.wait_for("That did not work: the user did not allow this call.");
  terminal.wait_for("> ");
  terminal.type("\x04");
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST_F(ChatTools, WithoutATerminalTheyAreRefused) {
  const auto result = nanovllm_program({"chat", model_.path(), "--tools", "tools.json"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.errors.find("--tools asks before each call, which needs a terminal"),
            std::string::npos)
      << result.errors;
}

TEST(ToolFile, ABadOneIsRefusedByWhatIsWrong) {
  TempDirectory directory;
  const std::string path = directory.path() / "tools.json";
  const auto refusal = [&](const std::string& text) -> std::string {
    write_file(path, text);
    try {
      cli::read_tool_file(path);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      return error.what();
    }
  };
  EXPECT_EQ(refusal(R"([{"name": "f", "command": ["true"]}])"), "");
  for (const auto& [text, problem] : std::vector<std::pair<const char*, const char*>>{
           {"", "not valid JSON"},
           {"{}", "must be a list of tools"},
           {"[]", "must be a list of tools"},
           {"[1]", "tools[0] has no command"},
           {R"([{"name": "f"}])", "tools[0] has no command"},
           {R"([{"name": "f", "command": "rm -rf"}])", "tools[0] has no command"},
           {R"([{"name": "f", "command": []}])", "tools[0] has no command"},
           {R"([{"name": "f", "command": [""]}])", "names no program"},
           {R"([{"name": "f", "command": ["a", 1]}])", "must be a list of texts"},
           {R"([{"name": "f g", "command": ["a"]}])", "must have a name"}}) {
    const std::string message = refusal(text);
    EXPECT_TRUE(message.starts_with("--tools " + path)) << message;
    EXPECT_NE(message.find(problem), std::string::npos) << text << ": " << message;
  }
}

TEST(ToolFile, TheTemplateSeesNothingOfTheCommand) {
  TempDirectory directory;
  const std::string path = directory.path() / "tools.json";
  write_file(path, R"([{"name": "f", "description": "d", "command": ["secret"]}])");
  const cli::CommandTools file = cli::read_tool_file(path);
  EXPECT_EQ(file.commands.at("f"), std::vector<std::string>{"secret"});
  EXPECT_EQ(tools_for_template(file.tools).dump(),
            R"([{"type":"function","function":{"name":"f","description":"d"}}])");
}

}  // namespace
}  // namespace nanovllm
