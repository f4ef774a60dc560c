#include "ranks/open_ranks.h"

#include <algorithm>
#include <array>

#include <dlfcn.h>

#include "comm/cuda_module.h"
#include "core/load_module.h"
#include "ops/cpu/num_threads.h"

namespace nanovllm {

namespace {

/// A function of the module that `backend`'s code lies in, or null. The module stays loaded.
template <class Function>
Function* find_entry(const Backend& backend, const char* name) {
  Dl_info module{};
  const void* code = *reinterpret_cast<const void* const*>(&backend);  // its table of functions
  if (dladdr(code, &module) == 0 || module.dli_fname == nullptr) return nullptr;
  void* handle = dlopen(module.dli_fname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  auto* entry = reinterpret_cast<Function*>(dlsym(handle, name));
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
  if (auto* proxy = dynamic_cast<BackendProxy*>(&backend))
    return proxy->wrap(open_communicator(proxy->inner(), group, rank));
  if (backend.device().kind == Device::cpu) return make_thread_communicator(group, rank);
  auto* open = find_entry<OpenCommunicatorFunction>(backend, kCommunicatorEntry);
  check(open != nullptr, ErrorKind::device, "{} comes from a module that cannot connect GPUs",
        backend.name());
  std::array<char, 512> error{};
  std::unique_ptr<Communicator> communicator(
      open(module_version(), &backend, group.get(), rank, error.data(), error.size()));
  if (communicator) return communicator;
  if (const auto failure = group->failure())
    throw Error(failure->kind, describe(*failure, group->world_size()));
  fail(ErrorKind::device, "{}", error.data());
}

std::unique_ptr<Communicator> open_communicator(Backend& backend, ProcessGroup& group) {
  const bool is_gpu = backend.device().kind != Device::cpu;
  const int64_t least = group.smallest(is_gpu ? 1 : 0), most = -group.smallest(is_gpu ? -1 : 0);
  check(least == most, ErrorKind::device, "some of the ranks have a GPU and some have none: {}",
        "give all the same --device");
  if (!is_gpu) return group.make_communicator();
  auto* make_id = find_entry<NewNcclIdFunction>(backend, kNewNcclIdEntry);
  auto* open = find_entry<OpenNcclCommunicatorFunction>(backend, kNcclCommunicatorEntry);
  check(make_id != nullptr && open != nullptr, ErrorKind::device,
        "{}: the CUDA module was built without NCCL, which GPUs of several processes need",
        backend.name());
  std::array<char, 512> error{};
  NcclId id{};
  if (group.rank() == 0)
    check(make_id(&id, error.data(), error.size()) == 0, ErrorKind::device, "{}", error.data());
  group.await_broadcast(id, {});
  std::unique_ptr<Communicator> communicator(open(module_version(), &backend, &id, group.rank(),
                                                  group.world_size(), error.data(), error.size()));
  check(communicator != nullptr, ErrorKind::device, "{}", error.data());
  return communicator;
}

}  // namespace nanovllm
