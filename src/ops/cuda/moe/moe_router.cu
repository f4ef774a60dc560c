// The router's product and the routing in one kernel, for few tokens.
//
// Floor: latency. A cluster of eight blocks serves eight tokens: each block multiplies an eighth of
// the router's weight, which it fetches while the kernel before this one ends, with all of them,
// one chain of mma m16n8k16 steps over k per logit (the bits of gemm_in_order()), and sends each
// token's logits to the block that routes it. There an expert's rank is counted, by one thread, as
// the experts that come before it: the same as choosing the first one k times, without k rounds.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/moe/moe.cuh"
#include "ops/cuda/ptx/mma.cuh"
#include "ops/cuda/ptx/tma.cuh"

namespace nanovllm {
namespace {

constexpr int kRouterBlocks = 8, kRouterTokens = 8;  // of a cluster
constexpr int kRouterWarps = 8, kRouterThreads = kRouterWarps * kWarp;
constexpr int kMostRouterTokens = 64;

struct Router {
  const __nv_bfloat16 *x, *w;
  int64_t x_stride;
  float *weights, *logits;
  int* ids;
  const int* slots;  // of the tokens, or null
  int64_t logits_stride;
  int tokens, experts, k, per_token;
  int block_experts;  // a multiple of 16
  bool normalise;

  /// Of a row in shared memory; the pad keeps banks apart.
  __host__ __device__ int pitch() const { return k * 2 + 16; }
  size_t shared_bytes() const {
    return static_cast<size_t>(block_experts + kRouterTokens) * static_cast<size_t>(pitch()) +
           static_cast<size_t>(experts) * sizeof(float);
  }
};

#if __CUDA_ARCH__ >= 900

__device__ uint32_t block_of_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// Writes where `p` is in the shared memory of a block of the cluster.
__device__ void store_remote(float* p, uint32_t block, float value) {
  asm volatile(
      "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\nst.shared::cluster.f32 [at], %2;\n}"
      :
      : "r"(shared_address(p)), "r"(block), "f"(value)
      : "memory");
}

/// The operands of four steps.
struct RouterFragments {
  uint32_t a[4][4], b[2][4];
  __device__ void load(const unsigned char* weights, const unsigned char* tokens) {
    const auto at = [](const unsigned char* p) {
      return reinterpret_cast<const __nv_bfloat16*>(p);
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) load_matrices(b[i], at(tokens + i * 64));
#pragma unroll
    for (int i = 0; i < 4; ++i) load_matrices(a[i], at(weights + i * 32));
  }
  __device__ void multiply(float (&sum)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      mma_m16n8k16(sum, a[i], b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
  }
};

/// 16 experts' logits of 8 tokens; k is a multiple of 128.
__device__ void multiply_chain(float (&sum)[4], const unsigned char* weights,
                               const unsigned char* tokens, int k) {
  RouterFragments first, second;
  first.load(weights, tokens);
#pragma unroll 2
  for (int k0 = 0; k0 < k; k0 += 128) {
    second.load(weights + k0 * 2 + 128, tokens + k0 * 2 + 128);
    first.multiply(sum);
    const int next = k0 + 128 < k ? k0 + 128 : 0;  // something that is there
    first.load(weights + next * 2, tokens + next * 2);
    second.multiply(sum);
  }
}

/// moe_route() of a token's logits, which lie in shared memory; by the whole block. The
/// arithmetic and its order are those of route_kernel().
__device__ void route_token(const Router& r, const float* logits, int token,
                            float* chosen_weights) {
  const int lane = threadIdx.x % kWarp;
  const float lowest = -INFINITY;
  float top = lowest, total = 0;
  for (int e = lane; e < r.experts; e += kWarp) top = logits[e] > top ? logits[e] : top;
  top = warp_max(top);
  for (int e = lane; e < r.experts; e += kWarp) total += expf(logits[e] - top);
  total = warp_sum(total);
  const auto comparable = [&](float v) { return v == v ? v : lowest; };
  for (int e = threadIdx.x; e < r.experts; e += kRouterThreads) {
    const float own = comparable(logits[e]);
    int rank = 0;
#pragma unroll 8
    for (int other = 0; other < r.experts; ++other) {
      const float v = comparable(logits[other]);
      rank += v > own || (v == own && other < e);
    }
    if (rank >= r.per_token) continue;
    r.ids[token * r.per_token + rank] = e;
    chosen_weights[rank] = expf(own - top) / total;
  }
  __syncthreads();
  if (threadIdx.x >= r.per_token) return;
  float chosen = 0;
  for (int i = 0; i < r.per_token; ++i) chosen += chosen_weights[i];
  const float weight = chosen_weights[threadIdx.x];
  r.weights[token * r.per_token + threadIdx.x] = r.normalise ? weight / chosen : weight;
}

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define NANOVLLM_CLUSTER  // never launched there
#else
#define NANOVLLM_CLUSTER __cluster_dims__(kRouterBlocks, 1, 1)
#endif

__global__ void NANOVLLM_CLUSTER __launch_bounds__(kRouterThreads)
    router_kernel(const __grid_constant__ Router r) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ uint64_t weights_here, tokens_here;
  __shared__ float chosen_weights[kWarp];
  unsigned char* const tokens = shared + r.block_experts * r.pitch();
  float* const logits = reinterpret_cast<float*>(tokens + kRouterTokens * r.pitch());
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row_bytes = r.k * 2;
  const int rank = static_cast<int>(block_of_cluster()), first_expert = rank * r.block_experts,
            first_token = static_cast<int>(blockIdx.y) * kRouterTokens;
  const int experts = min(max(r.experts - first_expert, 0), r.block_experts),
            present = min(r.tokens - first_token, kRouterTokens);
  arrive_at_cluster();
  if (warp == 0) {
    if (lane == 0) {
      init_barrier(&weights_here, 1);
      init_barrier(&tokens_here, 1);
      fence_new_barriers();
      arrive_expecting(&weights_here, experts * row_bytes);
    }
    __syncwarp();
    for (int row = lane; row < experts; row += kWarp)
      copy_bytes(shared + row * r.pitch(), r.w + int64_t{first_expert + row} * r.k, row_bytes,
                 &weights_here);
    wait_for_previous();
    if (lane == 0) arrive_expecting(&tokens_here, present * row_bytes);
    __syncwarp();
    if (lane < present) {
      // Padding has the first token's experts, whose weights are read once then.
      const bool is_padding = r.slots && r.slots[first_token + lane] < 0;
      copy_bytes(tokens + lane * r.pitch(),
                 r.x + (first_token + (is_padding ? 0 : lane)) * r.x_stride, row_bytes,
                 &tokens_here);
    }
  } else {
    wait_for_previous();
  }
  let_next_start();
  __syncthreads();
  wait_for_cluster();  // its blocks are there
  if (warp * 16 < experts) {
    float sum[4] = {};
    wait_barrier(&weights_here, 0);
    wait_barrier(&tokens_here, 0);
    // Columns of absent tokens repeat the last one's: nobody reads their sums.
    multiply_chain(sum, shared + (warp * 16 + lane % 16) * r.pitch() + lane / 16 * 16,
                   tokens + min(lane % 8, present - 1) * r.pitch() + lane / 8 * 16, r.k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_block = warp * 16 + lane / 4 + i / 2 * 8, token = lane % 4 * 2 + i % 2;
      if (in_block >= experts || token >= present) continue;
      const int expert = first_expert + in_block;
      store_remote(logits + expert, token, sum[i]);
      r.logits[(first_token + token) * r.logits_stride + expert] = sum[i];
    }
  }
  arrive_at_cluster();
  wait_for_cluster();
  if (rank < present) route_token(r, logits, first_token + rank, chosen_weights);
#endif
}

}  // namespace

void CudaBackend::moe_router(Tensor weights, Tensor ids, Tensor logits, Tensor x, Weight weight,
                             bool normalise, Tensor slot_mapping) {
  const Tensor& w = weight.data;
  const int64_t tokens = x.shape[0], k = x.shape[1], experts = w.shape[0], per_token = ids.shape[1];
  check(w.shape[1] == k && logits.shape[0] == tokens && logits.shape[1] == experts &&
            weights.shape == ids.shape && ids.shape[0] == tokens && weights.contiguous() &&
            ids.contiguous() && 1 <= per_token && per_token <= experts,
        "moe_router: {} times {} into {}, {}", x.describe(), w.describe(), logits.describe(),
        ids.describe());
  const int* const slots = slot_mapping.defined() ? slot_mapping.ptr<int32_t>() : nullptr;
  Router router{};
  router.k = static_cast<int>(k);
  router.experts = static_cast<int>(experts);
  router.block_experts = static_cast<int>(ceil_div(experts, kRouterBlocks * 16)) * 16;
  if (!encode_map_ || weight.format.is_quantised() || x.dtype != DType::bf16 || tokens < 1 ||
      tokens > kMostRouterTokens || k % 128 != 0 || per_token > kWarp ||
      router.block_experts > kRouterWarps * 16 || router.shared_bytes() > max_shared_bytes_ ||
      !wide_rows({x, w})) {
    gemm(logits, x, weight);
    return route(weights, ids, logits, normalise, slots);
  }
  router.x = device_ptr<bf16>(x);
  router.w = device_ptr<bf16>(w);
  router.x_stride = x.stride[0];
  router.weights = weights.ptr<float>();
  router.ids = ids.ptr<int32_t>();
  router.slots = slots;
  router.logits = logits.ptr<float>();
  router.logits_stride = logits.stride[0];
  router.tokens = static_cast<int>(tokens);
  router.per_token = static_cast<int>(per_token);
  router.normalise = normalise;
  launch_early(router_kernel, {kRouterBlocks, grid_size(ceil_div(tokens, kRouterTokens))},
               kRouterThreads, router.shared_bytes(), router);
}

}  // namespace nanovllm
