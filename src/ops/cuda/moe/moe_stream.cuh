// The products of a mixture of experts in bf16 where an expert has few tokens, from sm_90 on: what
// is read of the weights is what counts.
//
// Floor: the chosen experts' weights over the memory's bandwidth. A unit of work is some rows of an
// expert's weight by one tile of tokens. One warp of a block brings units' weights (one copy of the
// copy engine a stage) and tokens through a ring of stages; each of the others multiplies 16 rows:
// one chain of mma m16n8k16 steps over k per output, the bits of expert_gemm_kernel().
#pragma once

#include "ops/cuda/gemm/gemm_kernels.h"
#include "ops/cuda/moe/moe.cuh"
#include "ops/cuda/ptx/mma.cuh"
#include "ops/cuda/ptx/tma.cuh"

namespace nanovllm {

constexpr int kSliceColumns = 64, kSliceBytes = 128;  // of a weight's row, in a stage
constexpr int kMostStreamStages = 16;

/// How a block is cut. A tile has at most 8 kNi tokens. Gated: each warp has 8 rows of the weight's
/// first half and the same 8 of its second.
template <bool kGated_, int kNi_>
struct StreamCut {
  static constexpr bool kGated = kGated_;
  static constexpr int kNi = kNi_, kTokens = 8 * kNi_;
  static constexpr int kWarps = kGated ? 6 : 8;                       // that multiply
  static constexpr int kThreads = (kWarps + 1) * 32;                  // and one that copies
  static constexpr int kColumns = kGated ? 8 * kWarps : 16 * kWarps;  // of y in a unit
  static constexpr int kHalves = kGated ? 2 : 1;
  static constexpr int kDepth = 2;  // slices of a stage
  static constexpr int kHalfBytes = kColumns * kSliceBytes;
  static constexpr int kWeightBytes = kDepth * kHalves * kHalfBytes;  // of a stage
  static constexpr int kTokenPitch = kDepth * kSliceBytes + 16;       // the pad keeps banks apart
  static constexpr int kTokenBytes = kTokens * kTokenPitch;
  static constexpr size_t shared_bytes(int stages) {
    return 1024 + static_cast<size_t>(stages) * (kWeightBytes + kTokenBytes);
  }
};

#if __CUDA_ARCH__ >= 900

/// A tile of a plan that an earlier kernel wrote, past the L1 cache.
__device__ inline ExpertTile fresh_tile(const ExpertPlan& plan, int i) {
  if (!plan.tiles) return {__ldcg(plan.ids + i), i, 1, 0};
  const int4 t = __ldcg(reinterpret_cast<const int4*>(plan.tiles) + i);
  return {t.x, t.y, t.z, t.w};
}

/// A block's stages one after another, and their places in the ring.
struct StreamCursor : RingCursor {
  int unit, k = 0;
  ExpertTile tile{};
  int64_t row = 0;  // of x, this lane's

  __device__ StreamCursor() : unit(static_cast<int>(blockIdx.x)) {}
  __device__ void next(int k_end, int depth, int stages) {
    k += depth * kSliceColumns;
    if (k >= k_end) k = 0, unit += static_cast<int>(gridDim.x);
    RingCursor::next(stages);
  }
};

/// Of weights; the stages' tokens lie behind all of them.
struct StreamRing : StageRing {
  unsigned char* tokens;
  int stages;
};

/// The copying warp's part.
template <class Cut>
struct StreamSource {
  const ExpertProduct<__nv_bfloat16>& product;
  const ExpertPlan& plan;
  const CUtensorMap* map;
  const StreamRing& ring;
  int units, row_blocks;

  __device__ void copy_weight(StreamCursor& at) const {
    if (at.k == 0) at.tile = fresh_tile(plan, at.unit / row_blocks);
    if (threadIdx.x % kWarp != 0) return;
    const int length = min(Cut::kDepth * kSliceColumns, product.k - at.k);
    arrive_expecting(ring.full + at.stage, Cut::kWeightBytes + at.tile.rows * length * 2);
    const auto copy = [&](auto... at_box) {
      unsigned char* to = ring.at(at.stage);
      if constexpr (Cut::kNi == 1)  // hardly two tiles have one expert
        copy_box_once(to, map, ring.full + at.stage, at_box...);
      else
        copy_box(to, map, ring.full + at.stage, at_box...);
    };
    copy(0, at.unit % row_blocks * Cut::kColumns, 0, at.k / kSliceColumns, at.tile.expert);
  }
  __device__ void copy_tokens(StreamCursor& at) const {
    const int lane = threadIdx.x % kWarp;
    if (at.k == 0) {
      at.tile = fresh_tile(plan, at.unit / row_blocks);
      const int place = at.tile.first + lane;
      if (lane < at.tile.rows) at.row = product.by_token ? token_of(plan, place) : place;
    }
    const int length = min(Cut::kDepth * kSliceColumns, product.k - at.k);
    if (lane < at.tile.rows)
      copy_bytes(ring.tokens + at.stage * Cut::kTokenBytes + lane * Cut::kTokenPitch,
                 product.x + at.row * product.x_stride + at.k, length * 2, ring.full + at.stage);
  }
  __device__ void next(StreamCursor& at) const { at.next(product.k, Cut::kDepth, ring.stages); }

  __device__ void run(bool early) const {
    StreamCursor at;
    if (early) {
      for (StreamCursor weight; weight.parity == 0 && weight.unit < units; next(weight))
        copy_weight(weight);
      wait_for_previous();
    }
    let_next_start();
    if (early)
      for (; at.parity == 0 && at.unit < units; next(at)) copy_tokens(at);
    for (; at.unit < units; next(at)) {
      wait_barrier(ring.empty + at.stage, at.parity ^ 1);
      copy_weight(at);
      __syncwarp();
      copy_tokens(at);
    }
  }
};

/// One slice of a stage: four steps of k.
template <class Cut>
__device__ void multiply_slice(float (&sum)[Cut::kNi][4], const unsigned char* weights,
                               const unsigned char* tokens, int chunk, int swizzle) {
  const auto at = [](const unsigned char* p) { return reinterpret_cast<const __nv_bfloat16*>(p); };
  uint32_t a[4][4], b[Cut::kNi][2][4];
#pragma unroll
  for (int step = 0; step < 4; ++step)
    load_matrices(a[step], at(weights + ((step * 2 + chunk ^ swizzle) << 4)));
#pragma unroll
  for (int j = 0; j < Cut::kNi; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      load_matrices(b[j][half], at(tokens + j * 8 * Cut::kTokenPitch + half * 64));
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int j = 0; j < Cut::kNi; ++j)
      mma_m16n8k16(sum[j], a[step], b[j][step / 2][step % 2 * 2], b[j][step / 2][step % 2 * 2 + 1]);
}

/// The matrix transposed: two values of a row in each register become two of a column.
__device__ inline uint32_t turned(float first, float second) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(pack_bf16(first, second)));
  return y;
}

/// A warp's outputs of a unit, `column` its first.
template <class Cut>
__device__ void store_stream(const ExpertProduct<__nv_bfloat16>& product, const ExpertTile& tile,
                             int column, const float (&sum)[Cut::kNi][4]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < Cut::kNi; ++j) {
    const int row = j * 8 + lane / 4;
    const float(&s)[4] = sum[j];
    uint32_t packed[2];
    if constexpr (Cut::kGated) {
      packed[0] = turned(to_float(gated<__nv_bfloat16>(s[0], s[2])),
                         to_float(gated<__nv_bfloat16>(s[1], s[3])));
    } else {
      packed[0] = turned(s[0], s[1]);
      packed[1] = turned(s[2], s[3]);
    }
    __nv_bfloat16* to = product.y + (tile.first + row) * product.y_stride;
#pragma unroll
    for (int h = 0; h < 3 - Cut::kHalves; ++h) {
      const int c = column + h * 8 + lane % 4 * 2;
      if (row < tile.rows && c < product.columns) *reinterpret_cast<uint32_t*>(to + c) = packed[h];
    }
  }
}

/// A multiplying warp's part.
template <class Cut>
__device__ void multiply_units(const ExpertProduct<__nv_bfloat16>& product, const ExpertPlan& plan,
                               const StreamRing& ring, int units, int row_blocks) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int row = Cut::kGated ? warp * 8 + lane % 8 : warp * 16 + lane % 16;
  const int own = row * kSliceBytes + (Cut::kGated ? lane / 8 % 2 * Cut::kHalfBytes : 0);
  StreamCursor at;
  while (at.unit < units) {
    const int unit = at.unit;
    const ExpertTile tile = fresh_tile(plan, unit / row_blocks);
    // Where a tile has fewer tokens, what lies behind them is multiplied: nobody reads those sums.
    float sum[Cut::kNi][4] = {};
    const int token = lane % 8 * Cut::kTokenPitch + lane / 8 * 16;
    do {
      wait_barrier(ring.full + at.stage, at.parity);
      const unsigned char *weights = ring.at(at.stage) + own,
                          *tokens = ring.tokens + at.stage * Cut::kTokenBytes + token;
#pragma unroll
      for (int slice = 0; slice < Cut::kDepth; ++slice)
        if (at.k + slice * kSliceColumns < product.k)
          multiply_slice<Cut>(sum, weights + slice * Cut::kHalves * Cut::kHalfBytes,
                              tokens + slice * kSliceBytes, lane / 16, lane % 8);
      __syncwarp();
      if (lane == 0) arrive(ring.empty + at.stage);
      at.next(product.k, Cut::kDepth, ring.stages);
    } while (at.k != 0);
    store_stream<Cut>(product, tile,
                      unit % row_blocks * Cut::kColumns + warp * (Cut::kGated ? 8 : 16), sum);
  }
}

#endif

/// `map`: boxes of kColumns rows of each half by kDepth slices; `stages`: of the ring.
/// `early`: the plan is older than the kernel before this one, so that weights may be fetched while
/// that one ends.
template <class Cut>
__global__ void __launch_bounds__(Cut::kThreads)
    expert_stream_kernel(const __grid_constant__ ExpertProduct<__nv_bfloat16> product,
                         const __grid_constant__ ExpertPlan plan,
                         const __grid_constant__ CUtensorMap map, int row_blocks, int stages,
                         bool early) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint64_t full[kMostStreamStages], empty[kMostStreamStages];
  unsigned char* const data = shared + (1024 - shared_address(shared) % 1024) % 1024;
  const StreamRing ring{
      {data, Cut::kWeightBytes, full, empty}, data + stages * Cut::kWeightBytes, stages};
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == Cut::kWarps * kWarp) {
    prefetch_map(&map);
    for (int i = 0; i < stages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&empty[i], Cut::kWarps);
    }
    fence_new_barriers();
  }
  __syncthreads();
  if (!early || warp < Cut::kWarps) wait_for_previous();
  const int units = num_tiles(plan) * row_blocks;
  if (warp == Cut::kWarps)
    StreamSource<Cut>{product, plan, &map, ring, units, row_blocks}.run(early);
  else
    multiply_units<Cut>(product, plan, ring, units, row_blocks);
#endif
}

// -- The second product of few tokens, together with the sum over a token's experts --

struct ExpertSum {
  __nv_bfloat16* y;
  int64_t y_stride;
  const float* weights;  // of the pairs
};

/// y[t, :] = sum of weights[t, i] * (x[pair (t, i), :] w[its expert]^T, rounded) in the order of i.
/// The routing is older than the kernel before this one. Grid: columns / 16 by tokens.
__global__ void __launch_bounds__(SumCut::kThreads)
    expert_down_sum_kernel(const __grid_constant__ ExpertProduct<__nv_bfloat16> product,
                           const __grid_constant__ ExpertPlan plan, const ExpertSum sum_into,
                           const __grid_constant__ CUtensorMap map) {
#if __CUDA_ARCH__ >= 900
  using Cut = SumCut;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint64_t full[Cut::kWarps][Cut::kStages], act_here[Cut::kWarps];
  unsigned char* const data = shared + (1024 - shared_address(shared) % 1024) % 1024;
  const int lane = threadIdx.x % kWarp,
            warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0);
  const int column = blockIdx.x * Cut::kColumns, first_pair = blockIdx.y * plan.per_token;
  unsigned char* const ring = data + warp * Cut::kStages * Cut::kStageBytes;
  unsigned char* const act =
      data + Cut::kWarps * Cut::kStages * Cut::kStageBytes + warp * product.k * 2;
  float* const outs = reinterpret_cast<float*>(
      data + Cut::kWarps * (Cut::kStages * Cut::kStageBytes + product.k * 2));
  if (lane == 0) {
    for (uint64_t& barrier : full[warp]) init_barrier(&barrier, 1);
    init_barrier(&act_here[warp], 1);
    fence_new_barriers();
  }
  __syncwarp();
  const int steps = (product.k + Cut::kDepth * kSliceColumns - 1) / (Cut::kDepth * kSliceColumns);
  const int mine = (plan.per_token - warp + Cut::kWarps - 1) / Cut::kWarps, total = mine * steps;
  const auto fetch = [&](int i) {
    const int expert = __ldcg(plan.ids + first_pair + warp + i / steps * Cut::kWarps);
    uint64_t* barrier = &full[warp][i % Cut::kStages];
    arrive_expecting(barrier, Cut::kStageBytes);
    copy_box_once(ring + i % Cut::kStages * Cut::kStageBytes, &map, barrier, 0, column, 0,
                  i % steps * Cut::kDepth, expert);
  };
  if (lane == 0)
    for (int i = 0; i < min(Cut::kStages, total); ++i) fetch(i);
  wait_for_previous();
  let_next_start();
  for (int i = 0, step = 0; i < mine; ++i) {
    const int in_token = warp + i * Cut::kWarps, pair = first_pair + in_token;
    if (lane == 0) {
      arrive_expecting(&act_here[warp], product.k * 2);
      copy_bytes(act, product.x + pair * product.x_stride, product.k * 2, &act_here[warp]);
    }
    wait_barrier(&act_here[warp], i & 1);
    float sum[4] = {};
    for (int s = 0; s < steps; ++s, ++step) {
      const int stage = step % Cut::kStages;
      wait_barrier(&full[warp][stage], step / Cut::kStages & 1);
      const unsigned char* weights = ring + stage * Cut::kStageBytes + lane % 16 * kSliceBytes;
      const unsigned char* tokens = act + s * Cut::kDepth * kSliceBytes + lane / 8 * 16;
#pragma unroll
      for (int slice = 0; slice < Cut::kDepth; ++slice)
        if ((s * Cut::kDepth + slice) * kSliceColumns < product.k) {
          float one[1][4] = {{sum[0], sum[1], sum[2], sum[3]}};
          multiply_slice<StreamCut<false, 1>>(one, weights + slice * Cut::kColumns * kSliceBytes,
                                              tokens + slice * kSliceBytes, lane / 16, lane % 8);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[e] = one[0][e];
        }
      __syncwarp();
      if (lane == 0 && step + Cut::kStages < total) fetch(step + Cut::kStages);
    }
    if (lane % 4 == 0) {
      outs[in_token * Cut::kColumns + lane / 4] = to_float(__float2bfloat16_rn(sum[0]));
      outs[in_token * Cut::kColumns + lane / 4 + 8] = to_float(__float2bfloat16_rn(sum[2]));
    }
    __syncwarp();
  }
  __syncthreads();
  if (threadIdx.x >= Cut::kColumns || column + static_cast<int>(threadIdx.x) >= product.columns)
    return;
  float sum = 0;
  for (int i = 0; i < plan.per_token; ++i)
    sum = __fmaf_rn(__ldcg(sum_into.weights + first_pair + i),
                    outs[i * Cut::kColumns + threadIdx.x], sum);
  sum_into.y[blockIdx.y * sum_into.y_stride + column + threadIdx.x] = __float2bfloat16_rn(sum);
#endif
}

}  // namespace nanovllm
