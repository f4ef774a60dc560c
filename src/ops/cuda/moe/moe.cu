// moe_mlp: launches the kernels that choose_experts() names. The choice may depend on the batch:
// every bf16 kernel adds in the order of gemm_in_order(), so that it does not show in the bits.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/moe/moe_gemm.cuh"
#include "ops/cuda/moe/moe_stream.cuh"

namespace nanovllm {
namespace {

// Rows of weight and tokens of a block's unit, by how many tokens an expert has: 64 x 8, 128 x 16,
// 128 x 32, 128 x 64, 128 x 128.
using OneShape = ExpertShape<2, 1, 2, 1, 6, 4>;
using FewShape = ExpertShape<2, 2, 4, 1, 5, 2>;
using SomeShape = ExpertShape<2, 4, 4, 1, 4, 2>;
using ManyShape = ExpertShape<4, 4, 2, 2, 4, 2>;
using MostShape = ExpertShape<4, 8, 2, 2, 3, 2>;

/// Calls body with the shape for tiles of so many tokens.
template <class Body>
void dispatch_shape(int tile_tokens, Body&& body) {
  switch (tile_tokens) {
    case OneShape::kTokens:
      return body(OneShape{});
    case FewShape::kTokens:
      return body(FewShape{});
    case SomeShape::kTokens:
      return body(SomeShape{});
    case ManyShape::kTokens:
      return body(ManyShape{});
    default:
      return body(MostShape{});
  }
}

// -- f32, and rows that do not begin on 16 bytes: a thread is a place by a column, one chain of
// fused multiply-adds over k. For verification, not for speed. --

constexpr int kPlainThreads = 128;

template <class T>
__device__ float dot_in_order(const T* x, const T* w, int k) {
  float sum = 0;
  for (int i = 0; i < k; ++i) sum = __fmaf_rn(to_float(x[i]), to_float(w[i]), sum);
  return sum;
}

template <class T, bool kGated>
__global__ void __launch_bounds__(kPlainThreads)
    expert_plain_kernel(ExpertProduct<T> product, ExpertPlan plan) {
  const int column = blockIdx.y * kPlainThreads + threadIdx.x;
  if (column >= product.columns) return;
  const ExpertTile tile = tile_at(plan, static_cast<int>(blockIdx.x));
  const int row = product.by_token ? token_of(plan, tile.first) : tile.first;
  const T* x = product.x + row * product.x_stride;
  const T* w = product.w + tile.expert * product.expert_stride + int64_t{column} * product.k;
  const float sum = dot_in_order(x, w, product.k);
  T* y = product.y + tile.first * product.y_stride + column;
  if constexpr (kGated)
    *y = gated<T>(sum, dot_in_order(x, w + int64_t{product.columns} * product.k, product.k));
  else
    *y = round_to<T>(sum);
}

ExpertPlan plan_of(const Tensor& ids, const Tensor& plan, int64_t experts, int tile_rows,
                   bool sorted) {
  ExpertPlan p;
  p.ids = ids.ptr<int32_t>();
  p.pairs = static_cast<int>(ids.numel());
  p.experts = static_cast<int>(experts);
  p.per_token = static_cast<int>(ids.shape[1]);
  p.tile_rows = tile_rows;
  if (!sorted) return p;
  p.tiles = reinterpret_cast<ExpertTile*>(plan.ptr<int32_t>());
  p.token_of = plan.ptr<int32_t>() + 4 * int64_t{p.most_tiles()};
  p.place_of = p.token_of + p.pairs;
  p.num_tiles = p.place_of + p.pairs;
  check(p.num_tiles - plan.ptr<int32_t>() < plan.numel(), "moe_mlp: a plan of {} entries for {}",
        plan.numel(), ids.describe());
  return p;
}

void check_experts(const Tensor& y, const Tensor& x, const Tensor& weights, const Tensor& ids,
                   const Tensor& gate_up, const Tensor& down, const MoeWorkspace& work) {
  const int64_t h = x.shape[1], n = down.shape[2], experts = down.shape[0], pairs = ids.numel();
  check(gate_up.rank == 3 && down.rank == 3 && gate_up.shape[0] == experts &&
            gate_up.shape[1] == 2 * n && gate_up.shape[2] == h && down.shape[1] == h &&
            gate_up.dtype == x.dtype && down.dtype == x.dtype && y.dtype == x.dtype,
        "moe_mlp: {} and {} of {}", gate_up.describe(), down.describe(), x.describe());
  check(ids.shape[0] == x.shape[0] && weights.shape == ids.shape && ids.contiguous() &&
            weights.contiguous() && work.act.shape[0] == pairs && work.act.shape[1] == n &&
            work.out.shape[0] == pairs && work.out.shape[1] == h && work.out.contiguous(),
        "moe_mlp: workspace {}, {} for {}", work.act.describe(), work.out.describe(),
        ids.describe());
}

}  // namespace

CUtensorMap CudaBackend::map_experts(const Tensor& w, int halves, int box_rows,
                                     int box_slices) const {
  const int64_t row = w.shape[2] * 2, rows = w.shape[1] / halves;
  // Measured: boxes of several slices, those for few tokens, stream up to 2 % faster so.
  const auto promotion =
      box_slices > 1 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  return tensor_map<5>(encode_map_, w,
                       {kSliceColumns, rows, halves, w.shape[2] / kSliceColumns, w.shape[0]},
                       {row, rows * row, kSliceBytes, w.stride[0] * 2},
                       {kSliceColumns, box_rows, halves, box_slices, 1}, promotion);
}

void CudaBackend::stream_experts(Tensor y, Tensor x, Tensor weights, Tensor ids, Tensor gate_up,
                                 Tensor down, const MoeWorkspace& work, bool sorted) {
  const int64_t tokens = x.shape[0], h = x.shape[1], n = down.shape[2], experts = down.shape[0],
                per_token = ids.shape[1];
  const auto gate_up_product = product_of<bf16>(work.act, x, gate_up, true),
             down_product = product_of<bf16>(work.out, work.act, down, false);
  const auto multiply = [&]<class Cut>(Cut, const ExpertPlan& plan, const auto& product,
                                       const Tensor& w, int stages, int blocks_per_sm) {
    const int64_t row_blocks = ceil_div(product.columns, Cut::kColumns),
                  units = plan.most_tiles() * row_blocks;
    launch_early(expert_stream_kernel<Cut>,
                 {grid_size(std::min<int64_t>(units, blocks_per_sm * num_sms_))}, Cut::kThreads,
                 Cut::shared_bytes(stages), product, plan,
                 map_experts(w, Cut::kHalves, Cut::kColumns, Cut::kDepth),
                 static_cast<int>(row_blocks), stages, !Cut::kGated);
  };
  if (sorted) {
    using Some = StreamCut<true, 4>;
    const ExpertPlan plan = plan_of(ids, work.plan, experts, Some::kTokens, true);
    moe_plan(plan);
    multiply(Some{}, plan, gate_up_product, gate_up, 3, 2);
    multiply(StreamCut<false, 4>{}, plan, down_product, down, 2, 2);
    return moe_sum(y, work.out, weights, plan);
  }
  const ExpertPlan plan = plan_of(ids, work.plan, experts, 1, false);
  multiply(StreamCut<true, 1>{}, plan, gate_up_product, gate_up, 6, 1);
  launch_early(expert_down_sum_kernel,
               {grid_size(ceil_div(h, SumCut::kColumns)), grid_size(tokens)}, SumCut::kThreads,
               SumCut::shared_bytes(n, per_token), down_product, plan,
               ExpertSum{device_ptr<bf16>(y), y.stride[0], weights.ptr<float>()},
               map_experts(down, 1, SumCut::kColumns, SumCut::kDepth));
}

bool CudaBackend::multiply_quantised_experts(Tensor y, Tensor x, const Weight& w,
                                             const ExpertPlan& plan, const ExpertChoice& choice) {
  if (!w.format.is_quantised()) return false;
  if (!w.format.quantises_rows()) {
#ifdef NANOVLLM_CUDA_HOPPER
    if (choice.kernel == ExpertKernel::packed_many)
      return multiply_many_packed_experts(y, x, w, plan), true;
#endif
    return multiply_packed_experts(y, x, w, plan), true;
  }
  ExpertPlan places = plan;
  if (y.shape[1] == w.n()) places.token_of = nullptr, places.per_token = 1;  // x has a row for each
  const QuantisedOperand rows = quantise_rows(x, w, &places);
#ifdef NANOVLLM_CUDA_HOPPER
  if (is_hopper_) return multiply_fp8_experts(y, rows, w, plan, choice.tile_tokens), true;
#endif
  return multiply_w8a8_experts(y, rows, w, plan, choice.tile_tokens), true;
}

void CudaBackend::moe_mlp(Tensor y, Tensor x, Tensor weights, Tensor ids, Weight gate_up_weight,
                          Weight down_weight, const MoeWorkspace& work) {
  const Tensor &gate_up = gate_up_weight.data, &down = down_weight.data;
  const int64_t tokens = x.shape[0], h = x.shape[1], n = down.shape[2], experts = down.shape[0],
                pairs = ids.numel();
  check_experts(y, x, weights, ids, gate_up, down, work);
  if (pairs == 0) return;
  const auto rank = [](const Weight& w) {
    return w.format.quantises_rows() ? 2 : w.format.is_quantised() ? 1 : 0;
  };
  const Weight& decisive = rank(gate_up_weight) > rank(down_weight) ? gate_up_weight : down_weight;
  const ExpertChoice choice =
      choose_experts({decisive.format, tokens, ids.shape[1], experts, h, n,
                      !has_any(uneven_, gate_up_weight) && !has_any(uneven_, down_weight),
                      unpacks_simply(gate_up_weight) && unpacks_simply(down_weight)},
                     gemm_gpu());
  if (choice.kernel == ExpertKernel::plain) {
    const ExpertPlan plan = plan_of(ids, work.plan, experts, 1, false);
    dispatch_float(x.dtype, [&]<class T>() {
      const auto grid = [&](int64_t columns) {
        return dim3{grid_size(pairs), grid_size(ceil_div(columns, kPlainThreads))};
      };
      launch(expert_plain_kernel<DeviceType<T>, true>, grid(n), kPlainThreads, 0,
             product_of<T>(work.act, x, gate_up, true), plan);
      launch(expert_plain_kernel<DeviceType<T>, false>, grid(h), kPlainThreads, 0,
             product_of<T>(work.out, work.act, down, false), plan);
    });
    return moe_sum(y, work.out, weights, plan);
  }
  check(wide_rows({x, gate_up, down, work.act, work.out, work.plan}),
        "moe_mlp: rows of {} or of the weights do not begin on 16 bytes", x.describe());
#ifdef NANOVLLM_CUDA_HOPPER
  if (choice.kernel == ExpertKernel::many) {
    const ExpertPlan plan = plan_of(ids, work.plan, experts, choice.tile_tokens, true);
    moe_plan(plan);
    multiply_many_experts(work.act, x, gate_up, plan);
    multiply_many_experts(work.out, work.act, down, plan);
    return moe_sum(y, work.out, weights, plan);
  }
#endif
  if (choice.kernel == ExpertKernel::stream || choice.kernel == ExpertKernel::pairs)
    return stream_experts(y, x, weights, ids, gate_up, down, work,
                          choice.kernel == ExpertKernel::stream);
  dispatch_shape(choice.tile_tokens, [&]<class Shape>(Shape) {
    const bool sorted = choice.is_sorted;
    const auto tile_rows = sorted ? std::min<int64_t>(tokens, Shape::kTokens) : 1;
    const ExpertPlan plan = plan_of(ids, work.plan, experts, static_cast<int>(tile_rows), sorted);
    if (sorted) moe_plan(plan);
    const auto multiply = [&](auto kernel, const auto& product, int64_t rows, bool early) {
      const int64_t row_blocks = ceil_div(product.columns, rows);
      const int64_t units = plan.most_tiles() * row_blocks;
      launch_early(kernel, {grid_size(std::min<int64_t>(units, Shape::kBlocksPerSm * num_sms_))},
                   Shape::kThreads, Shape::kSharedBytes, product, plan,
                   static_cast<int>(row_blocks), early);
    };
    if (!multiply_quantised_experts(work.act, x, gate_up_weight, plan, choice))
      multiply(expert_gemm_kernel<Shape, true>, product_of<bf16>(work.act, x, gate_up, true),
               Shape::kRows / 2, false);
    // The plan is older than the kernel before: this one may begin while that one ends.
    if (!multiply_quantised_experts(work.out, work.act, down_weight, plan, choice))
      multiply(expert_gemm_kernel<Shape, false>, product_of<bf16>(work.out, work.act, down, false),
               Shape::kRows, true);
    moe_sum(y, work.out, weights, plan);
  });
}

}  // namespace nanovllm
