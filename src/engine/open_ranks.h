// Which device each rank of tensor parallelism runs on, and how the ranks' devices talk.
#pragma once

#include <memory>
#include <string>

#include "comm/thread_group.h"
#include "ops/backend.h"

namespace nanovllm {

/// A rank's share of the CPU's threads; `num_threads` as in EngineConfig.
int threads_per_rank(int num_threads, int ranks_on_host);

/// The device of rank `rank` where rank 0 has `first`: the GPUs after it, or the same CPU.
std::string device_of_rank(const Backend& first, int rank);

/// Connects a rank's device with the others'. Collective: returns when all ranks have called it.
std::unique_ptr<Communicator> open_communicator(Backend& backend,
                                                const std::shared_ptr<ThreadGroup>& group,
                                                int rank);

}  // namespace nanovllm
