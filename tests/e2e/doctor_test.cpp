// nanovllm doctor and --version: on this machine, on one with a driver that the test makes up, and
// what is made of machines that are not here.

#include <algorithm>

#include <gtest/gtest.h>
#include <sched.h>

#include "cli/about/findings.h"
#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

const fs::path kProgram = fs::path(NANOVLLM_BINARY_DIR) / "bin" / "nanovllm";

TEST(Doctor, ShowsMachineAndModelOnOneScreen) {
  const auto result =
      nanovllm_program({"doctor", demo_model(), "--device", "cpu", "--threads", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(result.errors, "");
  size_t lines = 0;
  for (size_t begin = 0, end; begin < result.output.size(); begin = end + 1, ++lines) {
    end = result.output.find('\n', begin);
    EXPECT_LE(end - begin, 80u) << result.output.substr(begin, end - begin);
  }
  const bool has_gpus = result.output.find("\nok    cuda:0") != std::string::npos;
  EXPECT_LE(lines, has_gpus ? 36u : 24u) << result.output;
  for (const char* name : {"CPU", "memory", "oneDNN", "GPU driver", "CUDA module", "NCCL", "MPI",
                           "grammar", "KV events", "would use   cpu, 2 threads"})
    EXPECT_NE(result.output.find(name), std::string::npos) << name << "\n" << result.output;
}

TEST(Doctor, JsonHasTheFiguresThatTheSystemItselfGives) {
  ProcessOptions options;
  options.environment["OMP_NUM_THREADS"] = "1";
  const auto result =
      nanovllm_program({"doctor", "--device", "cpu", "--threads", "2", "--json"}, options);
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const Json json = Json::parse(result.output);
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  EXPECT_EQ(json["cpu"]["processors"], CPU_COUNT(&allowed));
  EXPECT_EQ(json["cpu"]["threads"], 1);  // OMP_NUM_THREADS
  EXPECT_GT(json["memory"]["free"].get<int64_t>(), 0);
  EXPECT_LE(json["memory"]["free"], json["memory"]["total"]);
  EXPECT_EQ(json["device"].get<std::string>().find("cpu, 2 threads"), 0u);
}

TEST(Doctor, SaysOfAModelWhatInspectSays) {
  const std::vector<std::string> options = {
      demo_model(), "--json", "--device", "cpu", "--num-gpu-blocks-override", "100"};
  const auto with = [&](const char* command) {
    std::vector<std::string> arguments = options;
    arguments.insert(arguments.begin(), command);
    const auto result = nanovllm_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return Json::parse(result.output);
  };
  Json model = with("doctor")["model"], inspected = with("inspect");
  for (Json* json : {&model, &inspected}) (*json)["memory"].erase("available");  // changes
  EXPECT_EQ(inspected.erase("formats"), 1u);  // what else the model could be
  EXPECT_EQ(model, inspected);
}

TEST(Doctor, AnErrorIsPartOfTheReportAndOfTheExitCode) {
  const auto device = nanovllm_program({"doctor", "--device", "cuda:4000"});
  EXPECT_EQ(device.exit_code, 4);
  EXPECT_NE(device.output.find("memory"), std::string::npos);
  EXPECT_NE(device.output.find("FAULT would use   --device cuda:4000"), std::string::npos)
      << device.output;
  EXPECT_EQ(nanovllm_program({"doctor", "/no/such/model", "--device", "cpu"}).exit_code, 3);
}

TEST(Doctor, NamesAModuleThatCannotBeLoaded) {
  const TempDirectory directory;
  fs::copy_file(kProgram, directory.path() / "nanovllm");
  write_file(directory.path() / "libnanovllm-cuda.so", "this is no library");
  const auto result = run_process(directory.path() / "nanovllm", {"doctor", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;  // the CPU does
  bool found = false;
  const Json json = Json::parse(result.output);
  for (const Json& finding : json["findings"]) {
    if (finding["name"] != "CUDA module") continue;
    found = true;
    EXPECT_EQ(finding["status"], "fault");
    EXPECT_NE(finding["text"].get<std::string>().find("cannot be loaded"), std::string::npos);
  }
  EXPECT_TRUE(found);
}

/// The driver's functions as NVIDIA's "CUDA Driver API" declares them, for a machine of two GPUs.
constexpr const char* kDriver = R"(
#include <cstddef>
#include <cstdio>
extern "C" {
int cuInit(unsigned flags) { return flags == 0 ? INIT : 1; }
int cuDriverGetVersion(int* version) { return *version = 12040, 0; }
int cuGetErrorString(int, const char** text) { return *text = "no CUDA-capable device is detected", 0; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = 10 + ordinal, 0; }
int cuDeviceGetName(char* name, int size, int device) { return std::snprintf(name, size, "GPU %d", device), 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = device == 10 ? 1000 : 2000, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return *value = attribute == 75 ? 9 : attribute == 76 ? device - 10 : -1, 0;
}
int cuDeviceCanAccessPeer(int* can, int from, int to) { return *can = from != to, 0; }
}
)";

/// Runs a copy of the program that has no modules of ours beside it, but the library that `source`
/// makes.
ProcessResult with_library(const std::string& name, const std::string& source,
                           const std::vector<std::string>& arguments) {
  const TempDirectory directory;
  const fs::path file = directory.path() / "library.cpp";
  write_file(file, source);
  const auto made = run_process(
      NANOVLLM_CXX, {"-shared", "-fPIC", "-o", (directory.path() / name).string(), file});
  EXPECT_EQ(made.exit_code, 0) << made.errors;
  fs::copy_file(kProgram, directory.path() / "nanovllm");
  ProcessOptions options;
  options.environment["LD_LIBRARY_PATH"] = directory.path().string();
  return run_process(directory.path() / "nanovllm", arguments, options);
}

ProcessResult with_driver(int init, const std::vector<std::string>& arguments) {
  return with_library("libcuda.so.1",
                      "constexpr int INIT = " + std::to_string(init) + ";" + kDriver, arguments);
}

TEST(Doctor, NamesTheMpiBehindTheModule) {
  // As Debian 12's libmpi answers.
  const auto result = with_library("libnanovllm-mpi.so", R"(
#include <cstdio>
extern "C" int MPI_Get_library_version(char* text, int* length) {
  *length = std::sprintf(text, "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4");
  return 0;
}
)",
                                   {"doctor", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(Json::parse(result.output)["libraries"]["MPI"], "Open MPI v4.1.4");
}

TEST(Doctor, ListsTheGpusThatTheDriverShows) {
  const auto result = with_driver(0, {"doctor", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const Json json = Json::parse(result.output);
  EXPECT_EQ(json["driver"]["cuda"], "12.4");
  EXPECT_EQ(json["driver"]["peer_access"], true);
  ASSERT_EQ(json["gpus"].size(), 2u);
  EXPECT_EQ(json["gpus"][1],
            (Json{{"name", "GPU 11"}, {"compute_capability", 9.1}, {"total", 2000}}));
  for (const Json& finding : json["findings"]) {
    if (finding["name"] == "CUDA module") {
      EXPECT_EQ(finding["status"], "fault");  // GPUs lie idle without it
    }
  }
  EXPECT_NE(with_driver(0, {"--version"}).output.find("2 GPUs, the first GPU 10; driver"),
            std::string::npos);
}

TEST(Doctor, SaysWhyADriverShowsNoGpu) {
  const auto result = with_driver(100, {"doctor"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(result.output.find("FAULT GPU driver"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("no CUDA-capable device"), std::string::npos) << result.output;
}

/// The finding of this name.
cli::Finding finding_of(const SystemFacts& facts, const std::string& name) {
  const auto list = cli::findings(facts);
  const auto at =
      std::find_if(list.begin(), list.end(), [&](const auto& f) { return f.name == name; });
  EXPECT_NE(at, list.end()) << name;
  return at == list.end() ? cli::Finding{} : *at;
}

SystemFacts two_gpus() {
  SystemFacts facts;
  facts.cpu.processors = facts.cpu.threads = 2;
  facts.driver = {
      .release = "550.54.15",
      .cuda = 12040,
      .gpus = {{"NVIDIA H200", 90, int64_t{140} << 30}, {"NVIDIA H200", 90, int64_t{140} << 30}},
      .has_peer_access = true};
  facts.module.facts = {.toolkit = 12040,
                        .cublaslt = 120402,
                        .nccl_header = 22005,
                        .architectures = {'s', 'm', '_', '9', '0'}};
  facts.opened.resize(2);
  facts.nccl = 22005;
  facts.mpi = "Open MPI v4.1.4";
  return facts;
}

TEST(Findings, AMachineThatHasAllHasNoFaultAndNoRemedy) {
  for (const cli::Finding& finding : cli::findings(two_gpus())) {
    EXPECT_EQ(finding.status, cli::Status::ok) << finding.name;
    EXPECT_EQ(finding.remedy, "") << finding.name;
  }
  EXPECT_EQ(finding_of(two_gpus(), "cuBLASLt").text, "12.4.2");
  EXPECT_EQ(finding_of(two_gpus(), "CUDA module").text,
            "toolkit 12.4, code for sm_90, NCCL 2.20.5");
}

TEST(Findings, ADriverOlderThanTheModulesToolkitIsNamedWithTheOneThatIsNeeded) {
  SystemFacts facts = two_gpus();
  facts.module.facts.toolkit = 13000;
  const cli::Finding finding = finding_of(facts, "CUDA module");
  EXPECT_EQ(finding.status, cli::Status::fault);
  // CUDA 13's release notes: 580 and later.
  EXPECT_NE(finding.remedy.find("580"), std::string::npos) << finding.remedy;
}

TEST(Findings, AMissingCublasIsToldFromAMissingModule) {
  SystemFacts facts = two_gpus();
  facts.module = {};
  facts.opened.clear();
  facts.module.problem =
      "libnanovllm-cuda.so cannot be loaded: libcublasLt.so.12: cannot open shared object file";
  EXPECT_NE(finding_of(facts, "CUDA module").remedy.find("cuBLAS"), std::string::npos);
  facts.module.problem = "no libnanovllm-cuda.so beside the program";
  EXPECT_EQ(finding_of(facts, "CUDA module").status, cli::Status::fault);
  facts.driver = {.problem = "no NVIDIA driver was found"};
  EXPECT_EQ(finding_of(facts, "CUDA module").status, cli::Status::absent);
  EXPECT_EQ(finding_of(facts, "GPU driver").status, cli::Status::absent);
}

TEST(Findings, NcclIsMissedWhereGpusDoNotReachEachOther) {
  SystemFacts facts = two_gpus();
  facts.nccl = 0;
  EXPECT_EQ(finding_of(facts, "NCCL").status, cli::Status::absent);
  facts.driver.has_peer_access = false;
  EXPECT_EQ(finding_of(facts, "NCCL").status, cli::Status::fault);
  facts.nccl = 22005;
  EXPECT_EQ(finding_of(facts, "NCCL").status, cli::Status::ok);
  facts.module.facts.nccl_header = 0;
  EXPECT_EQ(finding_of(facts, "NCCL").status, cli::Status::fault);
}

TEST(Findings, AGpuThatDoesNotOpenAndThreadsThatShareAProcessorAreFaults) {
  SystemFacts facts = two_gpus();
  facts.opened[1].problem = "out of memory";
  EXPECT_EQ(finding_of(facts, "cuda:0").status, cli::Status::ok);
  EXPECT_EQ(finding_of(facts, "cuda:1").status, cli::Status::fault);
  facts.cpu.threads = 3;
  EXPECT_EQ(finding_of(facts, "CPU").status, cli::Status::fault);
}

TEST(Version, NamesTheCommitCompilerAndWhatIsThere) {
  const auto result = nanovllm_program({"--version"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  for (const char* line :
       {"\nbuilt   ", "\nCPU     oneDNN ", "\nCUDA    ", "\nMPI     ", "\nGPUs    "})
    EXPECT_NE(result.output.find(line), std::string::npos) << line << result.output;
  const size_t open = result.output.find('(');
  if (!fs::exists(NANOVLLM_SOURCE_DIR "/.git")) GTEST_SKIP() << "no repository here";
  ASSERT_LT(open, result.output.find('\n')) << result.output;
  const std::string commit = result.output.substr(open + 1, 7);
  const auto git =
      run_process("/usr/bin/env", {"git", "-C", NANOVLLM_SOURCE_DIR, "cat-file", "-t", commit});
  EXPECT_EQ(git.output, "commit\n") << commit << git.errors;
}

}  // namespace
}  // namespace nanovllm
