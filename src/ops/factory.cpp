// make_backend(): which device.
#include <array>
#include <charconv>
#include <memory>

#include <dlfcn.h>

#include "core/load_module.h"
#include "ops/backend.h"
#include "ops/cuda_module.h"
#include "ops/gemm_question.h"
#include "ops/gpu_rates.h"

namespace nanovllm {
namespace {

void* load_cuda_module(std::string& why) {
  return load_module(kCudaModuleFile, RTLD_NOW | RTLD_LOCAL, why);
}

/// Null with the reason in `why` where there is no such GPU, no driver, or no module.
std::unique_ptr<Backend> open_cuda(int index, std::string& why) {
  void* module = load_cuda_module(why);
  if (!module) return nullptr;
  auto* open = reinterpret_cast<OpenCudaFunction*>(dlsym(module, kCudaModuleEntry));
  if (!open) {
    why = fmt::format("{} has no {}: it belongs to another program", kCudaModuleFile,
                      kCudaModuleEntry);
    return nullptr;
  }
  std::array<char, 512> error{};
  std::unique_ptr<Backend> backend(open(module_version(), index, error.data(), error.size()));
  if (!backend) why = error.data();
  return backend;
}

/// "cuda" or "cuda:N".
int parse_cuda_index(const std::string& device) {
  if (device == "cuda") return 0;
  int index = -1;
  const char *begin = device.data() + 5, *end = device.data() + device.size();
  const auto [rest, error] = std::from_chars(begin, end, index);
  check(error == std::errc{} && rest == end && index >= 0, ErrorKind::device,
        "device '{}' is not one of auto, cpu, cuda, cuda:N", device);
  return index;
}

}  // namespace

std::optional<GpuRates> measure_gpu_rates(const std::string& device) {
  if (!device.starts_with("cuda")) return std::nullopt;
  std::string why;
  void* module = load_cuda_module(why);
  auto* measure =
      module ? reinterpret_cast<CudaRatesFunction*>(dlsym(module, kCudaRatesEntry)) : nullptr;
  GpuRates rates;
  if (!measure || measure(parse_cuda_index(device.substr(0, device.find(' '))), &rates) != 0)
    return std::nullopt;
  return rates;
}

std::string explain_gemm(Backend& backend, const GemmQuestion& question) {
  if (backend.device().kind != Device::cuda) return {};
  std::string why;
  void* module = load_cuda_module(why);
  auto* explain =
      module ? reinterpret_cast<ExplainGemmFunction*>(dlsym(module, kExplainGemmEntry)) : nullptr;
  std::array<char, 1024> text{};
  if (explain) explain(&backend, &question, text.data(), text.size());
  return text.data();
}

std::unique_ptr<Backend> make_backend(const std::string& device, const BackendOptions& options,
                                      std::string* note) {
  const bool is_auto = device == "auto", is_cuda = device == "cuda" || device.starts_with("cuda:");
  check(is_auto || is_cuda || device == "cpu", ErrorKind::device,
        "device '{}' is not one of auto, cpu, cuda, cuda:N", device);
  std::unique_ptr<Backend> backend;
  std::string why;
  if (is_auto || is_cuda) {
    backend = open_cuda(is_cuda ? parse_cuda_index(device) : 0, why);
    check(backend || is_auto, ErrorKind::device,
          "--device {}: {}; use --device cpu to run without a GPU", device, why);
  }
  if (!backend) backend = make_cpu_backend(options);
  if (note)
    *note = why.empty() ? fmt::format("running on {}", backend->name())
                        : fmt::format("running on {}: {}", backend->name(), why);
  return backend;
}

}  // namespace nanovllm
