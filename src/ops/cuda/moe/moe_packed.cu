// Launches the kernels of moe_packed.cuh.
#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/moe/moe_packed.cuh"

namespace nanovllm {
namespace {

// 128 rows of the weight by 8, 16 and 32 tokens, 256 by 128.
using OneShape = PackedExpertShape<1, 1, 8, 3>;
using FewShape = PackedExpertShape<2, 2, 4, 4>;
using SomeShape = PackedExpertShape<2, 4, 4, 4>;
using ManyShape = PackedExpertShape<2, 16, 8, 1>;
static_assert(OneShape::kTokens == kPackedTokens[0] && FewShape::kTokens == kPackedTokens[1] &&
              SomeShape::kTokens == kPackedTokens[2] && ManyShape::kTokens == kPackedTokens[3] &&
              SomeShape::kTokens == kMostAnyPackedTokens);

/// Many tokens' records have one scale at most.
constexpr size_t largest_ring(WeightFormat::Numbers numbers) {
  return static_cast<size_t>(ManyShape::kStages(numbers)) *
         ManyShape::stage_bytes(packed_number_bytes(numbers) + kPackedRows * 4);
}
static_assert(largest_ring(WeightFormat::int4) <= kManyPackedBytes &&
              largest_ring(WeightFormat::int8) <= kManyPackedBytes);

}  // namespace

bool CudaBackend::unpacks_simply(const Weight& stack) const {
  return !stack.format.is_quantised() || stack.format.quantises_rows() ||
         (!has_any(uneven_, stack) && stack.format.group >= kPackedColumns);
}

void CudaBackend::multiply_packed_experts(Tensor y, Tensor x, const Weight& w,
                                          const ExpertPlan& plan) {
  const bool is_gated = y.shape[1] != w.n();
  const PackedLayout at(w.format, w.n(), w.k());
  const PackedExperts weight{reinterpret_cast<const unsigned char*>(w.data.data),
                             w.data.stride[0] * static_cast<int64_t>(sizeof(bf16)),
                             int64_t{at.columns} * at.record_bytes,
                             at.row_scales(),
                             at.zeros(),
                             at.record_bytes,
                             at.groups,
                             static_cast<int>(at.group)};
  const ExpertProduct<__nv_bfloat16> product = packed_product_of(y, x, is_gated);
  const auto go = [&]<class Shape, WeightFormat::Numbers numbers>(auto kernel) {
    const size_t bytes = static_cast<size_t>(Shape::kStages(numbers)) *
                         static_cast<size_t>(Shape::stage_bytes(at.record_bytes));
    const int64_t row_blocks = ceil_div(product.columns, Shape::columns(is_gated)),
                  units = plan.most_tiles() * row_blocks;
    // The plan is older than a gated product before this one.
    launch_early(kernel, {grid_size(std::min<int64_t>(units, Shape::kBlocksPerSm * num_sms_))},
                 Shape::kThreads, bytes, product, plan, weight, static_cast<int>(row_blocks),
                 !is_gated);
  };
  const auto choose_end = [&]<class Shape, WeightFormat::Numbers numbers, Unpacks how>() {
    if (is_gated)
      go.template operator()<Shape, numbers>(expert_packed_kernel<Shape, numbers, true, how>);
    else
      go.template operator()<Shape, numbers>(expert_packed_kernel<Shape, numbers, false, how>);
  };
  const auto choose_kernel = [&]<WeightFormat::Numbers numbers>() {
    constexpr auto kOneScale = Unpacks::with_one_scale;
    if (unpacks_simply(w)) {
      if (plan.tile_rows <= OneShape::kTokens)
        return choose_end.template operator()<OneShape, numbers, kOneScale>();
      if (plan.tile_rows <= FewShape::kTokens)
        return choose_end.template operator()<FewShape, numbers, kOneScale>();
      if (plan.tile_rows <= SomeShape::kTokens)
        return choose_end.template operator()<SomeShape, numbers, kOneScale>();
      return choose_end.template operator()<ManyShape, numbers, kOneScale>();
    }
    if constexpr (numbers != WeightFormat::e4m3)  // which has no zero points
      if (has_any(uneven_, w))
        return choose_end.template operator()<SomeShape, numbers, Unpacks::any>();
    choose_end.template operator()<SomeShape, numbers, Unpacks::with_scales>();
  };
  with_numbers(w.format, choose_kernel);
}

}  // namespace nanovllm
