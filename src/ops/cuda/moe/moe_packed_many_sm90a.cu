// Launches the kernels of moe_packed_many.cuh.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/moe/moe_packed_many.cuh"

namespace nanovllm {

void CudaBackend::multiply_many_packed_experts(Tensor y, Tensor x, const Weight& w,
                                               const ExpertPlan& plan) {
  using Cut = PackedManyCut;
  const bool is_gated = y.shape[1] != w.n();
  const int halves = is_gated ? 2 : 1;
  const PackedLayout at(w.format, w.n(), w.k());
  const PackedRecords weight{reinterpret_cast<const unsigned char*>(w.data.data) + at.row_scales(),
                             w.data.stride[0] * static_cast<int64_t>(sizeof(bf16)), at.record_bytes,
                             at.groups};
  const CUtensorMap map =
      map_records(encode_map_, w, at, halves, Cut::kEights / halves, at.record_bytes);
  const int64_t row_blocks = ceil_div(y.shape[1], Cut::columns(is_gated)),
                units = plan.most_tiles() * row_blocks;
  with_numbers(w.format, [&]<WeightFormat::Numbers numbers>() {
    const auto go = [&](auto kernel) {
      const size_t bytes = 1024 + static_cast<size_t>(Cut::kStages(numbers)) *
                                      static_cast<size_t>(Cut::stage_bytes(at.record_bytes));
      launch_early(kernel, {grid_size(std::min<int64_t>(units, num_sms_))}, Cut::kThreads, bytes,
                   packed_product_of(y, x, is_gated), plan, weight, map,
                   static_cast<int>(row_blocks));
    };
    if (at.groups > 1)
      go(is_gated ? expert_packed_many_kernel<numbers, true, true>
                  : expert_packed_many_kernel<numbers, false, true>);
    else
      go(is_gated ? expert_packed_many_kernel<numbers, true, false>
                  : expert_packed_many_kernel<numbers, false, false>);
  });
}

}  // namespace nanovllm
