// Finds the ranks of an MPI job that cannot answer: their processes are stopped, by SIGSTOP or
// SIGTSTP.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace nanovllm {

/// The stopped ranks on this host, in order, without this one. None where mpirun did not start this
/// process, or where the system has no /proc.
std::vector<int> stopped_ranks();

/// Why others do not come, as far as this host knows: "rank 1 is stopped", else `otherwise`.
std::string describe_missing_ranks(const std::string& otherwise = "another rank hangs or is gone");

/// How much later than rank 0 a rank reports a fault that all see: one message is enough, and
/// mpirun ends the others behind it.
inline std::chrono::milliseconds lateness(int rank) {
  return std::chrono::milliseconds(250) * std::min(rank, 4);
}

}  // namespace nanovllm
