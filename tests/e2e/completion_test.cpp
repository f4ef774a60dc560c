// The completions and the manual page that the program writes: each shell itself says what it would
// propose, and the help of each command says what it must.

#include <set>

#include <gtest/gtest.h>

#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

using Words = std::set<std::string>;

ProcessResult shell(const std::string& program, const std::string& script) {
  return run_process("/usr/bin/env", {program, "-c", script});
}

bool is_here(const std::string& program) {
  return shell("sh", "command -v " + program).exit_code == 0;
}

Words split(const std::string& text, char separator) {
  Words words;
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = std::min(text.find(separator, begin), text.size());
    words.insert(text.substr(begin, end - begin));
  }
  return words;
}

/// "-p", "--prompt", ... as `--help` lists them: the first words of its lines.
Words options_in_help(const std::string& command) {
  Words names;
  for (const std::string& line :
       split(shell("sh", NANOVLLM_BINARY_DIR "/bin/nanovllm " + command + " --help").output, '\n'))
    if (line.starts_with("  -"))
      for (const std::string& name : split(line.substr(2, line.find(' ', 2) - 2), ','))
        names.insert(name);
  return names;
}

/// The commands that `--help` lists below `path`, and theirs: "generate", "bench latency".
std::vector<std::string> commands_in_help(const std::string& path = "") {
  const std::string help =
      shell("sh", NANOVLLM_BINARY_DIR "/bin/nanovllm " + path + " --help").output;
  const size_t list = help.find("Subcommands:\n");
  if (list == help.npos) return {path};
  std::vector<std::string> commands;
  for (const std::string& line : split(help.substr(help.find('\n', list) + 1), '\n')) {
    if (!line.starts_with("  ") || line.starts_with("   ")) continue;
    const std::string name = line.substr(2, line.find(' ', 2) - 2);
    for (const std::string& command : commands_in_help(path.empty() ? name : path + " " + name))
      commands.push_back(command);
  }
  return commands;
}

/// The file that holds a shell's completions.
class Completion : public ::testing::Test {
 protected:
  std::string script(const std::string& shell_name) const {
    const auto result = nanovllm_program({"completion", shell_name});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const auto path = directory_.path() / shell_name;
    write_file(path, result.output);
    return path.string();
  }

  /// The words that bash proposes for the last of `words`, which are written as a shell's array.
  Words bash(const std::string& words) const {
    const auto result = shell("bash", "compopt() { :; }; cd " NANOVLLM_SOURCE_DIR "; . " +
                                          script("bash") + "; COMP_WORDS=(nanovllm " + words +
                                          "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _nanovllm; "
                                          "printf '%s\\n' \"${COMPREPLY[@]}\"");
    EXPECT_EQ(result.errors, "");
    Words proposals = split(result.output, '\n');
    proposals.erase("");
    return proposals;
  }

  Words fish(const std::string& line) const {
    const auto result = shell("fish", "cd " NANOVLLM_SOURCE_DIR "; source " + script("fish") +
                                          "; complete -C '" + line + "'");
    EXPECT_EQ(result.errors, "");
    Words proposals;
    for (const std::string& proposal : split(result.output, '\n'))
      proposals.insert(proposal.substr(0, proposal.find('\t')));
    return proposals;
  }

 private:
  TempDirectory directory_;
};

TEST_F(Completion, BashProposesTheOptionsOfEveryCommandAndNoOthers) {
  ASSERT_GE(commands_in_help().size(), 12u);
  for (const std::string& command : commands_in_help())
    EXPECT_EQ(bash(command + " -"), options_in_help(command)) << command;
  EXPECT_EQ(bash("generate --max-t"), Words{"--max-tokens"});
  EXPECT_EQ(bash("be"), Words{"bench"});
  EXPECT_EQ(bash("bench s"), (Words{"startup", "step"}));
}

TEST_F(Completion, BashKnowsWhichValuesMayFollow) {
  EXPECT_EQ(bash("generate --device ''"), (Words{"auto", "cpu", "cuda"}));
  EXPECT_EQ(bash("generate --dtype = b"), Words{"bf16"});
  EXPECT_EQ(bash("generate --dtype ="), (Words{"auto", "bf16", "f32"}));
  EXPECT_EQ(bash("generate --temperature ''"), Words{});
  EXPECT_EQ(bash("generate --input READ"), Words{"README.md"});
  EXPECT_EQ(bash("chat models/d"), Words{"models/demo"});
  // A value that looks like a command is none.
  EXPECT_EQ(bash("generate --prompt bench --max-t"), Words{"--max-tokens"});
}

TEST_F(Completion, FishProposesTheOptionsOfEveryCommandAndTheirValues) {
  if (!is_here("fish")) GTEST_SKIP() << "no fish here";
  for (const std::string& command : commands_in_help()) {
    Words expected;
    for (const std::string& name : options_in_help(command))
      if (name.starts_with("--")) expected.insert(name);
    EXPECT_EQ(fish("nanovllm " + command + " --"), expected) << command;
  }
  EXPECT_EQ(fish("nanovllm bench s"), (Words{"startup", "step"}));
  EXPECT_EQ(fish("nanovllm generate --device "), (Words{"auto", "cpu", "cuda"}));
  EXPECT_EQ(fish("nanovllm chat models/d"), Words{"models/demo/"});
}

TEST_F(Completion, ZshReadsItsFileWhichHasEveryOption) {
  const std::string path = script("zsh"), text = file_text(path);
  for (const std::string& command : commands_in_help()) {
    std::string key = "\n    /" + command + ")\n";
    std::replace(key.begin(), key.end(), ' ', '/');
    key.replace(1, 4, "    ");
    const size_t begin = text.find(key);
    ASSERT_NE(begin, text.npos) << key;
    const std::string section = text.substr(begin, text.find(" ;;\n", begin) - begin);
    for (const std::string& name : options_in_help(command))
      EXPECT_NE(section.find("'*" + name), section.npos) << command << " " << name;
  }
  if (!is_here("zsh")) GTEST_SKIP() << "no zsh here";
  const auto result = shell("zsh", "zsh -n " + path);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
}

TEST(Manual, HasEveryOptionAndNoFaultThatGroffSees) {
  const auto page = nanovllm_program({"man"});
  ASSERT_EQ(page.exit_code, 0) << page.errors;
  for (const std::string& command : commands_in_help())
    for (std::string name : options_in_help(command)) {
      if (name == "--help" || name == "-h") continue;
      for (size_t at = 0; (at = name.find('-', at)) != name.npos; at += 2) name.insert(at, "\\");
      EXPECT_NE(page.output.find("\\fB" + name + "\\fR"), page.output.npos)
          << command << " " << name;
    }
  if (!is_here("groff")) GTEST_SKIP() << "no groff here";
  ProcessOptions options;
  options.input = page.output;
  const auto groff = run_process("/usr/bin/env", {"groff", "-ww", "-man", "-z"}, options);
  EXPECT_EQ(groff.exit_code, 0);
  EXPECT_EQ(groff.errors, "");
}

TEST(Hidden, CommandsForInstallationsAreNotInTheHelpAndRefuseOtherShells) {
  const auto help = nanovllm_program({"--help"});
  EXPECT_EQ(help.output.find("completion"), help.output.npos) << help.output;
  const auto result = nanovllm_program({"completion", "tcsh"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.errors, "error: SHELL must be one of bash, zsh, fish, got \"tcsh\"\n");
}

}  // namespace
}  // namespace nanovllm
