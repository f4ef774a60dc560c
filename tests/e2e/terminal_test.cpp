// nanovllm in a terminal: keys, pastes, Ctrl-C and the progress line.
#include "e2e/terminal.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "e2e/process.h"

namespace nanovllm {
namespace {

const std::string kUp = "\x1b[A", kLeft = "\x1b[D", kCtrlC = "\x03", kCtrlD = "\x04";

std::vector<std::string> chat(std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"chat", demo_model(),   "-q", "--temperature",
                                        "0",    "--max-tokens", "24"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// The answer of `generate` to one message: the reference of the answers here.
std::string answer_to(const std::string& text) {
  ProcessOptions options;
  options.input = Json({{"messages", {{{"role", "user"}, {"content", text}}}},
                        {"sampling_params", {{"temperature", 0}, {"max_tokens", 24}}}})
                      .dump();
  const auto result = nanovllm_program({"generate", demo_model(), "-q", "-i", "-"}, options);
  return result.lines().at(0).at("text").get<std::string>();
}

TEST(Terminal, ArrowsEditTheLineAndFindEarlierOnes) {
  Terminal terminal(chat());
  terminal.wait_for("> ");
  terminal.type("What is 3 + 5?" + kLeft + "\x7f" + "4\r");  // ... 3 + 4?
  const std::string expected = answer_to("What is 3 + 4?");
  terminal.wait_for(expected);
  terminal.wait_for("> ");
  terminal.type("/clear\r");
  terminal.wait_for("> ");
  terminal.type(kUp + kUp + "\r");
  terminal.wait_for(expected);
  terminal.wait_for("> ");
  terminal.type(kCtrlD);
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Terminal, APasteOfSeveralLinesIsOneMessageOfAnyLength) {
  Terminal terminal(chat());
  terminal.wait_for("\x1b[?2004h");
  terminal.type("\x1b[200~What is 3 +\r4?\x1b[201~\r");
  terminal.wait_for(answer_to("What is 3 +\n4?"));
  terminal.wait_for("> ");
  // More than the 4,095 bytes that a terminal keeps of a line: the engine counts all of it.
  std::string words;
  for (int i = 0; i < 3000; ++i) words += "a ";
  terminal.type("/clear\r");
  terminal.wait_for("> ");
  terminal.type("\x1b[200~" + words + "END\x1b[201~\r");
  const std::string error = terminal.wait_for("length is 2048");
  EXPECT_NE(error.find("too long: 30"), std::string::npos) << without_escapes(error);
  terminal.wait_for("> ");
  terminal.type("/bye\r");
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Terminal, CtrlCAtThePromptKeepsTheConversation) {
  Terminal terminal(chat());
  terminal.wait_for("> ");
  terminal.type("Hello!\r");
  const std::string hello = answer_to("Hello!");
  terminal.wait_for(hello);
  terminal.wait_for("> ");
  terminal.type(kCtrlC);
  terminal.wait_for("/exit or Ctrl-D ends");
  terminal.wait_for("> ");
  terminal.type("not sent");
  terminal.wait_for("not sent");
  terminal.type(kCtrlC);
  terminal.wait_for("^C");
  terminal.wait_for("> ");
  terminal.type("/again\r");
  terminal.wait_for(hello);
  terminal.wait_for("> ");
  terminal.type(kCtrlD);
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Terminal, CtrlCStopsAnAnswerAndTheNextOneIsWhole) {
  Terminal terminal(chat(with_endless({})));
  terminal.wait_for("> ");
  terminal.type("Hello!\r");
  terminal.wait_for(answer_to("Hello!").substr(0, 3));
  terminal.type(kCtrlC);
  terminal.wait_for("stopping; Ctrl-C again ends at once");
  terminal.wait_for("> ");
  terminal.type("/exit\r");
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Terminal, TerminationAtThePromptEndsTheProgram) {
  Terminal terminal(chat());
  terminal.wait_for("> ");
  terminal.send(SIGTERM);
  EXPECT_EQ(terminal.exit_code(), 128 + SIGTERM);
}

TEST(Terminal, AFullContextSaysWhatToDoAndDropsTheOldestTurns) {
  Terminal terminal(chat({"--max-model-len", "200", "--max-tokens", "40", "--ignore-eos"}));
  terminal.wait_for("> ");
  for (int i = 0; i < 3; ++i) {
    terminal.type("What is 3 + 4? " + std::string(40, 'x') + "\r");
    terminal.wait_for("> ");
  }
  terminal.type("What is 3 + 4? " + std::string(60, 'y') + "\r");
  terminal.wait_for("/drop forgets the oldest turns");
  terminal.wait_for("> ");
  terminal.type("/drop\r");
  terminal.wait_for("oldest messages");
  terminal.wait_for("> ");
  terminal.type(kCtrlD);
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Terminal, APromptIsSaidToBeRead) {
  Terminal terminal({"generate", demo_model(), "a"});
  EXPECT_NE(without_escapes(terminal.rest()).find("reading the prompt"), std::string::npos);
  EXPECT_EQ(terminal.exit_code(), 0);
}

// The counts that the line shows while a prompt of 2,001 tokens is read, one a step. The program is
// halted again and again for longer than the line's least age: the next step draws it anew, however
// fast the machine is.
std::vector<int> counts_while_reading() {
  std::string prompt;
  for (int i = 0; i < 2000; ++i) prompt += "a ";
  Terminal terminal({"generate", demo_model(), prompt, "--max-num-batched-tokens", "1",
                     "--max-num-seqs", "1", "--max-tokens", "1"});
  terminal.wait_for("reading the prompt");
  for (int i = 0; i < 4; ++i) {
    terminal.send(SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    terminal.send(SIGCONT);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const std::string seen = without_escapes(terminal.rest()), label = "reading the prompt, ";
  EXPECT_EQ(terminal.exit_code(), 0);
  std::vector<int> counts;
  for (size_t at = seen.find(label); at != seen.npos; at = seen.find(label, at + 1)) {
    counts.push_back(std::stoi(seen.substr(at + label.size())));
    EXPECT_NE(seen.find(" of 2001 tokens", at), seen.npos) << seen;
  }
  return counts;
}

// A test that is kept from the processor misses a program that is not: it looks again.
TEST(Terminal, TheCountOfTokensMovesWhileALongPromptIsRead) {
  std::vector<int> counts;
  for (int i = 0; i < 5 && counts.size() < 2; ++i) counts = counts_while_reading();
  ASSERT_GE(counts.size(), 2u);
  // Once a second the line is drawn for its clock alone.
  EXPECT_TRUE(std::is_sorted(counts.begin(), counts.end()));
  EXPECT_GT(counts.back(), counts.front());
}

// Each time the line is drawn it begins with a carriage return; what wraps could not be taken away.
TEST(Terminal, TheProgressLineFitsTheTerminal) {
  std::vector<std::string> arguments = with_endless({"generate", demo_model()});
  for (int i = 0; i < 8; ++i) arguments.insert(arguments.end(), {"--prompt", "x"});
  Terminal terminal(arguments, 40);
  std::string output = terminal.wait_for("/8 requests");
  output += terminal.wait_for("/8 requests");
  terminal.send(SIGTERM);
  output += terminal.rest();
  int drawn = 0;
  for (size_t begin = output.find("\r\x1b[K"); begin != output.npos;) {
    const size_t end = output.find_first_of("\r\n", begin + 1);
    const std::string line = without_escapes(output.substr(begin, end - begin));
    if (line.find("requests") != line.npos) {
      ++drawn;
      EXPECT_LT(line.size(), 40u) << line;
    }
    begin = output.find("\r\x1b[K", begin + 1);
  }
  EXPECT_GE(drawn, 2);
  EXPECT_EQ(terminal.exit_code(), 1);
}

TEST(Terminal, ADumbTerminalGetsNoEscapeSequences) {
  Terminal terminal(chat(), 80, "dumb");
  terminal.wait_for("> ");
  terminal.type("What is 3 + 4?\n");
  std::string output = terminal.wait_for(answer_to("What is 3 + 4?"));
  output += terminal.wait_for("> ");
  terminal.type(kCtrlD);
  output += terminal.rest();
  EXPECT_EQ(output.find('\x1b'), output.npos);
  EXPECT_EQ(terminal.exit_code(), 0);
}

}  // namespace
}  // namespace nanovllm
