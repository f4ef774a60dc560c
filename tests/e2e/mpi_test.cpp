// Ranks that are processes: the built program under mpirun, two of them for real.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

std::filesystem::path program() {
  return std::filesystem::path(NANOVLLM_BINARY_DIR) / "bin/nanovllm";
}

bool is_available() {
  return std::filesystem::exists("/usr/bin/mpirun") &&
         std::filesystem::exists(program().parent_path() / "libnanovllm-mpi.so");
}

constexpr int kNotHere = 77;  // of two_hosts.sh

ProcessResult run(int processes, std::vector<std::string> arguments,
                  const ProcessOptions& options = {}) {
  std::vector<std::string> all = {"--oversubscribe",         "--bind-to",       "none", "-np",
                                  std::to_string(processes), program().string()};
  all.insert(all.end(), arguments.begin(), arguments.end());
  ProcessOptions more = options;
  more.environment["OMPI_ALLOW_RUN_AS_ROOT"] = more.environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] =
      "1";
  more.environment["OMP_WAIT_POLICY"] = "passive";
  return run_process("/usr/bin/mpirun", all, more);
}

const std::vector<std::string> kGenerate = {"generate",
                                            demo_model(),
                                            "--quiet",
                                            "--device",
                                            "cpu",
                                            "--dtype",
                                            "f32",
                                            "--threads",
                                            "2",
                                            "--temperature",
                                            "0",
                                            "--max-tokens",
                                            "24",
                                            "--logprobs",
                                            "2",
                                            "--prompt",
                                            "What is paged attention?"};

TEST(Mpi, TwoProcessesAnswerLikeOne) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  std::vector<std::string> arguments = kGenerate;
  arguments.insert(arguments.end(), {"--tensor-parallel-size", "2"});
  const ProcessResult two = run(2, arguments), again = run(2, arguments),
                      one = run_process(program(), kGenerate);
  ASSERT_EQ(two.exit_code, 0) << two.errors;
  ASSERT_EQ(one.exit_code, 0) << one.errors;
  ASSERT_EQ(two.lines().size(), 1u) << two.output;
  const Json a = two.lines()[0], b = one.lines()[0];
  EXPECT_EQ(a["token_ids"], b["token_ids"]);
  for (size_t i = 0; i < b["logprobs"].size(); ++i)
    EXPECT_NEAR(a["logprobs"][i][0]["logprob"].get<double>(),
                b["logprobs"][i][0]["logprob"].get<double>(), 1e-4);
  EXPECT_EQ(again.lines().at(0)["logprobs"], a["logprobs"]) << "bit for bit";
}

// Across hosts: sums and plans go over TCP between two addresses, and each rank has a host's
// threads.
TEST(Mpi, TwoHostsAnswerLikeOne) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  std::vector<std::string> arguments = kGenerate;
  arguments.insert(arguments.end(), {"--tensor-parallel-size", "2"});
  const ProcessResult one = run(2, arguments);
  arguments.insert(arguments.begin(), program().string());
  ProcessOptions options;
  options.environment = {{"OMP_WAIT_POLICY", "passive"}};
  const ProcessResult two =
      run_process(NANOVLLM_SOURCE_DIR "/tests/e2e/two_hosts.sh", arguments, options);
  if (two.exit_code == kNotHere) GTEST_SKIP() << "this machine allows no network namespaces";
  ASSERT_EQ(two.exit_code, 0) << two.errors;
  ASSERT_EQ(two.lines().size(), 1u) << two.output;
  EXPECT_EQ(two.lines()[0]["token_ids"], one.lines().at(0)["token_ids"]);
  EXPECT_EQ(two.lines()[0]["logprobs"], one.lines().at(0)["logprobs"]) << "bit for bit";
}

TEST(Mpi, TheNumbersOfProcessesAndRanksMustAgree) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const ProcessResult result = run(2, kGenerate);
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE(result.errors.find("mpirun started 2 processes, but --tensor-parallel-size is 1"),
            std::string::npos)
      << result.errors;
}

/// `processes` of the program, each started by a shell in which `prepare` runs first; it knows its
/// rank and its process, whose the program's will be.
ProcessResult run_prepared(int processes, const std::string& prepare,
                           const std::vector<std::string>& arguments,
                           const std::string& run = "exec \"$@\"") {
  std::vector<std::string> all = {"--oversubscribe",
                                  "--bind-to",
                                  "none",
                                  "-np",
                                  std::to_string(processes),
                                  "sh",
                                  "-c",
                                  "rank=$OMPI_COMM_WORLD_RANK; " + prepare + "; " + run,
                                  "sh",
                                  program().string()};
  all.insert(all.end(), arguments.begin(), arguments.end());
  ProcessOptions options;
  options.environment = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                         {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                         {"OMP_WAIT_POLICY", "passive"}};
  options.time_limit = std::chrono::seconds(60);
  return run_process("/usr/bin/mpirun", all, options);
}

// A rank that dies or stops: both programs run `both`, and rank 1 sends itself `signal` after
// `seconds`; rank 0's standard input comes from `from`.
ProcessResult run_with_a_signal(const std::vector<std::string>& both, const char* signal,
                                const char* seconds, const std::string& from = "true") {
  return run_prepared(
      2, fmt::format("if [ $rank = 1 ]; then (sleep {}; kill -{} $$) & fi", seconds, signal), both,
      fmt::format("if [ $rank = 1 ]; then exec \"$@\"; else ({}) | \"$@\"; fi", from));
}

/// Arguments for long answers to the prompts of `input`, a file of many or standard input.
std::vector<std::string> long_answers(const std::string& input, const std::string& device) {
  return {"generate", demo_model(), "--device", device, "--threads", "2", "--tensor-parallel-size",
          "2",        "--input",    input};
}

constexpr const char* kLongAnswer =
    R"({"prompt": "a", "sampling_params": {"max_tokens": 1900, "ignore_eos": true}})";

/// A file of prompts for long answers, more than there is time for.
struct ManyPrompts {
  ManyPrompts() {
    std::string lines;
    for (int i = 0; i < 20'000; ++i) lines += std::string(kLongAnswer) + "\n";
    write_file(path(), lines);
  }
  std::string path() const { return (directory.path() / "input.jsonl").string(); }
  const TempDirectory directory;
};

// mpirun sends every process SIGTERM: rank 0 writes what there is, and the others wait for it.
TEST(Mpi, CtrlCMarksTheRestAborted) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const TempDirectory directory;
  const std::string in = directory.path() / "in.jsonl", out = directory.path() / "out.jsonl";
  std::string lines = R"({"prompt": "a", "sampling_params": {"max_tokens": 1}})"
                      "\n";
  for (int i = 0; i < 20; ++i) lines += std::string(kLongAnswer) + "\n";
  write_file(in, lines);
  std::vector<std::string> arguments = long_answers(in, "cpu");
  arguments.insert(arguments.end(), {"--output", out, "--max-num-seqs", "2"});
  const ProcessResult result = run_prepared(
      2,
      fmt::format(
          "if [ $rank = 0 ]; then (until [ -s {} ]; do sleep 0.1; done; kill -INT $PPID) & fi",
          out),
      arguments);
  EXPECT_NE(result.exit_code, 0);
  const std::vector<Json> results = json_lines(file_text(out));
  ASSERT_EQ(results.size(), 21u) << result.errors;
  EXPECT_EQ(results.front()["finish_reason"], "length");
  EXPECT_EQ(results.back()["finish_reason"], "abort");
  EXPECT_EQ(result.errors.find("rank 1"), std::string::npos) << result.errors;
}

TEST(Mpi, AServerAnswersLikeGenerateAndEndsWithMpirun) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const TempDirectory directory;
  const std::string socket = directory.path() / "s", out = directory.path() / "answer";
  const std::string client = fmt::format(
      R"(if [ $rank = 0 ]; then (
           until curl -sf --unix-socket {0} http://localhost/health; do sleep 0.1; done >&2
           curl -s --unix-socket {0} http://localhost/v1/completions -H 'Content-Type: application/json' \
             -d '{{"prompt": "What is paged attention?", "temperature": 0, "max_tokens": 24}}' > {1}
           kill -TERM $PPID) & fi)",
      socket, out);
  const ProcessResult result =
      run_prepared(2, client,
                   {"serve", demo_model(), "--device", "cpu", "--dtype", "f32", "--threads", "2",
                    "--tensor-parallel-size", "2", "--uds", socket});
  const ProcessResult one = run_process(program(), kGenerate);
  ASSERT_EQ(one.exit_code, 0) << one.errors;
  ASSERT_FALSE(file_text(out).empty()) << result.errors;
  EXPECT_EQ(Json::parse(file_text(out))["choices"][0]["text"], one.lines().at(0)["text"]);
  EXPECT_NE(result.errors.find("stopping"), std::string::npos) << result.errors;
  EXPECT_EQ(result.errors.find("error:"), std::string::npos) << result.errors;
}

// In the middle of long answers; mpirun names the rank.
TEST(Mpi, ARankThatDiesEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const ManyPrompts prompts;
  const auto begin = std::chrono::steady_clock::now();
  const ProcessResult result = run_with_a_signal(long_answers(prompts.path(), "cpu"), "KILL", "3");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  EXPECT_NE(result.exit_code, 0);
  for (const char* part : {"rank 1", "signal 9"})
    EXPECT_NE(result.errors.find(part), std::string::npos) << result.errors;
}

void expect_end_of_a_stopped_job(const ProcessResult& result) {
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE(result.exit_code, 124) << "it had to be killed: " << result.errors;
  for (const char* part : {"rank 0", "has waited 8 s"})
    EXPECT_NE(result.errors.find(part), std::string::npos) << result.errors;
}

TEST(Mpi, ARankThatIsStoppedEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const ManyPrompts prompts;
  expect_end_of_a_stopped_job(run_with_a_signal(long_answers(prompts.path(), "cpu"), "STOP", "3"));
}

// It is rank 0's message, the plan of the first step, that nobody takes: it is too long to be sent
// without a receiver.
TEST(Mpi, ARankThatIsStoppedBetweenRequestsEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  expect_end_of_a_stopped_job(run_with_a_signal(long_answers("-", "cpu"), "STOP", "3",
                                                fmt::format("sleep 5; echo '{}'", kLongAnswer)));
}

/// Short answers of so many ranks, by a model in `directory`.
std::vector<std::string> short_answers(const std::string& directory, int ranks) {
  std::vector<std::string> arguments = kGenerate;
  arguments[1] = directory;
  arguments.insert(arguments.end(), {"--tensor-parallel-size", std::to_string(ranks)});
  return arguments;
}

/// One message, soon after `begin`, and mpirun's own about it.
void expect_one_message(const ProcessResult& result, std::chrono::steady_clock::time_point begin,
                        const std::string& message) {
  constexpr std::chrono::seconds kLimit{10}, kMpirun{3};  // to start, and to end what is stopped
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLimit + kMpirun);
  EXPECT_NE(result.exit_code, 0);
  const size_t at = result.errors.find("error: ");
  ASSERT_NE(at, std::string::npos) << result.errors;
  EXPECT_EQ(result.errors.substr(at, result.errors.find('\n', at) - at), "error: " + message);
  EXPECT_EQ(result.errors.find("error: ", at + 1), std::string::npos) << result.errors;
}

TEST(Mpi, ARankThatIsStoppedBeforeItStartsEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const auto begin = std::chrono::steady_clock::now();
  expect_one_message(
      run_prepared(2, "[ $rank != 1 ] || kill -STOP $$", short_answers(demo_model(), 2)), begin,
      "rank 0 of 2 has waited 6 s for the others to start: rank 1 is stopped");
}

TEST(Mpi, ARankOfFourThatIsStoppedIsNamed) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const ProcessResult result =
      run_prepared(4, "[ $rank != 0 ] || kill -STOP $$", short_answers(demo_model(), 4));
  EXPECT_NE(result.exit_code, 124) << "it had to be killed";
  EXPECT_NE(result.errors.find("of 4 has waited 6 s for the others to start: rank 0 is stopped\n"),
            std::string::npos)
      << result.errors;
}

// mpirun sees it, and mostly says which.
TEST(Mpi, ARankThatDiesBeforeItStartsEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const auto begin = std::chrono::steady_clock::now();
  const ProcessResult result =
      run_prepared(2, "[ $rank != 1 ] || kill -KILL $$", short_answers(demo_model(), 2));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_NE(result.exit_code, 0);
}

// Rank 0 has joined the others when it maps the weights.
TEST(Mpi, ARankThatIsStoppedAsItLoadsEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const auto begin = std::chrono::steady_clock::now();
  const ProcessResult result =
      run_prepared(2,
                   "if [ $rank = 0 ]; then (until grep -q safetensors /proc/$$/maps; do :; done; "
                   "kill -STOP $$) & fi",
                   short_answers(demo_model(), 2));
  expect_one_message(result, begin,
                     "rank 1 of 2 has waited 6 s for the others to start: rank 0 is stopped");
}

TEST(Mpi, ARankThatIsStoppedWhileThereIsNothingToDoEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  struct Case {
    int stopped;
    const char *input_seconds, *message;
  };
  // Standard input is empty, and ends after a while or not in time.
  for (const Case& c :
       {Case{1, "4", "rank 0 of 2 has waited 6 s for the others to end: rank 1 is stopped"},
        Case{0, "25", "rank 1 of 2 has waited 6 s for the next step: rank 0 is stopped"}}) {
    SCOPED_TRACE(c.message);
    const TempDirectory directory;
    const std::string pipe = (directory.path() / "input").string();
    const auto stops = std::chrono::steady_clock::now() + std::chrono::seconds(4);
    expect_one_message(
        run_prepared(
            2, fmt::format("if [ $rank = {} ]; then (sleep 3; kill -STOP $$) & fi", c.stopped),
            long_answers("-", "cpu"),
            fmt::format("if [ $rank = 0 ]; then mkfifo {0}; sleep {1} > {0} 2> /dev/null & exec "
                        "\"$@\" < {0}; else exec \"$@\"; fi",
                        pipe, c.input_seconds)),
        stops, c.message);
  }
}

TEST(Mpi, ARankThatIsStoppedEndsTheOthersOnCuda) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const ManyPrompts prompts;
  const ProcessResult result = run_with_a_signal(long_answers(prompts.path(), "cuda"), "STOP", "6");
  constexpr int kNoDevice = 4;
  if (result.exit_code == kNoDevice) GTEST_SKIP() << "fewer than two GPUs here";
  expect_end_of_a_stopped_job(result);
}

}  // namespace
}  // namespace nanovllm
