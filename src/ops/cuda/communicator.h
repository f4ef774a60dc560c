#pragma once

#include <memory>

#include "comm/communicator.h"
#include "ops/cuda/cuda_backend.h"

namespace nanovllm {

/// The stream on which `fence` stands: that of its CudaBackend, which all its work is ordered on.
cudaStream_t stream_of(const Fence& fence);

/// Rank `rank`'s communicator over the memory of GPUs that reach each other. Collective. The
/// backend outlives it, and so does every peer's until all ranks have stopped using it. Throws
/// Error(device) where two of the GPUs have no peer access.
std::unique_ptr<Communicator> make_peer_communicator(CudaBackend& backend, RankMeeting& meeting,
                                                     int rank);

}  // namespace nanovllm
