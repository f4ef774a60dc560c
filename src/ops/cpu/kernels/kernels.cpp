#include "ops/cpu/kernels/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nanovllm::cpu {

const Kernels& kernels_base();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_avx512_bf16();
const Kernels& kernels_amx();

namespace {

/// Whether the processor has tiles of bf16 and int8 and the system lets this process use them.
/// Linux asks that a process request their state first; a second request is harmless.
bool may_use_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kNeeded = 1u << 24 | 1u << 22 | 1u << 25;  // tiles, bf16, int8
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kNeeded) != kNeeded) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace
#endif

const Kernels* find_kernels(std::string_view name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool half = avx512 && __builtin_cpu_supports("avx512bf16") &&
                    __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
  if (name == "amx" && half && may_use_tiles()) return &kernels_amx();
  if (name == "avx512_bf16" && half) return &kernels_avx512_bf16();
  if (name == "avx512" && avx512) return &kernels_avx512();
  if (name == "avx2" && avx2) return &kernels_avx2();
#endif
  return name == "base" ? &kernels_base() : nullptr;
}

const Kernels& best_kernels(bool amx) {
  if (const Kernels* kernels = amx ? find_kernels("amx") : nullptr) return *kernels;
  for (const std::string_view name : {"avx512_bf16", "avx512", "avx2"})
    if (const Kernels* kernels = find_kernels(name)) return *kernels;
  return kernels_base();
}

bool adds_beside_products() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

}  // namespace nanovllm::cpu
