#include "ops/cpu/kernels/kernels.h"

namespace nanovllm::cpu {

const Kernels& kernels_base();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_avx512_bf16();
#endif

const Kernels* find_kernels(std::string_view name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (name == "avx512_bf16" && avx512 && __builtin_cpu_supports("avx512bf16"))
    return &kernels_avx512_bf16();
  if (name == "avx512" && avx512) return &kernels_avx512();
  if (name == "avx2" && avx2) return &kernels_avx2();
#endif
  return name == "base" ? &kernels_base() : nullptr;
}

const Kernels& best_kernels() {
  for (const std::string_view name : {"avx512_bf16", "avx512", "avx2"})
    if (const Kernels* kernels = find_kernels(name)) return *kernels;
  return kernels_base();
}

}  // namespace nanovllm::cpu
