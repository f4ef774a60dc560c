#pragma once

namespace nanovllm::cpu {

/// OMP_NUM_THREADS if set (Error(invalid_argument) beyond kMaxThreads), else the physical cores
/// this process may use (affinity mask, SMT siblings, cgroup quota).
int default_num_threads();

}  // namespace nanovllm::cpu
