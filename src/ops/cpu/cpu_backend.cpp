#include "ops/cpu/cpu_backend.h"

#include <cstring>

#include "ops/cpu/memory.h"
#include "ops/cpu/num_threads.h"

namespace nanovllm {

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  return std::make_unique<cpu::CpuBackend>(options);
}

namespace cpu {
namespace {

const Kernels& kernels_named(std::string_view isa) {
  if (isa.empty()) return best_kernels();
  const Kernels* kernels = find_kernels(isa);
  check(kernels != nullptr, ErrorKind::device, "this processor or build has no '{}' kernels", isa);
  return *kernels;
}

}  // namespace

CpuBackend::CpuBackend(const BackendOptions& options, std::string_view isa)
    : threads_(options.num_threads > 0 ? options.num_threads : default_num_threads()),
      kernels_(kernels_named(isa)) {
  if (isa.empty()) onednn_ = std::make_unique<OneDnn>(threads_);
  scratch_.resize(static_cast<size_t>(threads_));
  reserve_scratch(attention_scratch_floats(256));
}

std::string CpuBackend::name() const {
  return fmt::format("cpu, {} thread{}, {}", threads_, threads_ == 1 ? "" : "s", kernels_.name);
}

MemoryInfo CpuBackend::memory() const { return memory_info(); }

Buffer CpuBackend::allocate(size_t bytes) { return cpu::allocate(bytes); }

void CpuBackend::copy(Tensor dst, Tensor src) {
  check(dst.device.kind == Device::cpu && src.device.kind == Device::cpu,
        "the CPU backend copies between host tensors only");
  check(
      dst.contiguous() && src.contiguous() && dst.dtype == src.dtype && dst.numel() == src.numel(),
      "copy {} to {}", src.describe(), dst.describe());
  if (src.bytes() != 0) std::memmove(dst.data, src.data, src.bytes());
}

void CpuBackend::reserve_scratch(int64_t floats) {
  if (floats <= scratch_floats_) return;
  for (Buffer& buffer : scratch_)
    buffer = cpu::allocate(static_cast<size_t>(floats) * sizeof(float));
  scratch_floats_ = floats;
}

size_t CpuBackend::scratch_bytes() const {
  // Per thread: the larger of attention's tiles, 48 rows of activations (own GEMM) and a row of
  // sortable logits. For all: oneDNN's generated code, up to 1024 products of 60 KB, and its
  // scratchpad.
  return static_cast<size_t>(threads_) * (size_t{4} << 20) + (size_t{64} << 20);
}

}  // namespace cpu
}  // namespace nanovllm
