// Ranks that are processes: the built program under mpirun, two of them for real.

#include <cstdlib>

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
  return run_process("/usr/bin/mpirun", all, options);
}

/// In a shell of run_prepared(): rank `rank` does `what` once `file` has something in it, beside
/// the program.
std::string when_written(const std::string& file, int rank, const std::string& what) {
  return fmt::format(
      "if [ $rank = {} ]; then (until [ -s {} ]; do kill -0 $$ || exit; sleep 0.1; done; {}) & fi",
      rank, file, what);
}

constexpr const char* kShortAnswer = R"({"prompt": "a", "sampling_params": {"max_tokens": 1}})";
constexpr const char* kLongAnswer =
    R"({"prompt": "a", "sampling_params": {"max_tokens": 60000, "ignore_eos": true}})";

/// Two ranks' answers to prompts of a file or of standard input. The first one is short: once it is
/// written, the ranks have begun.
struct Answers {
  std::vector<std::string> arguments(const std::string& from, const std::string& device = "cpu") {
    return with_endless({"generate", demo_model(), "--device", device, "--threads", "2",
                         "--max-num-seqs", "2", "--output", output, "--tensor-parallel-size", "2",
                         "--input", from});
  }
  /// A file of prompts of which twenty have long answers.
  std::string input() const {
    std::string lines = std::string(kShortAnswer) + "\n";
    for (int i = 0; i < 20; ++i) lines += std::string(kLongAnswer) + "\n";
    const std::string path = directory.path() / "input.jsonl";
    write_file(path, lines);
    return path;
  }
  const TempDirectory directory;
  const std::string output = directory.path() / "output.jsonl",
                    stopped = directory.path() / "stopped";
};

/// Rank 1 sends itself `signal` in the middle of long answers.
ProcessResult run_with_a_signal(const char* signal, const std::string& device) {
  Answers answers;
  return run_prepared(2, when_written(answers.output, 1, fmt::format("kill -{} $$", signal)),
                      answers.arguments(answers.input(), device));
}

/// mpirun gives processes five seconds to end after SIGTERM (and takes them), not one.
struct PatientMpirun {
  PatientMpirun() { ::setenv("OMPI_MCA_odls_base_sigkill_timeout", "5", 1); }
  ~PatientMpirun() { ::unsetenv("OMPI_MCA_odls_base_sigkill_timeout"); }
};

// mpirun sends every process SIGTERM: rank 0 writes what there is, and the others wait for it.
TEST(Mpi, CtrlCMarksTheRestAborted) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const PatientMpirun patient;
  Answers answers;
  const ProcessResult result = run_prepared(2, when_written(answers.output, 0, "kill -INT $PPID"),
                                            answers.arguments(answers.input()));
  EXPECT_NE(result.exit_code, 0);
  const std::vector<Json> results = json_lines(file_text(answers.output));
  ASSERT_EQ(results.size(), 21u) << result.errors;
  EXPECT_EQ(results.front()["finish_reason"], "length");
  EXPECT_EQ(results.back()["finish_reason"], "abort");
  EXPECT_EQ(result.errors.find("rank 1"), std::string::npos) << result.errors;
}

TEST(Mpi, AServerAnswersLikeGenerateAndEndsWithMpirun) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const PatientMpirun patient;
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
  const ProcessResult result = run_with_a_signal("KILL", "cpu");
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE(result.exit_code, 124) << "it had to be killed: " << result.errors;
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
  expect_end_of_a_stopped_job(run_with_a_signal("STOP", "cpu"));
}

/// One short answer by two ranks, of which one then stops itself. `rest` goes on with rank 0's
/// standard input; in it, `$stopped` is a file that comes with the stop.
ProcessResult run_with_a_stop_behind_an_answer(int rank, const std::string& rest) {
  Answers answers;
  const std::string pipe = answers.directory.path() / "input";
  return run_prepared(
      2, when_written(answers.output, rank, fmt::format("kill -STOP $$; : > {}", answers.stopped)),
      answers.arguments("-"),
      fmt::format("if [ $rank = 0 ]; then stopped={}; mkfifo {}; (echo '{}'; {}) > {} & exec "
                  "\"$@\" < {}; else exec \"$@\"; fi",
                  answers.stopped, pipe, kShortAnswer, rest, pipe, pipe));
}
constexpr const char* kUntilStopped =
    "until [ -e $stopped ]; do kill -0 $$ || exit; sleep 0.1; done";

// It is rank 0's message, the plan of the next step, that nobody takes: it is too long to be sent
// without a receiver.
TEST(Mpi, ARankThatIsStoppedBetweenRequestsEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  expect_end_of_a_stopped_job(run_with_a_stop_behind_an_answer(
      1, fmt::format("{}; echo '{}'", kUntilStopped, kLongAnswer)));
}

/// Short answers of so many ranks, by a model in `directory`.
std::vector<std::string> short_answers(const std::string& directory, int ranks) {
  std::vector<std::string> arguments = kGenerate;
  arguments[1] = directory;
  arguments.insert(arguments.end(), {"--tensor-parallel-size", std::to_string(ranks)});
  return arguments;
}

/// One message, and mpirun's own about it.
void expect_one_message(const ProcessResult& result, const std::string& message) {
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE(result.exit_code, 124) << "it had to be killed";
  const size_t at = result.errors.find("error: ");
  ASSERT_NE(at, std::string::npos) << result.errors;
  EXPECT_EQ(result.errors.substr(at, result.errors.find('\n', at) - at), "error: " + message);
  EXPECT_EQ(result.errors.find("error: ", at + 1), std::string::npos) << result.errors;
}

TEST(Mpi, ARankThatIsStoppedBeforeItStartsEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  expect_one_message(
      run_prepared(2, "[ $rank != 1 ] || kill -STOP $$", short_answers(demo_model(), 2)),
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
  const ProcessResult result =
      run_prepared(2, "[ $rank != 1 ] || kill -KILL $$", short_answers(demo_model(), 2));
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE(result.exit_code, 124) << "it had to be killed";
}

// Rank 0 has joined the others when it maps the weights.
TEST(Mpi, ARankThatIsStoppedAsItLoadsEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const ProcessResult result = run_prepared(
      2, "[ $rank != 0 ] || export LD_PRELOAD=" NANOVLLM_BINARY_DIR "/bin/libstops_at_weights.so",
      short_answers(demo_model(), 2));
  expect_one_message(result,
                     "rank 1 of 2 has waited 6 s for the others to start: rank 0 is stopped");
}

TEST(Mpi, ARankThatIsStoppedWhileThereIsNothingToDoEndsTheOthers) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  // Standard input ends behind the stop, or not before the program does.
  expect_one_message(run_with_a_stop_behind_an_answer(1, kUntilStopped),
                     "rank 0 of 2 has waited 6 s for the others to end: rank 1 is stopped");
  expect_one_message(
      run_with_a_stop_behind_an_answer(0, "while kill -0 $$ 2> /dev/null; do sleep 0.1; done"),
      "rank 1 of 2 has waited 6 s for the next step: rank 0 is stopped");
}

TEST(Mpi, ARankThatIsStoppedEndsTheOthersOnCuda) {
  if (!is_available()) GTEST_SKIP() << "no MPI here";
  const ProcessResult result = run_with_a_signal("STOP", "cuda");
  constexpr int kNoDevice = 4;
  if (result.exit_code == kNoDevice) GTEST_SKIP() << "fewer than two GPUs here";
  expect_end_of_a_stopped_job(result);
}

}  // namespace
}  // namespace nanovllm
