// Opens the device of each rank of tensor parallelism, and connects them.
#pragma once

#include <memory>
#include <string>

#include "comm/process_group.h"
#include "comm/thread_group.h"
#include "ops/backend.h"

namespace nanovllm {

/// A rank's share of the CPU's threads; `num_threads` as in EngineConfig.
int threads_per_rank(int num_threads, int ranks_on_host);

/// A backend that stands between a rank and its device is one of these, too.
class BackendProxy {
 public:
  virtual ~BackendProxy() = default;
  virtual Backend& inner() = 0;  ///< the device, or what is nearer to it
  /// May stand between the rank and its communicator, too.
  virtual std::unique_ptr<Communicator> wrap(std::unique_ptr<Communicator> communicator) {
    return communicator;
  }
};

/// The device of rank `rank` where rank 0 has `first`: the GPUs after it, or the same CPU.
std::string device_of_rank(const Backend& first, int rank);

/// Connects a rank's device with the others'. Collective: returns when all ranks have called it.
std::unique_ptr<Communicator> open_communicator(Backend& backend,
                                                const std::shared_ptr<ThreadGroup>& group,
                                                int rank);

/// The same for ranks that are processes: over NCCL where they have GPUs, else over the group's own
/// means. The group outlives it.
std::unique_ptr<Communicator> open_communicator(Backend& backend, ProcessGroup& group);

}  // namespace nanovllm
