#include "comm/process_group.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>

#include <dlfcn.h>

namespace nanovllm {

ProcessPlace process_place() {
  struct Names {
    const char *rank, *count;
  };
  // Open MPI's, and those of MPICH and its kin.
  for (const Names& names :
       {Names{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, Names{"PMI_RANK", "PMI_SIZE"}}) {
    const char *rank = std::getenv(names.rank), *count = std::getenv(names.count);
    if (rank && count) return {std::atoi(rank), std::max(1, std::atoi(count))};
  }
  return {};
}

std::unique_ptr<ProcessGroup> join_processes() {
  // Beside the program, or wherever the system looks. MPI's own plugins need its symbols.
  constexpr int kMode = RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE;
  std::error_code error;
  const auto program = std::filesystem::canonical("/proc/self/exe", error).parent_path();
  std::filesystem::path place = kMpiModuleFile;
  for (const auto& here : {program / kMpiModuleFile, program / ".." / "lib" / kMpiModuleFile})
    if (std::filesystem::exists(here, error)) place = here;
  void* module = dlopen(place.c_str(), kMode);
  check(module != nullptr, ErrorKind::device,
        "mpirun started this process, but the MPI module cannot be loaded: {}; it is built where "
        "MPI is installed (libopenmpi-dev)",
        dlerror());
  auto* open = reinterpret_cast<OpenMpiFunction*>(dlsym(module, kMpiModuleEntry));
  check(open != nullptr, ErrorKind::device, "{} has no {}: it belongs to another program",
        kMpiModuleFile, kMpiModuleEntry);
  std::array<char, 512> why{};
  std::unique_ptr<ProcessGroup> group(open(kMpiModuleVersion, why.data(), why.size()));
  check(group != nullptr, ErrorKind::device, "{}", why.data());
  return group;
}

}  // namespace nanovllm
