#include "cli/about/system_facts.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include "comm/process_group.h"
#include "constrain/grammar_compiler.h"
#include "kv_events/publisher.h"
#include "ops/backend.h"
#include "ops/cpu/memory.h"
#include "ops/cpu/num_threads.h"
#include "ops/cpu/onednn.h"

namespace nanovllm {
namespace {

/// The features that a kernel of ours or of oneDNN's asks for, as Linux spells them.
constexpr const char* kFeatures[] = {"avx2",        "fma",      "avx512f",  "avx512_bf16",
                                     "avx512_vnni", "amx_tile", "amx_bf16", "asimd",
                                     "sve",         "bf16"};

void read_cpuinfo(CpuFacts& cpu) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();) {  // the first processor's
    const size_t colon = line.find(':');
    if (colon == line.npos) continue;
    const std::string value = line.substr(std::min(colon + 2, line.size()));
    if (line.starts_with("model name")) cpu.model = value;
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(value);
    std::set<std::string> flags;
    for (std::string word; words >> word;) flags.insert(word);
    for (const char* feature : kFeatures)
      if (flags.contains(feature)) cpu.features.emplace_back(feature);
  }
}

CpuFacts ask_cpu() {
  CpuFacts cpu;
  read_cpuinfo(cpu);
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) cpu.processors = CPU_COUNT(&allowed);
  cpu.threads = cpu::default_num_threads();
  const char* wish = std::getenv("OMP_NUM_THREADS");
  cpu.threads_from_environment = wish && std::atoi(wish) > 0;
  cpu.l3_bytes = std::max(0L, sysconf(_SC_LEVEL3_CACHE_SIZE));
  const MemoryInfo memory = cpu::memory_info();
  cpu.total_bytes = static_cast<int64_t>(memory.total);
  cpu.free_bytes = static_cast<int64_t>(memory.free);
  return cpu;
}

OpenedGpu open_gpu(size_t index) {
  OpenedGpu gpu;
  try {
    gpu.free_bytes =
        static_cast<int64_t>(make_backend(fmt::format("cuda:{}", index), {})->memory().free);
  } catch (const Error& error) {
    gpu.problem = error.what();
  }
  return gpu;
}

}  // namespace

SystemFacts ask_system(bool open_gpus) {
  SystemFacts facts{.cpu = ask_cpu(),
                    .driver = ask_gpu_driver(),
                    .module = ask_cuda_module(),
                    .nccl = nccl_version(),
                    .onednn = cpu::onednn_version()};
  facts.mpi = mpi_library(facts.mpi_problem);
  facts.grammar = grammar_library(facts.grammar_problem);
  facts.kv_events_problem = kv_events_problem();
  if (open_gpus && facts.module.problem.empty())
    for (size_t i = 0; i < facts.driver.gpus.size(); ++i) facts.opened.push_back(open_gpu(i));
  return facts;
}

std::string choose_device(const EngineConfig& config) {
  std::string note;
  (void)make_backend(config.device, {config.num_threads}, &note);
  return note.substr(std::string("running on ").size());
}

}  // namespace nanovllm
