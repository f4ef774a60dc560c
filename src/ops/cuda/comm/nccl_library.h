// libnccl.so.2, which is looked for at run time: programs start where there is none.
#pragma once

#include <cstdlib>

#include <dlfcn.h>

#include "core/check.h"

namespace nanovllm {

/// Opens it, with NVLink multicast off. It stays open.
class NcclLibrary {
 public:
  /// Throws Error(device) where it is missing.
  NcclLibrary() {
    ::setenv("NCCL_NVLS_ENABLE", "0", 1);
    library_ = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    check(library_ != nullptr, ErrorKind::device,
          "GPUs that do not reach each other's memory need NCCL: {}", dlerror());
  }
  /// Sets `function` to the one of that name. Throws Error(device) if there is none.
  template <class Function>
  void find(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(dlsym(library_, name));
    check(function != nullptr, ErrorKind::device, "libnccl.so.2 has no {}", name);
  }

 private:
  void* library_ = nullptr;
};

}  // namespace nanovllm
