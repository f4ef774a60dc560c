#include "ops/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>

#include "ops/cpu/memory.h"
#include "ops/cpu/threads.h"

namespace nanovllm {

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  return std::make_unique<cpu::CpuBackend>(options);
}

namespace cpu {
namespace {

const Kernels& kernels_named(std::string_view isa) {
  if (isa.empty()) return best_kernels(onednn_allows_amx());
  const Kernels* kernels = find_kernels(isa);
  check(kernels != nullptr, ErrorKind::device, "this processor or build has no '{}' kernels", isa);
  return *kernels;
}

}  // namespace

CpuBackend::CpuBackend(const BackendOptions& options, std::string_view isa)
    : threads_(options.num_threads > 0 ? options.num_threads : default_num_threads()),
      kernels_(kernels_named(isa)) {
  check_can_start(threads_);
  if (isa.empty()) onednn_ = std::make_unique<OneDnn>(threads_);
  scratch_.resize(static_cast<size_t>(threads_));
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
      "copy {} to {}", src, dst);
  if (src.bytes() != 0) std::memmove(dst.data, src.data, src.bytes());
}

void CpuBackend::reserve_scratch(int64_t floats) {
  if (floats <= scratch_floats_) return;
  for (Buffer& buffer : scratch_)
    buffer = cpu::allocate(static_cast<size_t>(floats) * sizeof(float));
  scratch_floats_ = floats;
}

void CpuBackend::reserve_experts(size_t bytes) {
  if (bytes <= expert_bytes_) return;
  expert_rows_ = cpu::allocate(bytes);
  expert_bytes_ = bytes;
}

int64_t CpuBackend::scratch_floats(const OperandLimits& largest) const {
  const bool tiles = uses_tiles(largest.dtype), panels = !uses_onednn(largest.dtype) && !tiles;
  const int64_t columns = panels ? largest.widest : largest.quantised_columns;
  return std::max({attention_scratch_floats(largest.head_dim, attention_rows(largest.dtype)),
                   gemm_scratch_floats(columns) + panel_scratch_floats(columns),
                   tiles ? tile_scratch_floats(std::min(largest.rows, kRowsAsTiles)) +
                               tile_block_floats(largest.widest)
                         : 0,
                   2 * largest.vocab});  // sorting: keys of 8 bytes
}

size_t CpuBackend::scratch_bytes(const OperandLimits& largest) const {
  const int64_t floats = threads_ * scratch_floats(largest);
  return static_cast<size_t>(floats) * sizeof(float) +
         static_cast<size_t>(largest.rows) * sizeof(AttentionUnit) + expert_bytes(largest) +
         (uses_tiles(largest.dtype) ? row_tiles_bytes(largest.rows, largest.widest) : 0) +
         quantised_row_bytes(largest.rows, largest.quantised_columns) + half_bytes(largest) +
         (uses_onednn(largest.dtype) ? OneDnn::kMostBytes : 0);
}

void CpuBackend::reserve(const OperandLimits& largest) {
  reserve_scratch(scratch_floats(largest));
  reserve_experts(expert_bytes(largest));
  if (uses_tiles(largest.dtype)) reserve_row_tiles(row_tiles_bytes(largest.rows, largest.widest));
  reserve_quantised_rows(quantised_row_bytes(largest.rows, largest.quantised_columns));
  reserve_halves(half_bytes(largest));
  attention_units_.reserve(static_cast<size_t>(largest.rows));
}

}  // namespace cpu
}  // namespace nanovllm
