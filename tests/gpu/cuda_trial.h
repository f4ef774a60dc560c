// The questions that tests ask of the CUDA module beyond the catalogue (ops/cuda_trial.h).
#pragma once

#include <dlfcn.h>

#include "ops/backend.h"
#include "ops/cuda_trial.h"

namespace nanovllm {

/// A function of the module that `backend`'s code lies in.
template <class Function>
Function& module_entry(const Backend& backend, const char* name) {
  Dl_info module{};
  const void* code = *reinterpret_cast<const void* const*>(&backend);  // its table of functions
  void* handle = dladdr(code, &module) != 0 && module.dli_fname
                     ? dlopen(module.dli_fname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)
                     : nullptr;
  auto* entry = handle ? reinterpret_cast<Function*>(dlsym(handle, name)) : nullptr;
  check(entry != nullptr, "{} comes from a module without {}", backend.name(), name);
  return *entry;
}

inline void limit_cuda(Backend& backend, const CudaLimits& limits) {
  module_entry<LimitCudaFunction>(backend, kLimitCudaEntry)(&backend, &limits);
}

}  // namespace nanovllm
