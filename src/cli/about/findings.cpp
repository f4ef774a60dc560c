#include "cli/about/findings.h"

#include <fmt/format.h>

#include "cli/terminal/table.h"

namespace nanovllm::cli {
namespace {

constexpr const char* kInstallDriver =
    "for a GPU, install NVIDIA's driver; a container needs --gpus all";

Finding cpu_finding(const CpuFacts& cpu) {
  Finding f{.name = "CPU"};
  f.text = fmt::format("{}, {} processor{}, {} thread{}{}",
                       cpu.model.empty() ? "unknown" : cpu.model, cpu.processors,
                       cpu.processors == 1 ? "" : "s", cpu.threads, cpu.threads == 1 ? "" : "s",
                       cpu.threads_from_environment ? " (OMP_NUM_THREADS)" : "");
  if (cpu.l3_bytes > 0) f.text += fmt::format(", L3 {}", binary_size(cpu.l3_bytes));
  f.text += fmt::format("; {}", fmt::join(cpu.features, " "));
  if (cpu.processors > 0 && cpu.threads > cpu.processors) {
    f.status = Status::fault;
    f.remedy = fmt::format(
        "set OMP_NUM_THREADS to {} or less, or unset it: threads that share a "
        "processor wait for each other",
        cpu.processors);
  }
  return f;
}

Finding memory_finding(const CpuFacts& cpu) {
  return {.name = "memory",
          .text = fmt::format("{} of {} free", binary_size(cpu.free_bytes),
                              binary_size(cpu.total_bytes))};
}

Finding driver_finding(const SystemFacts& facts) {
  const GpuDriver& driver = facts.driver;
  Finding f{.name = "GPU driver"};
  if (driver.cuda > 0) {
    f.text = (driver.release.empty() ? "" : driver.release + ", ") +
             fmt::format("CUDA {}", cuda_version(driver.cuda));
    if (!driver.problem.empty()) f.text += "; " + driver.problem;
  } else {
    f.text = driver.problem;
  }
  if (driver.problem.empty()) return f;
  const bool nothing = driver.release.empty() && driver.cuda == 0;
  f.status = nothing ? Status::absent : Status::fault;
  f.remedy = nothing ? kInstallDriver
                     : "see whether nvidia-smi lists a GPU; a container needs --gpus all, a new "
                       "driver a reboot, and CUDA_VISIBLE_DEVICES may hide GPUs";
  return f;
}

Finding gpu_finding(const SystemFacts& facts, size_t i) {
  const GpuFacts& gpu = facts.driver.gpus[i];
  Finding f{.name = fmt::format("cuda:{}", i)};
  f.text = fmt::format("{}, compute capability {}.{}, {}", gpu.name, gpu.capability / 10,
                       gpu.capability % 10, binary_size(gpu.total_bytes));
  if (i >= facts.opened.size()) return f;
  const OpenedGpu& opened = facts.opened[i];
  if (opened.problem.empty()) {
    f.text += fmt::format(", {} free", binary_size(opened.free_bytes));
  } else {
    f.status = Status::fault;
    f.text += "; " + opened.problem;
    f.remedy = gpu.capability < 80 ? "GPUs before Ampere (compute capability 8.0) are not supported"
                                   : "build with -DNANOVLLM_CUDA_ARCHITECTURES=all where it has no "
                                     "code for this GPU; free its memory where it has none left";
  }
  return f;
}

/// The driver that CUDA's major version needs at least.
int driver_for(int toolkit) { return toolkit >= 13000 ? 580 : 525; }

Finding module_finding(const SystemFacts& facts) {
  const CudaModule& module = facts.module;
  const bool has_gpu = !facts.driver.gpus.empty();
  Finding f{.name = "CUDA module"};
  if (!module.problem.empty()) {
    const bool missing = module.problem.starts_with("no ");
    f.status = missing && !has_gpu ? Status::absent : Status::fault;
    f.text = module.problem;
    if (missing)
      f.remedy =
          "for a GPU, build where nvcc 12.4 or later is (cmake --preset cuda), or install "
          "the package nanovllm-cuda";
    else if (module.problem.find("libcublas") != module.problem.npos)
      f.remedy =
          "install cuBLAS of that version (the CUDA toolkit, or its package libcublas), or "
          "put its folder into LD_LIBRARY_PATH";
    else
      f.remedy = "install the program and the module from one build";
    return f;
  }
  f.text = module_contents(module.facts);
  if (has_gpu && facts.driver.cuda / 1000 < module.facts.toolkit / 1000) {
    f.status = Status::fault;
    f.remedy = fmt::format("install a driver for CUDA {} ({} or later), or build with CUDA {}",
                           module.facts.toolkit / 1000, driver_for(module.facts.toolkit),
                           facts.driver.cuda / 1000);
  }
  return f;
}

Finding nccl_finding(const SystemFacts& facts) {
  const bool needed = facts.driver.gpus.size() > 1 && !facts.driver.has_peer_access;
  const bool compiled_in = facts.module.facts.nccl_header > 0;
  Finding f{.name = "NCCL"};
  f.text = facts.nccl > 0 ? library_version(facts.nccl) : "no libnccl.so.2";
  if (facts.nccl > 0 && facts.module.problem.empty() && !compiled_in)
    f.text += ", which the CUDA module was built without";
  if (facts.driver.gpus.size() > 1)
    f.text += facts.driver.has_peer_access ? "; the GPUs reach each other's memory without it"
                                           : "; the GPUs do not reach each other's memory";
  if (facts.nccl > 0 && (compiled_in || !needed)) return f;
  f.status = needed ? Status::fault : Status::absent;
  f.remedy = facts.nccl > 0
                 ? "build the CUDA module where nccl.h is (libnccl-dev)"
                 : "GPUs without NVLink or peer access, and ranks under mpirun, need it: "
                   "install libnccl2";
  return f;
}

/// A module that is looked for at run time, and that not every build has.
struct OptionalModule {
  const char* name;
  bool is_there;
  std::string library, problem;
  const char *if_missing, *if_broken;  ///< remedies
};

Finding optional_module(const OptionalModule& module) {
  if (module.is_there) return {.name = module.name, .text = module.library};
  const bool missing = module.problem.starts_with("no ");
  return {.status = missing ? Status::absent : Status::fault,
          .name = module.name,
          .text = module.problem,
          .remedy = missing ? module.if_missing : module.if_broken};
}

}  // namespace

const char* to_string(Status status) {
  return status == Status::ok ? "ok" : status == Status::absent ? "absent" : "fault";
}

std::string cuda_version(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}
std::string library_version(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::string module_contents(const CudaModuleFacts& facts) {
  return fmt::format(
      "toolkit {}, code for {}, {}", cuda_version(facts.toolkit), facts.architectures.data(),
      facts.nccl_header ? "NCCL " + library_version(facts.nccl_header) : std::string("no NCCL"));
}

std::vector<Finding> findings(const SystemFacts& facts) {
  std::vector<Finding> list = {cpu_finding(facts.cpu),
                               memory_finding(facts.cpu),
                               {.name = "oneDNN", .text = facts.onednn},
                               driver_finding(facts)};
  for (size_t i = 0; i < facts.driver.gpus.size(); ++i) list.push_back(gpu_finding(facts, i));
  list.push_back(module_finding(facts));
  if (facts.module.facts.cublaslt > 0)
    list.push_back({.name = "cuBLASLt", .text = library_version(facts.module.facts.cublaslt)});
  list.push_back(nccl_finding(facts));
  list.push_back(optional_module({"MPI", !facts.mpi.empty(), facts.mpi, facts.mpi_problem,
                                  "for ranks under mpirun, build where libopenmpi-dev is",
                                  "install the MPI that the module was built with"}));
  list.push_back(optional_module(
      {"grammar", facts.grammar_problem.empty(), facts.grammar, facts.grammar_problem,
       "for structured output, run scripts/build-grammar.sh and build again",
       "install the program and the module from one build"}));
  list.push_back(optional_module({"KV events", facts.kv_events_problem.empty(), "over ZeroMQ",
                                  facts.kv_events_problem,
                                  "for serve --kv-events-config, build where libzmq3-dev is",
                                  "install the ZeroMQ that the module was built with"}));
  return list;
}

}  // namespace nanovllm::cli
