#include "ops/gpu_facts.h"

#include <fstream>

#include <dlfcn.h>
#include <fmt/format.h>

#include "core/load_module.h"
#include "ops/cuda_module.h"

namespace nanovllm {
namespace {

/// The functions of libcuda.so.1 that are needed here. Their results are 0 if all went well.
class DriverLibrary {
 public:
  DriverLibrary() : library_(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {}
  bool is_here() const { return library_ != nullptr; }
  template <class... Arguments>
  int call(const char* name, Arguments... arguments) const {
    auto* function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library_, name));
    return function ? function(arguments...) : kMissing;
  }
  std::string text_of(int error) const {
    const char* text = nullptr;
    call("cuGetErrorString", error, &text);
    return text ? text : fmt::format("error {}", error);
  }

 private:
  static constexpr int kMissing = -1;
  void* library_;
};

GpuFacts facts_of(const DriverLibrary& driver, int index) {
  constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;  // CUdevice_attribute
  GpuFacts gpu;
  int device = 0, major = 0, minor = 0;
  std::array<char, 128> name{};
  size_t bytes = 0;
  driver.call("cuDeviceGet", &device, index);
  driver.call("cuDeviceGetName", name.data(), static_cast<int>(name.size()) - 1, device);
  driver.call("cuDeviceTotalMem_v2", &bytes, device);
  driver.call("cuDeviceGetAttribute", &major, kCapabilityMajor, device);
  driver.call("cuDeviceGetAttribute", &minor, kCapabilityMinor, device);
  gpu.name = name.data();
  gpu.capability = 10 * major + minor;
  gpu.total_bytes = static_cast<int64_t>(bytes);
  return gpu;
}

bool all_have_peer_access(const DriverLibrary& driver, int count) {
  for (int a = 0; a < count; ++a)
    for (int b = 0; b < count; ++b) {
      int from = 0, to = 0, reaches = 0;
      if (a == b) continue;
      driver.call("cuDeviceGet", &from, a);
      driver.call("cuDeviceGet", &to, b);
      if (driver.call("cuDeviceCanAccessPeer", &reaches, from, to) != 0 || !reaches) return false;
    }
  return true;
}

}  // namespace

GpuDriver ask_gpu_driver() {
  GpuDriver facts;
  std::ifstream("/sys/module/nvidia/version") >> facts.release;
  const DriverLibrary driver;
  if (!driver.is_here()) {
    facts.problem = facts.release.empty() ? "no NVIDIA driver was found"
                                          : "the driver's library, libcuda.so.1, was not found";
    return facts;
  }
  driver.call("cuDriverGetVersion", &facts.cuda);
  int count = 0, error = driver.call("cuInit", 0U);
  if (error == 0) error = driver.call("cuDeviceGetCount", &count);
  if (error != 0)
    facts.problem = fmt::format("the driver shows no GPU: {}", driver.text_of(error));
  else if (count == 0)
    facts.problem = "the driver shows no GPU";
  for (int i = 0; i < count; ++i) facts.gpus.push_back(facts_of(driver, i));
  facts.has_peer_access = all_have_peer_access(driver, count);
  return facts;
}

CudaModule ask_cuda_module() {
  CudaModule module;
  void* handle = load_module(kCudaModuleFile, RTLD_NOW | RTLD_LOCAL, module.problem);
  if (!handle) return module;
  auto* ask = reinterpret_cast<CudaFactsFunction*>(dlsym(handle, kCudaFactsEntry));
  Dl_info info{};
  if (void* entry = dlsym(handle, kCudaModuleEntry); entry && dladdr(entry, &info) != 0)
    module.path = info.dli_fname;
  if (!ask || ask(module_version(), &module.facts) != 0)
    module.problem = fmt::format("{} belongs to another build of the program", kCudaModuleFile);
  return module;
}

int nccl_version() {
  int version = 0;
  if (void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE))
    if (auto* ask = reinterpret_cast<int (*)(int*)>(dlsym(library, "ncclGetVersion")))
      ask(&version);
  return version;
}

}  // namespace nanovllm
