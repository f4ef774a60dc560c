// Devices and processes that have less than what is asked for.
#include <gtest/gtest.h>
#include <unistd.h>

#include "e2e/process.h"

namespace nanovllm {
namespace {

// Also where oneDNN, which does not survive an allocation of its own that fails, could not start.
TEST(BadDevice, LimitsOfTheProcessAreNamed) {
  for (int limit = 280'000; limit <= 400'000; limit += 20'000) {
    const auto memory = run_process(
        "/bin/bash",
        {"-c",
         "ulimit -v " + std::to_string(limit) + R"(; exec "$0" generate "$1" -q x --device cpu)",
         NANOVLLM_BINARY_DIR "/bin/nanovllm", demo_model()});
    EXPECT_EQ(memory.exit_code, 4) << limit << ' ' << memory.errors;
    EXPECT_NE(memory.errors.find("(ulimit -v)"), std::string::npos) << memory.errors;
  }
}

/// The program with four CPU threads as a user who may have so many threads. A user of its own,
/// where this one may change: the superuser has no such limit, and anybody's other processes count.
ProcessResult with_most_threads(int most, const std::string& arguments) {
  const std::string user = ::geteuid() == 0 ? "setpriv --reuid=61234 --clear-groups " : "";
  return run_process("/bin/bash", {"-c",
                                   "exec " + user + "bash -c 'ulimit -u " + std::to_string(most) +
                                       "; exec \"$0\" " + arguments + "' \"$0\" \"$1\"",
                                   NANOVLLM_BINARY_DIR "/bin/nanovllm", demo_model()});
}

TEST(BadDevice, ThreadsThatCannotBeStartedAreOneLineWithTheRemedy) {
  if (with_most_threads(1, "--version").exit_code != 0)
    GTEST_SKIP() << "no other user may run the program";
  const auto expect_refusal = [](const ProcessResult& result) {
    EXPECT_EQ(result.exit_code, 4);
    const size_t error = result.errors.find("error: ");
    ASSERT_NE(error, std::string::npos) << result.errors;
    EXPECT_EQ(std::count(result.errors.begin() + static_cast<ptrdiff_t>(error), result.errors.end(),
                         '\n'),
              1)
        << result.errors;
    EXPECT_NE(result.errors.find("(ulimit -u)", error), std::string::npos) << result.errors;
    EXPECT_EQ(result.errors.find("libgomp"), std::string::npos) << result.errors;
  };
  for (const int most : {1, 2, 3}) {  // the threads that load, and those that compute
    SCOPED_TRACE(most);
    expect_refusal(
        with_most_threads(most, "generate \"$1\" x -q --device cpu -t 4 --max-tokens 1"));
    expect_refusal(with_most_threads(most, "serve \"$1\" -q --device cpu -t 4 --port 0"));
  }
  if (::geteuid() != 0) return;
  const ProcessResult enough =
      with_most_threads(32, "generate \"$1\" x -q --device cpu -t 4 --max-tokens 1");
  EXPECT_EQ(enough.exit_code, 0) << enough.errors;
}

TEST(BadDevice, NoGpuIsExitCodeFourAndAWayOut) {
  ProcessOptions options;
  options.environment = {{"CUDA_VISIBLE_DEVICES", ""}};
  const auto result =
      nanovllm_program({"generate", demo_model(), "--prompt", "x", "--device", "cuda"}, options);
  EXPECT_EQ(result.exit_code, 4) << result.errors;
  EXPECT_NE(result.errors.find("cpu"), std::string::npos) << result.errors;
}

TEST(BadDevice, NotEnoughMemoryIsATableWithThreeWaysOut) {
  // A KV cache of six terabytes.
  const auto result =
      nanovllm_program({"generate", demo_model(), "--prompt", "x", "--num-gpu-blocks-override",
                        "8000000", "--block-size", "256"});
  EXPECT_EQ(result.exit_code, 4) << result.errors;
  for (const char* fragment : {"error: ", "weights", "KV cache", "available"})
    EXPECT_NE(result.errors.find(fragment), std::string::npos)
        << fragment << " is not in: " << result.errors;
  EXPECT_GE(std::count(result.errors.begin(), result.errors.end(), '\n'), 6) << result.errors;
}

}  // namespace
}  // namespace nanovllm
