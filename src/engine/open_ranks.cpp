#include "engine/open_ranks.h"

#include <algorithm>
#include <array>

#include <dlfcn.h>

#include "comm/cuda_module.h"
#include "ops/cpu/num_threads.h"

namespace nanovllm {

namespace {

/// The entry of the module that `backend`'s code lies in, or null. The module stays loaded.
OpenCommunicatorFunction* find_entry(const Backend& backend) {
  Dl_info module{};
  const void* code = *reinterpret_cast<const void* const*>(&backend);  // its table of functions
  if (dladdr(code, &module) == 0 || module.dli_fname == nullptr) return nullptr;
  void* handle = dlopen(module.dli_fname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  auto* entry = reinterpret_cast<OpenCommunicatorFunction*>(dlsym(handle, kCommunicatorEntry));
  (void)dlclose(handle);  // one count less; RTLD_NODELETE keeps it
  return entry;
}

}  // namespace

int threads_per_rank(int num_threads, int ranks_on_host) {
  return std::max(1, (num_threads > 0 ? num_threads : cpu::default_num_threads()) / ranks_on_host);
}

std::string device_of_rank(const Backend& first, int rank) {
  const Device device = first.device();
  return device.kind == Device::cpu ? "cpu" : fmt::format("cuda:{}", device.index + rank);
}

std::unique_ptr<Communicator> open_communicator(Backend& backend,
                                                const std::shared_ptr<ThreadGroup>& group,
                                                int rank) {
  if (backend.device().kind == Device::cpu) return make_thread_communicator(group, rank);
  auto* open = find_entry(backend);
  check(open != nullptr, ErrorKind::device, "{} comes from a module that cannot connect GPUs",
        backend.name());
  std::array<char, 512> error{};
  std::unique_ptr<Communicator> communicator(
      open(kCommunicatorVersion, &backend, group.get(), rank, error.data(), error.size()));
  if (communicator) return communicator;
  if (const auto failure = group->failure())
    throw Error(failure->kind, describe(*failure, group->world_size()));
  fail(ErrorKind::device, "{}", error.data());
}

}  // namespace nanovllm
