// Facts of this machine for the engine: read by `nanovllm doctor` and `--version`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nanovllm/params.h"

#include "ops/gpu_facts.h"

namespace nanovllm {

struct CpuFacts {
  std::string model{};
  std::vector<std::string> features{};  ///< of those that the kernels can use: "avx2", "amx_bf16"
  int processors = 0;                   ///< that this process may use
  int threads = 0;                      ///< that the engine would use
  bool threads_from_environment = false;
  int64_t l3_bytes = 0;  ///< of one cache of the third level; 0: unknown
  int64_t total_bytes = 0, free_bytes = 0;
};

/// Result of opening GPU i of the driver's list.
struct OpenedGpu {
  int64_t free_bytes = 0;
  std::string problem{};  ///< one sentence; empty if it opened
};

struct SystemFacts {
  CpuFacts cpu{};
  GpuDriver driver{};
  CudaModule module{};
  std::vector<OpenedGpu> opened{};  ///< empty where none was tried
  int nccl = 0;                     ///< 22703 of libnccl.so.2; 0: not here
  std::string onednn{};             ///< "2.6.3"
  std::string mpi{}, mpi_problem{};
  std::string grammar{}, grammar_problem{};  ///< of the module for structured output
  std::string kv_events_problem{};           ///< of the module for KV events; empty: it is there
};

/// `open_gpus`: each for a moment, which takes some tenths of a second.
SystemFacts ask_system(bool open_gpus);

/// The device that an engine would run on: "cpu, 2 threads, avx512_bf16", with the reason where it
/// is no GPU. Throws Error(device).
std::string choose_device(const EngineConfig& config);

}  // namespace nanovllm
