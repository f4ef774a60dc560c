// ProcessGroup: ranks that are processes, perhaps on several hosts, started by mpirun. MPI lives in
// a module of its own (libnanovllm-mpi.so) that is looked for at run time, and only under mpirun:
// the program runs where there is no MPI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "comm/communicator.h"

namespace nanovllm {

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual int ranks_on_host() const = 0;  ///< this one included
  virtual int rank_on_host() const = 0;   ///< this one's number among them
  /// This rank's communicator over host memory; the group outlives it. A collective in which
  /// another rank is missing for 8 seconds throws Error(engine).
  virtual std::unique_ptr<Communicator> make_communicator() = 0;
  /// Rank 0's bytes, of a size that all know, to every rank. Rank 0 waits for the others, too,
  /// where they are more than a few kilobytes. A rank that is missing for 8 seconds: throws
  /// Error(engine).
  virtual void broadcast(std::span<std::byte> bytes) = 0;
  /// The same, but waits for as long as it takes. `meanwhile`, if any, is called once where that is
  /// more than an instant.
  virtual void await_broadcast(std::span<std::byte> bytes,
                               const std::function<void()>& meanwhile) = 0;
  /// Takes leave of the others, who do the same. Without it, the end of this process ends theirs.
  virtual void leave() = 0;
  /// The smallest of all ranks' values.
  virtual int64_t smallest(int64_t value) = 0;
};

inline constexpr const char* kMpiModuleFile = "libnanovllm-mpi.so";
inline constexpr const char* kMpiModuleEntry = "nanovllm_open_mpi";

/// Joins the processes that mpirun started with this one; collective, once per process. Returns an
/// object for the caller to `delete`, or null with one sentence in `error`: that `version`, the
/// caller's module_version(), is not the module's, for one. Never throws.
using OpenMpiFunction = ProcessGroup*(const char* version, char* error, size_t error_size);

/// This process among those that mpirun started together; one of one without mpirun.
struct ProcessPlace {
  int rank = 0, count = 1;
};
ProcessPlace process_place();
/// Joins them. Throws Error(device) if the module is missing.
std::unique_ptr<ProcessGroup> join_processes();

/// The library behind the module, "Open MPI v4.1.4"; empty, with one sentence in `why`, where the
/// module or the library is missing. Joins nothing.
std::string mpi_library(std::string& why);

}  // namespace nanovllm
