#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/cuda_module.h"
#include "ops/cuda/core/cuda_backend.h"

namespace nanovllm {

/// The stream on which `fence` stands: that of its CudaBackend, which all its work is ordered on.
cudaStream_t stream_of(const Fence& fence);

/// Rank `rank`'s communicator over the memory of GPUs that reach each other. Collective. The
/// backend outlives it, and so does every peer's until all ranks have stopped using it.
std::unique_ptr<Communicator> make_peer_communicator(CudaBackend& backend, RankMeeting& meeting,
                                                     int rank);

// Over NCCL; not there where the module was built without it.

/// Throws Error(device) where NCCL's library is not to be found.
NcclId new_nccl_id();
/// The same over NCCL. `meeting`: of ranks that are threads, to end what waits when one of them
/// fails; null if they are processes.
std::unique_ptr<Communicator> make_nccl_communicator(CudaBackend& backend, const NcclId& id,
                                                     int rank, int world_size,
                                                     RankMeeting* meeting);

/// Whether every rank's GPU reaches every other's memory: the same answer on all. Collective.
bool all_reach_each_other(const CudaBackend& backend, RankMeeting& meeting, int rank);

}  // namespace nanovllm
