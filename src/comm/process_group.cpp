#include "comm/process_group.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include <dlfcn.h>

#include "core/load_module.h"

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
  std::string why;
  // MPI's own plugins need its symbols.
  constexpr int kMode = RTLD_NOW | RTLD_GLOBAL;
  check(load_module(kMpiModuleFile, kMode, why) != nullptr, ErrorKind::device,
        "mpirun started this process, but {}; the MPI module is built where MPI is installed "
        "(libopenmpi-dev)",
        why);
  auto group = make_in_module<OpenMpiFunction>(kMpiModuleFile, kMpiModuleEntry, kMode, why);
  check(group != nullptr, ErrorKind::device, "{}", why);
  return group;
}

std::string mpi_library(std::string& why) {
  void* module = load_module(kMpiModuleFile, RTLD_NOW | RTLD_GLOBAL, why);
  if (!module) return "";
  using VersionFunction = int(char* text, int* length);
  auto* ask = reinterpret_cast<VersionFunction*>(dlsym(module, "MPI_Get_library_version"));
  std::array<char, 8193> text{};  // MPICH's is the longest: 8192
  int length = 0;
  if (ask) ask(text.data(), &length);
  const std::string name = text.data();
  return name.empty() ? "MPI" : name.substr(0, name.find_first_of(",\n"));
}

}  // namespace nanovllm
