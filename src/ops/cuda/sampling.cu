// Masking and sampling. One block has one row of logits: one pass for its maximum (and for what
// makes the row unfit), up to five short passes for each of top_k and top_p, one pass for the
// winner. The rows stay in the L2 cache between passes.
//
// Temperature by the Gumbel-max trick: the argmax of logit / T + noise is a draw from
// softmax(logit / T).
#include "ops/cuda/cuda_backend.h"
#include "ops/cuda/select.cuh"
#include "ops/noise.h"

namespace nanovllm {
namespace {

constexpr float kInfinity = __builtin_huge_valf();
/// Probabilities relative to the likeliest token's become integers of this unit.
constexpr float kMassUnit = 0x1p40f;

struct SampleArguments {
  int* token_ids;
  const float* logits;
  int64_t stride;
  int vocab;
  const float* temperature;
  const int* top_k;
  const float *top_p, *min_p;
  const int64_t* seed;
  const int* position;
  bool all_greedy, any_filter, wide;
};

__global__ void mask_logits_kernel(float* logits, int64_t stride, int64_t rows, int64_t vocab,
                                   const int* pairs, int64_t pair_stride, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int row = pairs[i * pair_stride], id = pairs[i * pair_stride + 1];
  if (0 <= row && row < rows && 0 <= id && id < vocab) logits[row * stride + id] = -kInfinity;
}

/// The noise of one token, from the bits of its group of four.
__device__ float uniform_of(const Philox4& bits, int id) {
  const int lane = id % 4;
  return noise_uniform(lane == 0   ? bits.x[0]
                       : lane == 1 ? bits.x[1]
                       : lane == 2 ? bits.x[2]
                                   : bits.x[3]);
}
__device__ float gumbel_of(float uniform) { return -logf(-logf(uniform)); }

/// Best key of the tokens that are kept (from `floor` on, and by min_p), ordered by logit / T +
/// noise. `likeliest`, of logit `maximum`, is always among them: its score is a bar that rules out
/// most others before their noise, or its logarithms, are computed.
__device__ uint64_t noisy_best(const SampleArguments& a, const float* row, int index, int likeliest,
                               float maximum, float temperature, uint64_t floor, float min_p) {
  const uint64_t seed = static_cast<uint64_t>(a.seed[index]);
  const uint32_t position = static_cast<uint32_t>(a.position[index]);
  uint32_t group = static_cast<uint32_t>(likeliest) / 4;
  Philox4 bits = noise_bits(seed, position, group);
  const float top = maximum / temperature, bar = top + gumbel_of(uniform_of(bits, likeliest));
  const float slack = 0.01f + 1e-6f * fabsf(bar);  // for the rounding of the tests below
  uint64_t best = rank_key(bar, likeliest);
  for_each_token(row, a.vocab, a.wide, [&](int id, float logit) {
    const float tempered = logit / temperature;
    if (tempered + kMaxGumbel + slack < bar || rank_key(logit, id) < floor ||
        (min_p > 0.0f && expf(tempered - top) < min_p))
      return;
    if (const uint32_t own_group = static_cast<uint32_t>(id) / 4; own_group != group) {
      group = own_group;
      bits = noise_bits(seed, position, group);
    }
    // -log(-log(u)) > c only if 1 - u < exp(-c).
    const float u = uniform_of(bits, id);
    if (1.0f - u > __expf(tempered - bar + slack)) return;
    const uint64_t key = rank_key(tempered + gumbel_of(u), id);
    best = key > best ? key : best;
  });
  return best;
}

__global__ void __launch_bounds__(kRowThreads) sample_kernel(const SampleArguments a) {
  __shared__ SelectScratch scratch;
  __shared__ uint64_t best_of_warp[2][kWarp];
  const int index = blockIdx.x;
  const float* row = a.logits + index * a.stride;
  uint64_t best = 0;
  bool unfit = false;  // a NaN or +inf
  for_each_token(row, a.vocab, a.wide, [&](int id, float logit) {
    unfit |= !(logit < kInfinity);
    const uint64_t key = rank_key(logit, id);
    best = key > best ? key : best;
  });
  unfit = __syncthreads_or(unfit);
  best = block_max(best, best_of_warp[0]);
  const float maximum = float_of(static_cast<uint32_t>(best >> kIdBits));
  if (unfit || maximum == -kInfinity) {
    if (threadIdx.x == 0) a.token_ids[index] = -1;
    return;
  }
  const float temperature = a.all_greedy ? 0.0f : a.temperature[index];
  // Temperatures so low that the tempered logits overflow leave nothing but the likeliest token.
  if (temperature > 0.0f && isfinite(maximum / temperature)) {
    uint64_t floor = 0;
    float min_p = 0.0f;
    if (a.any_filter) {
      if (const int k = a.top_k[index]; k > 0 && k < a.vocab)
        floor = radix_cut(
            row, a.vocab, a.wide, floor, scratch, [](float) { return 1ull; },
            [&](uint64_t) { return static_cast<uint64_t>(k); });
      if (const float p = a.top_p[index]; p < 1.0f)
        floor = radix_cut(
            row, a.vocab, a.wide, floor, scratch,
            [&](float logit) {
              return static_cast<unsigned long long>(
                  expf(logit / temperature - maximum / temperature) * kMassUnit);
            },
            [&](uint64_t total) {
              const double wanted = ceil(static_cast<double>(p) * static_cast<double>(total));
              return wanted < 1.0 ? uint64_t{1} : static_cast<uint64_t>(wanted);
            });
      min_p = a.min_p[index];
    }
    best = noisy_best(a, row, index, id_of(best), maximum, temperature, floor, min_p);
    best = block_max(best, best_of_warp[1]);
  }
  if (threadIdx.x == 0) a.token_ids[index] = id_of(best);
}

}  // namespace

void CudaBackend::mask_logits(Tensor logits, Tensor pairs) {
  check(logits.rank == 2 && pairs.rank == 2 && pairs.shape[1] == 2, "mask_logits: pairs {} of {}",
        pairs.describe(), logits.describe());
  constexpr int64_t kThreads = 128;
  launch(mask_logits_kernel, grid_size(ceil_div(pairs.shape[0], kThreads)), kThreads, 0,
         logits.ptr<float>(), logits.stride[0], logits.shape[0], logits.shape[1],
         pairs.ptr<int32_t>(), pairs.stride[0], pairs.shape[0]);
}

void CudaBackend::sample(Tensor token_ids, Tensor logits, const SamplingBatch& params) {
  const int64_t rows = logits.shape[0], vocab = logits.shape[1];
  check(logits.rank == 2 && token_ids.numel() == rows &&
            static_cast<uint64_t>(vocab) <= kMaxVocab && vocab > 0,
        "sample: {} tokens from logits {}", token_ids.numel(), logits.describe());
  SampleArguments a{};
  a.token_ids = token_ids.ptr<int32_t>();
  a.logits = logits.ptr<float>();
  a.stride = logits.stride[0];
  a.vocab = static_cast<int>(vocab);
  a.all_greedy = params.all_greedy;
  a.any_filter = params.any_filter;
  a.wide = wide_rows({logits});
  if (!a.all_greedy) {
    a.temperature = params.temperature.ptr<float>();
    a.seed = params.seed.ptr<int64_t>();
    a.position = params.position.ptr<int32_t>();
    if (a.any_filter) {
      a.top_k = params.top_k.ptr<int32_t>();
      a.top_p = params.top_p.ptr<float>();
      a.min_p = params.min_p.ptr<float>();
    }
  }
  launch(sample_kernel, grid_size(rows), kRowThreads, 0, a);
}

}  // namespace nanovllm
