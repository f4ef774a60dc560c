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

int64_t CpuBackend::segment(int64_t k) const {
  const auto [it, is_new] = segments_.try_emplace(k, 0);
  if (is_new && k % kPairColumns == 0 && kernels_.int4_pairs.gemm) it->second = find_segment(k);
  return it->second;
}

// oneDNN sums as many columns from zero as it chooses by k.
int64_t CpuBackend::find_segment(int64_t k) const {
  constexpr int64_t m = kQuantisedRows, n = 4 * kGemmBlock;
  constexpr WeightFormat kFormat(WeightFormat::int4, kPairColumns);
  uint32_t state = 1;
  const auto draw = [&] {  // from -1 to 1
    return static_cast<float>(static_cast<int32_t>(state = state * 1664525u + 1013904223u)) *
           0x1p-31f;
  };
  QuantizedRows rows;
  rows.scales.resize(static_cast<size_t>(n * kFormat.groups(k)));
  for (float& scale : rows.scales) scale = 1.5f + draw();
  rows.zeros.assign(rows.scales.size(), 0);
  std::vector<bf16> x(static_cast<size_t>(m * k)), plain(static_cast<size_t>(n * k));
  for (bf16& value : x) value = static_cast<bf16>(draw());
  for (size_t i = 0; i < plain.size(); ++i) {
    rows.numbers.push_back(static_cast<int8_t>(draw() * 7.99f));
    plain[i] = static_cast<bf16>(rows.scales[i / kPairColumns] * rows.numbers[i]);
  }
  const WeightLayout& where = onednn_->layout(DType::bf16, n, k);
  std::vector<std::byte> whole(where.bytes), packed(quantised_bytes(kFormat, n, k));
  const Tensor of_x(x.data(), DType::bf16, {m, k}, device());
  pack_rows(whole.data(), DType::bf16, where, 0,
            Tensor(plain.data(), DType::bf16, {n, k}, device()), 1);
  pack_quantised(packed.data(), kFormat, n, k, rows, 1);
  std::vector<float> want(static_cast<size_t>(m * n)), found(want.size());
  onednn_->gemm(Tensor(want.data(), DType::f32, {m, n}, device()), of_x,
                Tensor(whole.data(), DType::bf16, {n, k}, device()));
  GemmTask<bf16> task{.x = x.data(),
                      .x_stride = k,
                      .y = found.data(),
                      .y_is_f32 = true,
                      .y_stride = n,
                      .m = m,
                      .n = n,
                      .k = k,
                      .end_block = n / kGemmBlock};
  for (const int64_t columns : {k, int64_t{512}, int64_t{1024}, int64_t{256}, int64_t{2048}}) {
    if (columns > k) continue;
    task.segment = columns;
    kernels_.int4_pairs.gemm(task, quantised_panels(packed.data(), kFormat, k));
    if (std::memcmp(want.data(), found.data(), want.size() * sizeof(float)) == 0) return columns;
  }
  return 0;
}

void CpuBackend::reserve_scratch(int64_t floats) {
  for (GrowingBuffer& own : scratch_) own.reserve(static_cast<size_t>(floats) * sizeof(float));
}

int64_t CpuBackend::scratch_floats(const OperandLimits& largest) const {
  const bool tiles = uses_tiles(largest.dtype), panels = !uses_onednn(largest.dtype) && !tiles;
  const int64_t columns = panels ? largest.widest : largest.quantised_columns;
  return std::max({attention_scratch_floats(largest.head_dim, attention_rows(largest.dtype)),
                   gemm_scratch_floats(columns) + panel_scratch_floats(columns),
                   panel_scratch_floats(most_paired_),
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
  expert_rows_.reserve(expert_bytes(largest));
  if (uses_tiles(largest.dtype)) row_tiles_.reserve(row_tiles_bytes(largest.rows, largest.widest));
  quantised_rows_.reserve(quantised_row_bytes(largest.rows, largest.quantised_columns));
  halves_.reserve(half_bytes(largest));
  attention_units_.reserve(static_cast<size_t>(largest.rows));
}

}  // namespace cpu
}  // namespace nanovllm
