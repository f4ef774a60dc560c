// The choice of experts, their order, and the sum of what they said. Each reads and writes a few
// kilobytes per token: their time is that of a launch.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/moe/moe.cuh"

namespace nanovllm {
namespace {

constexpr int kRouteWarps = 4, kPlanThreads = 1024, kSumThreads = 128;
constexpr int kMostExperts = kPlanThreads;

struct Candidate {
  float value;
  int id;
  __device__ bool beats(const Candidate& other) const {
    return value > other.value || (value == other.value && id < other.id);
  }
};

/// A warp for a token; lane i holds the logits i, i + 32, ... Tokens without a slot in `slots`, if
/// that is not null, are padding, and have the first token's experts.
template <int kPerLane>
__global__ void __launch_bounds__(kRouteWarps* kWarp)
    route_kernel(float* weights, int* ids, const float* logits, const int* slots, int64_t stride,
                 int tokens, int experts, int k, bool normalise) {
  wait_for_previous();
  let_next_start();
  const int lane = threadIdx.x % kWarp, token = blockIdx.x * kRouteWarps + threadIdx.x / kWarp;
  if (token >= tokens) return;
  const float lowest = -INFINITY;
  const float* row = logits + (slots && slots[token] < 0 ? 0 : token * stride);
  float value[kPerLane];
  bool is_left[kPerLane];
  float top = lowest;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = i * kWarp + lane;
    is_left[i] = e < experts;
    value[i] = is_left[i] ? row[e] : lowest;
    top = value[i] > top ? value[i] : top;
  }
  top = warp_max(top);
  float total = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) total += is_left[i] ? expf(value[i] - top) : 0.0f;
  total = warp_sum(total);

  float chosen = 0, mine_weight = 0;  // lane n keeps the n-th
  int mine_id = 0;
  weights += int64_t{token} * k;
  ids += int64_t{token} * k;
  for (int n = 0; n < k; ++n) {
    Candidate best{lowest, 0x7fffffff};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const Candidate mine{value[i] == value[i] ? value[i] : lowest, i * kWarp + lane};
      if (is_left[i] && mine.beats(best)) best = mine;
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const Candidate other{__shfl_xor_sync(kFullMask, best.value, offset),
                            __shfl_xor_sync(kFullMask, best.id, offset)};
      if (other.beats(best)) best = other;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) is_left[i] &= i * kWarp + lane != best.id;
    const float weight = expf(best.value - top) / total;
    chosen += weight;
    if (lane == n) {
      mine_weight = weight;
      mine_id = best.id;
    }
  }
  if (lane >= k) return;
  weights[lane] = normalise ? mine_weight / chosen : mine_weight;
  ids[lane] = mine_id;
}

/// Inclusive sums of `x` over the threads of the block. `shared`: one per warp.
__device__ int2 block_scan(int2 x, int2* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int2 other{__shfl_up_sync(kFullMask, x.x, offset),
                     __shfl_up_sync(kFullMask, x.y, offset)};
    if (lane >= offset) x.x += other.x, x.y += other.y;
  }
  if (lane == kWarp - 1) shared[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) x.x += shared[i].x, x.y += shared[i].y;
  return x;
}

/// f(pairs, their experts, how many) of the thread's pairs, several at once: each load and each
/// count that comes back is waited for beside the others.
template <class F>
__device__ void for_own_pairs(const ExpertPlan& plan, const F& f) {
  constexpr int kAtOnce = 8;
  for (int first = threadIdx.x; first < plan.pairs; first += kAtOnce * kPlanThreads) {
    int expert[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int pair = first + i * kPlanThreads;
      expert[i] = pair < plan.pairs ? plan.ids[pair] : -1;
    }
    f(first, expert);
  }
}

/// One block: counts, offsets, tiles and places. The order of an expert's places is not defined;
/// no bit depends on it.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(ExpertPlan plan) {
  __shared__ int count[kMostExperts];
  __shared__ int2 partial[kPlanThreads / kWarp];
  const int e = threadIdx.x;
  count[e] = 0;
  wait_for_previous();
  let_next_start();
  __syncthreads();
  for_own_pairs(plan, [&](int, const auto& expert) {
#pragma unroll
    for (const int own : expert)
      if (own >= 0) atomicAdd(&count[own], 1);
  });
  __syncthreads();
  const int mine = count[e], tiles = (mine + plan.tile_rows - 1) / plan.tile_rows;
  const int2 end = block_scan({mine, tiles}, partial);
  const int first = end.x - mine;
  for (int i = 0; i < tiles; ++i)
    plan.tiles[end.y - tiles + i] = {e, first + i * plan.tile_rows,
                                     min(plan.tile_rows, mine - i * plan.tile_rows), 0};
  if (e == kPlanThreads - 1) *plan.num_tiles = end.y;
  count[e] = first;
  __syncthreads();
  for_own_pairs(plan, [&](int pair, const auto& expert) {
    constexpr int kAtOnce = std::extent_v<std::remove_reference_t<decltype(expert)>>;
    int place[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (expert[i] >= 0) place[i] = atomicAdd(&count[expert[i]], 1);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, pair += kPlanThreads) {
      if (expert[i] < 0) continue;
      plan.token_of[place[i]] = pair / plan.per_token;
      plan.place_of[pair] = place[i];
    }
  });
}

/// y[t, :] = sum of weights[t, i] * out[place of (t, i), :] in the order of i; a block is one token
/// by 128 vectors.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    sum_experts_kernel(T* y, int64_t y_stride, const T* out, const float* weights, ExpertPlan plan,
                       int64_t n, bool wide) {
  wait_for_previous();
  let_next_start();
  const int64_t c = (int64_t{blockIdx.y} * kSumThreads + threadIdx.x) * Vec<T>::size;
  if (c >= n) return;
  const int first = blockIdx.x * plan.per_token;
  float sum[Vec<T>::size] = {};
#pragma unroll 8
  for (int i = 0; i < plan.per_token; ++i) {
    const float weight = weights[first + i];
    const Vec<T> row = load_vec(out + place_of(plan, first + i) * n + c, n - c, wide);
#pragma unroll
    for (int j = 0; j < Vec<T>::size; ++j) sum[j] = __fmaf_rn(weight, to_float(row.v[j]), sum[j]);
  }
  Vec<T> result;
#pragma unroll
  for (int j = 0; j < Vec<T>::size; ++j) result.v[j] = round_to<T>(sum[j]);
  store_vec(y + blockIdx.x * y_stride + c, result, n - c, wide);
}

}  // namespace

void CudaBackend::moe_route(Tensor weights, Tensor ids, Tensor logits, bool normalise) {
  route(weights, ids, logits, normalise, nullptr);
}

void CudaBackend::route(const Tensor& weights, const Tensor& ids, const Tensor& logits,
                        bool normalise, const int* slots) {
  const int64_t tokens = logits.shape[0], experts = logits.shape[1], k = ids.shape[1];
  check(weights.shape == ids.shape && ids.shape[0] == tokens && weights.contiguous() &&
            ids.contiguous() && 1 <= k && k <= experts,
        "moe_route: {} and {} of {}", weights.describe(), ids.describe(), logits.describe());
  check(experts <= kMostExperts && k <= kWarp, ErrorKind::device,
        "{} of {} experts: at most {} of {} are supported on a GPU", k, experts, kWarp,
        kMostExperts);
  const auto run = [&](auto kernel) {
    launch_early(kernel, {grid_size(ceil_div(tokens, kRouteWarps))}, kRouteWarps * kWarp, 0,
                 weights.ptr<float>(), ids.ptr<int32_t>(), logits.ptr<float>(), slots,
                 logits.stride[0], static_cast<int>(tokens), static_cast<int>(experts),
                 static_cast<int>(k), normalise);
  };
  if (experts <= 4 * kWarp)
    run(route_kernel<4>);
  else if (experts <= 8 * kWarp)
    run(route_kernel<8>);
  else
    run(route_kernel<kMostExperts / kWarp>);
}

void CudaBackend::moe_plan(const ExpertPlan& plan) {
  launch_early(plan_kernel, {1}, kPlanThreads, 0, plan);
}

void CudaBackend::moe_sum(Tensor y, Tensor out, Tensor weights, const ExpertPlan& plan) {
  dispatch_float(y.dtype, [&]<class T>() {
    using D = DeviceType<T>;
    const dim3 grid{grid_size(y.shape[0]),
                    grid_size(ceil_div(y.shape[1], kSumThreads * Vec<D>::size))};
    launch_early(sum_experts_kernel<D>, grid, kSumThreads, 0, device_ptr<T>(y), y.stride[0],
                 device_ptr<T>(out), weights.ptr<float>(), plan, y.shape[1], wide_rows({y, out}));
  });
}

}  // namespace nanovllm
