// A tool's command, run as chat --tools runs it.
#include "cli/tools/run_command.h"

#include <csignal>
#include <cstdlib>

#include <gtest/gtest.h>

#include "e2e/running.h"

namespace nanovllm::cli {
namespace {

const std::vector<std::string> shell(const std::string& script) { return {"sh", "-c", script}; }

TEST(RunCommand, GivesArgumentsOnStandardInputAndTakesStandardOutput) {
  const Interrupt interrupt;
  const CommandResult result = run_command({"cat"}, "{\"a\": 1}\n", interrupt);
  EXPECT_EQ(result.output, "{\"a\": 1}\n");
  EXPECT_EQ(result.problem, "");
}

TEST(RunCommand, HasNoShell) {
  const Interrupt interrupt;
  EXPECT_EQ(run_command({"echo", "$(id) `id`; a  b", "*"}, "", interrupt).output,
            "$(id) `id`; a  b *\n");
}

TEST(RunCommand, SaysWhatWentWrong) {
  const Interrupt interrupt;
  EXPECT_EQ(run_command(shell("echo so; echo no >&2; exit 3"), "", interrupt).problem,
            "ended with the exit code 3: no ");
  EXPECT_EQ(run_command(shell("kill -9 $$"), "", interrupt).problem, "ended by signal 9");
  EXPECT_EQ(run_command({"/no/such/program"}, "", interrupt).problem,
            "/no/such/program cannot be run: No such file or directory");
}

TEST(RunCommand, InputThatNobodyReadsIsNoProblem) {
  std::signal(SIGPIPE, SIG_IGN);  // as the program does
  const Interrupt interrupt;
  EXPECT_EQ(run_command({"true"}, std::string(1 << 20, 'x'), interrupt).problem, "");
}

TEST(RunCommand, OutputIsUtf8WhateverTheBytes) {
  const Interrupt interrupt;
  EXPECT_EQ(run_command(shell("printf 'a\\377\\303'"), "", interrupt).output,
            "a\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST(RunCommand, SeesNoKeysAndNoTerminal) {
  ::setenv("HF_TOKEN", "hidden", 1);
  ::setenv("NANOVLLM_API_KEY", "hidden", 1);
  const Interrupt interrupt;
  const std::string seen = run_command({"env"}, "", interrupt).output;
  EXPECT_NE(seen.find("PATH="), std::string::npos);
  EXPECT_EQ(seen.find("hidden"), std::string::npos) << seen;
  EXPECT_NE(run_command(shell(": </dev/tty"), "", interrupt).problem, "");
  EXPECT_EQ(run_command(shell("ls /proc/self/fd | wc -l"), "", interrupt).output,
            "4\n");  // and ls's
}

TEST(RunCommand, EndsAtItsLimitsWithAllOfItsProcesses) {
  const Interrupt interrupt;
  CommandLimits limits{.time = std::chrono::milliseconds(2000), .output_bytes = 1 << 16};
  CommandResult slow;
  // A shell may not have begun in time.
  for (int tries = 0; tries < 30 && slow.output.empty(); ++tries) {
    slow = run_command(shell("sleep 600 & echo $!; exec sleep 600"), "", interrupt, limits);
    EXPECT_EQ(slow.problem, "took longer than 2 s");
  }
  EXPECT_TRUE(soon_ends(std::stoi(slow.output)));
  limits.time = std::chrono::minutes(5);
  const CommandResult loud = run_command({"yes"}, "", interrupt, limits);
  EXPECT_EQ(loud.problem, "wrote more than 64 KiB");
  EXPECT_EQ(run_command(shell("head -c 65536 /dev/zero"), "", interrupt, limits).problem, "");
}

TEST(RunCommand, LeavesNothingBehindThatRuns) {
  const Interrupt interrupt;
  const CommandResult result = run_command(shell("sleep 600 & echo $!"), "", interrupt);
  EXPECT_EQ(result.problem, "");
  EXPECT_TRUE(soon_ends(std::stoi(result.output)));
}

TEST(RunCommand, ASignalEndsIt) {
  const Interrupt interrupt;
  ::raise(SIGINT);
  EXPECT_EQ(run_command({"sleep", "600"}, "", interrupt).problem, "stopped by the user");
}

}  // namespace
}  // namespace nanovllm::cli
