// The contract between the program and libnanovllm-cuda.so, the one place where CUDA lives. The
// program never links the module: it looks for it at run time (beside the program first), so that
// the same program runs where there is no driver and no CUDA library.
//
// The module exports this one C function. Whoever loads the module keeps it loaded for as long as a
// backend of it lives: the code of the returned object lies in it.
#pragma once

#include <cstddef>

#include "ops/backend.h"

namespace nanovllm {

inline constexpr const char* kCudaModuleFile = "libnanovllm-cuda.so";
inline constexpr const char* kCudaModuleEntry = "nanovllm_open_cuda";

/// Opens GPU `index`. Returns an object for the caller to `delete`, or null with one sentence,
/// without a full stop, in `error` (always terminated, cut to `error_size`): "no NVIDIA driver was
/// found", "cuda:3 does not exist: there are 2 devices", or that `version`, the caller's
/// module_version(), is not the module's.
/// Never throws.
using OpenCudaFunction = Backend*(const char* version, int index, char* error, size_t error_size);

}  // namespace nanovllm
