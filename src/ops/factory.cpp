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

constexpr int kCudaMode = RTLD_NOW | RTLD_LOCAL;

/// A function of the CUDA module; null where there is none.
template <class Function>
Function* cuda_function(const char* name) {
  std::string why;
  return reinterpret_cast<Function*>(module_function(kCudaModuleFile, name, kCudaMode, why));
}

/// Null with the reason in `why` where there is no such GPU, no driver, or no module.
std::unique_ptr<Backend> open_cuda(int index, std::string& why) {
  return make_in_module<OpenCudaFunction>(kCudaModuleFile, kCudaModuleEntry, kCudaMode, why, index);
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
  auto* measure = cuda_function<CudaRatesFunction>(kCudaRatesEntry);
  GpuRates rates;
  if (!measure || measure(parse_cuda_index(device.substr(0, device.find(' '))), &rates) != 0)
    return std::nullopt;
  return rates;
}

std::string explain_gemm(Backend& backend, const GemmQuestion& question) {
  if (backend.device().kind != Device::cuda) return {};
  auto* explain = cuda_function<ExplainGemmFunction>(kExplainGemmEntry);
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
