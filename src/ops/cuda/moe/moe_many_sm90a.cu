// Launches the kernels of moe_many.cuh.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/moe/moe_many.cuh"

namespace nanovllm {

void CudaBackend::multiply_many_experts(Tensor y, Tensor x, Tensor w, const ExpertPlan& plan) {
  const bool gated = y.shape[1] != w.shape[1];
  const int columns = ManyCut::kColumns(gated);
  const int64_t row_blocks = ceil_div(y.shape[1], columns), units = plan.most_tiles() * row_blocks;
  launch_early(gated ? expert_many_kernel<true> : expert_many_kernel<false>,
               {grid_size(std::min<int64_t>(units, num_sms_))}, ManyCut::kThreads,
               ManyCut::kSharedBytes, product_of<bf16>(y, x, w, gated), plan,
               map_experts(w, gated ? 2 : 1, columns, 1), static_cast<int>(row_blocks));
}

}  // namespace nanovllm
