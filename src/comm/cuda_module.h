// The part of libnanovllm-cuda.so (ops/cuda_module.h) for ranks on GPUs: their Communicator.
#pragma once

#include <array>
#include <cstddef>

#include "comm/communicator.h"

namespace nanovllm {

class Backend;

inline constexpr const char* kCommunicatorEntry = "nanovllm_open_cuda_communicator";

/// Connects `backend`, which the module has made, with the other ranks' GPUs. Collective. Returns
/// an object for the caller to `delete`, before the backend, or null with one sentence in `error`
/// (always terminated, cut to `error_size`): that `version`, the caller's module_version(), is not
/// the module's, for one. Never throws.
using OpenCommunicatorFunction = Communicator*(const char* version, Backend* backend,
                                               RankMeeting* meeting, int rank, char* error,
                                               size_t error_size);

// The same over NCCL, for ranks that are processes, or whose GPUs do not reach each other's memory.
// A module that was built without NCCL has no such entries.

/// The id of a group, made by one of its ranks for all.
using NcclId = std::array<std::byte, 128>;

inline constexpr const char* kNewNcclIdEntry = "nanovllm_new_nccl_id";
inline constexpr const char* kNcclCommunicatorEntry = "nanovllm_open_nccl_communicator";

/// Nonzero, with one sentence in `error`, where NCCL is not to be found or does not work. Never
/// throws.
using NewNcclIdFunction = int(NcclId* id, char* error, size_t error_size);
/// Collective, as above.
using OpenNcclCommunicatorFunction = Communicator*(const char* version, Backend* backend,
                                                   const NcclId* id, int rank, int world_size,
                                                   char* error, size_t error_size);

}  // namespace nanovllm
