// What libnanovllm-cuda.so (ops/cuda_module.h) offers to ranks on GPUs: their Communicator.
#pragma once

#include <cstddef>

#include "comm/communicator.h"

namespace nanovllm {

class Backend;

inline constexpr const char* kCommunicatorEntry = "nanovllm_open_cuda_communicator";

/// Counts up when Communicator or RankMeeting change: a module of another build has another one.
inline constexpr int kCommunicatorVersion = 1;

/// Connects `backend`, which the module has made, with the other ranks' GPUs. Collective. Returns
/// an object for the caller to `delete`, before the backend, or null with one sentence in `error`
/// (always terminated, cut to `error_size`). Never throws.
using OpenCommunicatorFunction = Communicator*(int version, Backend* backend, RankMeeting* meeting,
                                               int rank, char* error, size_t error_size);

}  // namespace nanovllm
