// The fate of results when a run ends early: Ctrl-C, a full disk, a reader that goes away.
#include "cli/terminal/interrupt.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/jsonl/line_reader.h"
#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

std::string request(const std::string& id, int max_tokens) {
  return Json({{"id", id},
               {"prompt_token_ids", {1, 2, 3}},
               {"sampling_params", {{"max_tokens", max_tokens}, {"ignore_eos", true}}}})
             .dump() +
         "\n";
}

/// The built program, under a shell that prepares something first.
ProcessResult run_in_shell(const std::string& script, const std::vector<std::string>& arguments) {
  std::vector<std::string> all = {"-c", script, NANOVLLM_BINARY_DIR "/bin/nanovllm"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return run_process("/bin/sh", all);
}

TEST(Interrupt, CtrlCKeepsFinishedResultsAndMarksTheRestAborted) {
  TempDirectory directory;
  const std::string in = directory.path() / "in.jsonl";
  // One at a time: the first finishes at once, the second would take minutes, the others wait or
  // are not even read.
  std::string requests = request("short", 2) + request("long", 65000);
  for (int i = 0; i < 20; ++i) requests += request("waiting " + std::to_string(i), 5);
  write_file(in, requests);
  ProcessOptions options;
  options.signal_when = [](const std::string& output) { return output.empty() ? 0 : SIGINT; };
  const auto result = nanovllm_program(
      with_endless({"generate", demo_model(), "-q", "--input", in, "--max-num-seqs", "1"}),
      options);
  EXPECT_EQ(result.exit_code, 1) << result.errors;
  const auto lines = result.lines();
  ASSERT_EQ(lines.size(), 22u) << result.output;
  EXPECT_EQ(lines[0]["finish_reason"], "length");
  EXPECT_EQ(lines[1]["id"], "long");
  EXPECT_EQ(lines[1]["finish_reason"], "abort");
  EXPECT_LT(lines[1]["token_ids"].size(), 65000u);
  for (size_t i = 2; i < lines.size(); ++i) EXPECT_EQ(lines[i]["finish_reason"], "abort");
  EXPECT_NE(result.errors.find("interrupted: 21 of 22 requests aborted"), std::string::npos)
      << result.errors;
}

/// The end of a run whose input comes from `producer`, a shell command, when it is interrupted
/// after its first result.
ProcessResult interrupted_reader_of(const std::string& producer) {
  ProcessOptions options;
  options.signal_when = [](const std::string& output) { return output.empty() ? 0 : SIGINT; };
  const std::string script = R"(exec "$0" "$@" --input <( )" + producer + ")";
  return run_process("/bin/bash",
                     {"-c", script, NANOVLLM_BINARY_DIR "/bin/nanovllm", "generate", demo_model(),
                      "-q", "--device", "cpu", "-t", "1", "--max-tokens", "1"},
                     options);
}

TEST(Interrupt, TheFirstCtrlCEndsARunWhoseInputNeverEnds) {
  const std::string first = "echo '" + request("a", 1).substr(0, request("a", 1).size() - 1) + "'";
  const auto requests = interrupted_reader_of(R"(yes '{"prompt": "2 + 3 ="}')");
  EXPECT_EQ(requests.exit_code, 1) << requests.errors;
  EXPECT_NE(requests.errors.find("interrupted: "), std::string::npos) << requests.errors;
  const auto blank_lines = interrupted_reader_of(first + "; yes ''");
  EXPECT_EQ(blank_lines.exit_code, 1) << blank_lines.errors;
  EXPECT_EQ(blank_lines.lines().size(), 1u);
  const auto endless_line = interrupted_reader_of(first + "; cat /dev/zero");
  EXPECT_EQ(endless_line.exit_code, 1) << endless_line.errors;
}

// Between the question whether a signal came and the wait for input, one may come.
TEST(Interrupt, ASignalJustBeforeTheWaitForInputEndsTheWait) {
  TempDirectory directory;
  const std::string path = directory.path() / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const int writer = ::open(path.c_str(), O_RDWR);
  cli::LineReader reader("--input", path);
  std::string line;
  ::alarm(120);  // ends a test that hangs
  {
    const cli::Interrupt interrupt;
    ASSERT_EQ(::raise(SIGTERM), 0);
    EXPECT_EQ(reader.next(line, /*wait=*/true, interrupt.descriptor()),
              cli::LineReader::Result::not_yet);
    EXPECT_EQ(interrupt.signal(), SIGTERM);
  }
  const cli::Interrupt next;  // starts anew
  EXPECT_FALSE(next.requested());
  ASSERT_EQ(::write(writer, "line\n", 5), 5);
  EXPECT_EQ(reader.next(line, true, next.descriptor()), cli::LineReader::Result::line);
  ::alarm(0);
  ::close(writer);
}

TEST(Interrupt, ASecondSignalEndsTheProcessAtOnce) {
  const auto two_signals = [] {
    const cli::Interrupt interrupt;
    (void)::raise(SIGTERM);
    (void)::raise(SIGINT);
    ::_exit(0);
  };
  EXPECT_EXIT(two_signals(), testing::ExitedWithCode(128 + SIGINT), "");
}

TEST(Interrupt, TerminationEndsAStreamedTextCleanly) {
  ProcessOptions options;
  options.signal_when = [](const std::string& output) { return output.empty() ? 0 : SIGTERM; };
  const auto result = nanovllm_program(
      with_endless({"generate", demo_model(), "-q", "--prompt", "Once upon a time"}), options);
  EXPECT_EQ(result.exit_code, 1) << result.errors;
  EXPECT_EQ(result.output.back(), '\n');
}

TEST(Interrupt, AFullDiskIsAnErrorThatNamesTheFile) {
  ProcessOptions options;
  options.input = request("a", 2);
  const auto to_file = nanovllm_program(
      {"generate", demo_model(), "-q", "--input", "-", "--output", "/dev/full"}, options);
  EXPECT_EQ(to_file.exit_code, 1);
  EXPECT_EQ(to_file.errors,
            "error: /dev/full: cannot be written: No space left on device; the results so far are "
            "kept\n");
  options.output_file = "/dev/full";
  const auto to_stdout =
      nanovllm_program({"generate", demo_model(), "-q", "--input", "-"}, options);
  EXPECT_EQ(to_stdout.exit_code, 1);
  EXPECT_NE(to_stdout.errors.find("error: standard output: cannot be written: No space left"),
            std::string::npos);
}

TEST(Interrupt, AFileThatMayNotGrowEndsInACompleteLine) {
  TempDirectory directory;
  const std::string in = directory.path() / "in.jsonl", out = directory.path() / "out.jsonl";
  std::string requests;
  for (int i = 0; i < 50; ++i) requests += request(std::to_string(i), 5);
  write_file(in, requests);
  const auto result = run_in_shell(
      R"(ulimit -f 4; exec "$0" "$@")",
      {"generate", demo_model(), "--device", "cpu", "-q", "--input", in, "--output", out});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.errors,
            "error: " + out + ": cannot be written: File too large; the results so far are kept\n");
  const std::string kept = file_text(out);
  ASSERT_FALSE(kept.empty());
  EXPECT_EQ(kept.back(), '\n') << kept;
  const auto lines = json_lines(kept);
  ASSERT_FALSE(lines.empty());
  for (size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(lines[i]["id"], std::to_string(i));
}

TEST(Interrupt, OutputThatCannotBeCreatedCostsNoModelLoad) {
  const auto result = nanovllm_program(
      {"generate", "/no/such/model", "--prompt", "x", "--output", "/no/such/directory/out.jsonl"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.errors.find("error: --output /no/such/directory/out.jsonl: cannot be written"),
            std::string::npos)
      << result.errors;
}

TEST(Interrupt, ARunThatCannotStartLeavesTheOldResults) {
  TempDirectory directory;
  const std::string file = directory.path() / "out.jsonl";
  write_file(file, "results of yesterday\n");
  EXPECT_EQ(
      nanovllm_program({"generate", "/no/such/model", "-q", "--prompt", "x", "--output", file})
          .exit_code,
      3);
  EXPECT_EQ(file_text(file), "results of yesterday\n");
  const std::string none = directory.path() / "none.jsonl";
  EXPECT_EQ(
      nanovllm_program({"generate", "/no/such/model", "-q", "--prompt", "x", "--output", none})
          .exit_code,
      3);
  EXPECT_FALSE(std::filesystem::exists(none));
  // One that has no results leaves none, and one that has some leaves those alone.
  EXPECT_EQ(
      nanovllm_program({"generate", demo_model(), "-q", "--input", "/dev/null", "--output", file})
          .exit_code,
      0);
  EXPECT_EQ(file_text(file), "");
  write_file(file, std::string(100'000, 'x') + "\n");
  EXPECT_EQ(nanovllm_program({"generate", demo_model(), "-q", "--prompt", "x", "--max-tokens", "1",
                              "--output", file})
                .exit_code,
            0);
  EXPECT_EQ(json_lines(file_text(file)).size(), 1u);
}

// /dev/full stands for a full disk and, as far as the program can tell, for "2>&1 | head".
TEST(Interrupt, NotesAndErrorsThatNobodyCanReadCostNothing) {
  const auto with_errors_lost = [](const std::vector<std::string>& arguments) {
    return run_in_shell(R"(exec "$0" "$@" 2>/dev/full)", arguments);
  };
  const auto good = with_errors_lost(
      {"generate", demo_model(), "--device", "cpu", "--prompt", "x", "--max-tokens", "1"});
  EXPECT_EQ(good.exit_code, 0);
  EXPECT_NE(good.output, "");
  EXPECT_EQ(with_errors_lost({"generate", "/no/such/model", "--prompt", "x"}).exit_code, 3);
}

// The next file to be opened would take the place of a standard descriptor that is closed.
TEST(Interrupt, WhatIsSaidToAClosedStandardErrorIsInNoResult) {
  TempDirectory directory;
  const std::string file = directory.path() / "out.jsonl";
  const auto result = run_in_shell(R"(exec "$0" "$@" 2>&-)",
                                   {"generate", demo_model(), "--device", "cpu", "--prompt", "x",
                                    "--max-tokens", "1", "--output", file});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(file_text(file).substr(0, 7), "{\"id\":0");
  const auto no_output = run_in_shell(R"(exec "$0" "$@" >&-)", {"tokenize", demo_model(), "x"});
  EXPECT_EQ(no_output.exit_code, 1);
  EXPECT_NE(no_output.errors.find("standard output: cannot be written"), std::string::npos);
}

TEST(Interrupt, AnInputThatWasNotReadToItsEndIsNoSuccess) {
  ProcessOptions options;
  options.input = request("a", 2);
  options.keep_input_open = true;
  options.signal_when = [](const std::string& output) { return output.empty() ? 0 : SIGTERM; };
  const auto result = nanovllm_program({"generate", demo_model(), "-q", "--input", "-"}, options);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.lines().size(), 1u);
  EXPECT_EQ(result.errors, "note: interrupted: the input was not read to its end\n");
}

TEST(Interrupt, OutputMayNotBeAFileOfTheModel) {
  TempDirectory directory;
  for (const char* file : {"config.json", "model.safetensors"})
    std::filesystem::copy_file(std::filesystem::path(demo_model()) / file, directory.path() / file);
  const std::string model = directory.path();
  std::filesystem::create_symlink("model.safetensors", directory.path() / "link");
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"generate", model, "--prompt", "x", "-o", model + "/model.safetensors"}, "--output"},
      {{"generate", model, "--prompt", "x", "-o", model + "/./link"}, "--output"},
      {{"bench", "latency", model, "--json", model + "/config.json"}, "--json"}};
  for (const auto& [arguments, option] : cases) {
    const auto result = nanovllm_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.errors;
    EXPECT_NE(result.errors.find("error: " + option), std::string::npos) << result.errors;
    EXPECT_NE(result.errors.find("of the model: give another file"), std::string::npos);
  }
  for (const char* file : {"config.json", "model.safetensors"})
    EXPECT_EQ(file_text(directory.path() / file), file_text(demo_model() + "/" + file)) << file;
}

TEST(Interrupt, OutputMayNotBeTheInput) {
  TempDirectory directory;
  const std::string file = directory.path() / "both.jsonl";
  write_file(file, request("a", 2));
  const auto result =
      nanovllm_program({"generate", demo_model(), "--input", file, "--output", file});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.errors.find("--output is the file of --input"), std::string::npos)
      << result.errors;
  EXPECT_EQ(file_text(file), request("a", 2));
}

}  // namespace
}  // namespace nanovllm
