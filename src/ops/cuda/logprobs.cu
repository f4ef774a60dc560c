// Log probabilities of the chosen token and of the likeliest ones. One block has one row: a pass
// for the maximum, one for the sum of exponentials (in f64: a fixed part of the row per thread,
// then a fixed tree) and the chosen token's rank, then the cut and its tokens.
#include "ops/cuda/cuda_backend.h"
#include "ops/cuda/select.cuh"

namespace nanovllm {
namespace {

constexpr int kMaxTop = 1024;

struct LogprobArguments {
  int* ids;
  float* logprobs;
  int* ranks;
  const float* logits;
  const int* chosen;
  int64_t ids_stride, logprobs_stride, logits_stride;
  int vocab, top;
  bool wide;
};

__global__ void __launch_bounds__(kRowThreads) top_logprobs_kernel(const LogprobArguments a) {
  __shared__ SelectScratch scratch;
  __shared__ float warp_maximum[kWarp];
  __shared__ double warp_sum_of_exp[kWarp];
  __shared__ int warp_rank[kWarp];
  __shared__ uint64_t top_key[kMaxTop];
  __shared__ int found;
  const float* row = a.logits + blockIdx.x * a.logits_stride;
  int* ids = a.ids + blockIdx.x * a.ids_stride;
  float* logprobs = a.logprobs + blockIdx.x * a.logprobs_stride;
  int chosen = a.chosen[blockIdx.x];
  if (chosen < 0 || chosen >= a.vocab) chosen = 0;

  float maximum = -__builtin_huge_valf();
  for_each_token(row, a.vocab, a.wide, [&](int, float logit) { maximum = fmaxf(maximum, logit); });
  maximum = block_max(maximum, warp_maximum);
  const uint64_t chosen_key = rank_key(row[chosen], chosen);
  double sum = 0.0;
  int above = 0;
  for_each_token(row, a.vocab, a.wide, [&](int id, float logit) {
    sum +=
        static_cast<double>(expf(logit - maximum));  // NaN where the row has a NaN or an infinity
    above += rank_key(logit, id) > chosen_key;
  });
  sum = block_sum(sum, warp_sum_of_exp);
  above = block_sum(above, warp_rank);
  const double log_sum = log(sum);
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit - maximum) - log_sum);
  };
  if (threadIdx.x == 0) {
    ids[0] = chosen;
    logprobs[0] = logprob(row[chosen]);
    a.ranks[blockIdx.x] = above + 1;
    found = 0;
  }
  if (a.top == 0) return;

  const uint64_t cut = radix_cut(
      row, a.vocab, a.wide, 0, scratch, [](float) { return 1ull; },
      [&](uint64_t) { return static_cast<uint64_t>(a.top); });
  for_each_token(row, a.vocab, a.wide, [&](int id, float logit) {
    if (const uint64_t key = rank_key(logit, id); key >= cut)
      top_key[atomicAdd(&found, 1)] = key;  // in any order: sorted below
  });
  __syncthreads();
  for (int i = threadIdx.x; i < a.top; i += kRowThreads) {
    int place = 0;
    for (int j = 0; j < a.top; ++j) place += top_key[j] > top_key[i];
    ids[1 + place] = id_of(top_key[i]);
    logprobs[1 + place] = logprob(row[id_of(top_key[i])]);
  }
}

}  // namespace

void CudaBackend::top_logprobs(Tensor ids, Tensor logprobs, Tensor ranks, Tensor logits,
                               Tensor chosen) {
  const int64_t rows = logits.shape[0], vocab = logits.shape[1], top = ids.shape[1] - 1;
  check(logits.rank == 2 && ids.rank == 2 && ids.shape == logprobs.shape && ids.shape[0] == rows &&
            ranks.numel() == rows && chosen.numel() == rows && top >= 0 &&
            top <= std::min<int64_t>(vocab, kMaxTop) && static_cast<uint64_t>(vocab) <= kMaxVocab,
        "top_logprobs: {} and {} from logits {}", ids.describe(), logprobs.describe(),
        logits.describe());
  launch(top_logprobs_kernel, grid_size(rows), kRowThreads, 0,
         LogprobArguments{.ids = ids.ptr<int32_t>(),
                          .logprobs = logprobs.ptr<float>(),
                          .ranks = ranks.ptr<int32_t>(),
                          .logits = logits.ptr<float>(),
                          .chosen = chosen.ptr<int32_t>(),
                          .ids_stride = ids.stride[0],
                          .logprobs_stride = logprobs.stride[0],
                          .logits_stride = logits.stride[0],
                          .vocab = static_cast<int>(vocab),
                          .top = static_cast<int>(top),
                          .wide = wide_rows({logits})});
}

}  // namespace nanovllm
