// Log probabilities of the chosen token and of the likeliest ones.
//
// Two launches, as in sampling.cu. scan: one pass over the logits: the chunks' maxima, every tile's
// sum of exponentials relative to its own maximum, and how many tokens rank above the chosen one.
// finish: one block per row adds the tiles (in f64: a fixed part of the row per thread, then a
// fixed tree), gathers the tokens that may be among the likeliest and sorts them.
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/sampling/candidates.cuh"

namespace nanovllm {
namespace {

constexpr int kMaxTop = kMaxCandidates;
constexpr float kInfinity = __builtin_huge_valf();

struct LogprobArguments {
  int* ids;
  float* logprobs;
  int* ranks;
  const float* logits;
  const int* chosen;
  int64_t ids_stride, logprobs_stride, logits_stride;
  int vocab, top;
  bool wide;
  RowScan scan;  // keys: of the largest logit (NaN if there is one); how many rank above the chosen

  __device__ LogitRow row(int index) const { return {logits + index * logits_stride, vocab, wide}; }
  __device__ int chosen_of(int index) const {
    return 0 <= chosen[index] && chosen[index] < vocab ? chosen[index] : 0;
  }
};

__global__ void __launch_bounds__(kScanWarps* kWarp, kScanBlocksPerSm)
    scan_logprobs_kernel(const LogprobArguments a) {
  wait_for_previous();
  let_next_start();
  const int unit = static_cast<int>(blockIdx.x) * kScanWarps + threadIdx.x / kWarp;
  const int index = unit / a.scan.warps, warp = unit % a.scan.warps;
  if (index >= a.scan.rows) return;
  const LogitRow row = a.row(index);
  const int chosen = a.chosen_of(index);
  const float bar = row.data[chosen];
  uint32_t most = 0;
  int above = 0;
  for (int at = warp; at < a.scan.tiles; at += a.scan.warps) {
    const Tile tile(row, at);
    const float lane_maximum = tile.maximum();
    const uint32_t order = __reduce_max_sync(kFullMask, order_of(lane_maximum));
    const float maximum = float_of(order);
    most = order > most ? order : most;
    keep_chunks(a.scan, index, at, lane_maximum);
#pragma unroll
    for (int i = 0; i < kTileVectors; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        above += tile.v[i].v[j] > bar || (tile.v[i].v[j] == bar && Tile::id(at, i) + j < chosen);
    const float sum = tile.sum([&](float logit) { return expf(logit - maximum); });
    if (threadIdx.x % kWarp == 0) a.scan.weight_of(index)[at] = maximum == -kInfinity ? 0.0f : sum;
  }
  above = warp_sum(above);
  if (threadIdx.x % kWarp != 0) return;
  a.scan.keys_of(index)[warp][0] = rank_key(most, 0);
  a.scan.keys_of(index)[warp][1] = static_cast<uint64_t>(above);
}

/// The sum of exp(logit - maximum). NaN where the row has a NaN or an infinity.
__device__ double sum_of_exponentials(const LogprobArguments& a, int index, float maximum,
                                      double* warp_sums) {
  const float* chunk_max = a.scan.chunk_max_of(index);
  double sum = 0.0;
  for (int tile = threadIdx.x; tile < a.scan.tiles; tile += kRowThreads) {
    float most = chunk_max[tile * kChunksPerTile];
    for (int i = 1; i < kChunksPerTile; ++i)
      most = max_or_nan(most, chunk_max[tile * kChunksPerTile + i]);
    sum += static_cast<double>(a.scan.weight_of(index)[tile]) *
           exp(static_cast<double>(most) - static_cast<double>(maximum));
  }
  return block_sum(sum, warp_sums);
}

struct FinishScratch {
  SelectScratch select;
  GatherScratch gather;
  double warp_sums[kWarp];
  int warp_counts[kWarp];
};

/// Leaves at least the `top` best keys of the row in the candidates, the best first.
__device__ void sort_top(const LogprobArguments& a, const ScannedRow& row, FinishScratch& s) {
  int found = kMaxCandidates + 1;
  if (isfinite(row.maximum) && list_top_chunks(row, a.top, s.select, s.gather))
    found = gather_candidates(row, s.gather.pivot, s.select, s.gather);
  if (found > kMaxCandidates) {  // few chunks, many equal logits, or not finite
    const uint64_t cut = radix_cut(row.logits, 0, static_cast<uint64_t>(a.top), s.select,
                                   [](float) { return uint64_t{1}; });
    if (threadIdx.x == 0) s.select.found = 0;
    __syncthreads();
    for_each_token(row.logits, [&](int id, float logit) {
      if (const uint64_t key = rank_key(logit, id); key >= cut)
        s.select.candidates.key[atomicAdd(&s.select.found, 1)] = key;
    });
    __syncthreads();
    found = a.top;
  }
  sort_candidates(s.select.candidates, found);
}

__global__ void __launch_bounds__(kRowThreads) finish_logprobs_kernel(const LogprobArguments a) {
  __shared__ FinishScratch s;
  wait_for_previous();
  let_next_start();
  const int index = blockIdx.x, chosen = a.chosen_of(index);
  const LogitRow row = a.row(index);
  int* ids = a.ids + index * a.ids_stride;
  float* logprobs = a.logprobs + index * a.logprobs_stride;
  const RowSummary summary = summarise(a.scan, index, s.select, s.gather);
  const float maximum = logit_of(summary.keys[0]);
  int above = 0;
  for (int i = threadIdx.x; i < a.scan.warps; i += kRowThreads)
    above += static_cast<int>(a.scan.keys_of(index)[i][1]);
  above = block_sum(above, s.warp_counts);
  const double log_sum = log(sum_of_exponentials(a, index, maximum, s.warp_sums));
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit - maximum) - log_sum);
  };
  if (threadIdx.x == 0) {
    ids[0] = chosen;
    logprobs[0] = logprob(row.data[chosen]);
    a.ranks[index] = above + 1;
  }
  if (a.top == 0) return;
  sort_top(
      a, {row, a.scan.chunk_max_of(index), a.scan.tiles * kChunksPerTile, maximum, summary.lowest},
      s);
  for (int i = threadIdx.x; i < a.top; i += kRowThreads) {
    const uint64_t key = s.select.candidates.sorted[i];
    ids[1 + i] = id_of(key);
    logprobs[1 + i] = logprob(logit_of(key));
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
  for (int64_t begin = 0; begin < rows;) {
    const LogprobArguments a{
        .ids = ids.ptr<int32_t>() + begin * ids.stride[0],
        .logprobs = logprobs.ptr<float>() + begin * logprobs.stride[0],
        .ranks = ranks.ptr<int32_t>() + begin,
        .logits = logits.ptr<float>() + begin * logits.stride[0],
        .chosen = chosen.ptr<int32_t>() + begin,
        .ids_stride = ids.stride[0],
        .logprobs_stride = logprobs.stride[0],
        .logits_stride = logits.stride[0],
        .vocab = static_cast<int>(vocab),
        .top = static_cast<int>(top),
        .wide = wide_rows({logits}),
        .scan = plan_scan(rows - begin, vocab, num_sms_, scan_scratch_.get(), kScanBytes)};
    launch_early(scan_logprobs_kernel,
                 grid_size(ceil_div(int64_t{a.scan.rows} * a.scan.warps, int64_t{kScanWarps})),
                 kScanWarps * kWarp, 0, a);
    launch_early(finish_logprobs_kernel, grid_size(a.scan.rows), kRowThreads, 0, a);
    begin += a.scan.rows;
  }
}

}  // namespace nanovllm
