// Sampling.
//
// Temperature by the Gumbel-max trick: the argmax of logit / T + noise is a draw from
// softmax(logit / T).
//
// Two launches. scan: one pass over the logits (row_scan.cuh), bound by the memory (256 rows of
// 151,936: 155 MB), that finds each row's likeliest token and, where nothing filters it, the winner
// with noise; of rows that are filtered it keeps the chunks' maxima, for top_p alone also the
// tiles' sums of exponentials. choose: one block per row, that puts the warps' results together
// and, in a filtered row, gathers the few tokens that can survive the filters, sorts them and draws
// among them. A row where they are not few is cut and drawn from by passes over all of it.
//
// Where ranks hold a part of the vocabulary each, each scans its own, and they exchange what the
// scans found instead of the logits.
#include "ops/cuda/comm/peer_exchange.cuh"
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/sampling/draw_filtered.cuh"
#include "ops/cuda/sampling/noisy_best.cuh"

namespace nanovllm {
namespace {

struct SampleArguments {
  int* token_ids;
  const float* logits;
  int64_t stride;
  int vocab, first_id;  // tokens here, and the id of the first; a multiple of 4
  RowRules rules;
  const int* top_k;
  const float *top_p, *min_p;
  bool any_filter, wide;
  RowScan scan;
  KnownRow* known;  // of fused_gemm_sample(), to be cleared; else null

  __device__ LogitRow row(int index) const { return {logits + index * stride, vocab, wide}; }
};

__device__ RowRule rule_of(const SampleArguments& a, int index) {
  RowRule rule = a.rules.of(index);
  if (!a.any_filter) return rule;
  if (const int k = a.top_k[index]; k > 0 && k < a.vocab) rule.top_k = k;
  rule.top_p = a.top_p[index];
  rule.min_p = a.min_p[index];
  return rule;
}

/// A warp takes 32 words of a mask at a time, a word in each lane, and writes 32 logits for each.
__global__ void apply_token_masks_kernel(float* logits, int64_t stride, int vocab,
                                         const int* mask_rows, const int* masks, int words) {
  wait_for_previous();
  let_next_start();
  const int mask_row = mask_rows[blockIdx.y];
  if (mask_row < 0) return;
  const int* mask = masks + int64_t{mask_row} * words;
  float* row = logits + blockIdx.y * stride;
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / kWarp * kWarp;
  const int own = first + lane < words ? mask[first + lane] : -1;
  for (int i = 0; i < kWarp; ++i) {
    const int word = __shfl_sync(kFullMask, own, i);
    const int id = (first + i) * kWarp + lane;
    if ((word >> lane & 1) == 0 && id < vocab) row[id] = -kInfinity;
  }
}

/// Writes per warp: the key of its largest logit (NaN if there is one), and the key of its largest
/// score with noise, or 0.
template <bool kFilters>
__global__ void __launch_bounds__(kScanWarps* kWarp, kScanBlocksPerSm)
    scan_kernel(const SampleArguments a) {
  // In this order: no kernel of the next step begins before all of this step but the sampling is
  // done.
  wait_for_previous();
  let_next_start();
  const int unit = static_cast<int>(blockIdx.x) * kScanWarps + threadIdx.x / kWarp;
  const int index = unit / a.scan.warps, warp = unit % a.scan.warps;
  if (index >= a.scan.rows) return;
  const RowRule rule = rule_of(a, index);
  const LogitRow row = a.row(index);
  const bool filtered = kFilters && rule.filtered(), noisy = rule.temperature > 0.0f && !filtered,
             weigh = filtered && rule.top_p_alone();
  NoisyBest winner(rule, a.first_id);
  uint32_t most = 0;
  int likeliest = 0;
  for (int at = warp; at < a.scan.tiles; at += a.scan.warps) {
    const Tile tile(row, at);
    const float lane_maximum = tile.maximum();
    const uint32_t order = __reduce_max_sync(kFullMask, order_of(lane_maximum));
    const float maximum = float_of(order);
    if (order > most) most = order, likeliest = tile.first_id(maximum, at);
    if (noisy) winner.visit(tile, at, maximum);
    if (filtered) keep_chunks(a.scan, index, at, lane_maximum);
    if (weigh) {
      const float scale = kLog2E / rule.temperature;
      const float weight = tile.sum([&](float logit) { return exp2f((logit - maximum) * scale); });
      if (threadIdx.x % kWarp == 0) a.scan.weight_of(index)[at] = weight;
    }
  }
  const uint64_t best = noisy ? winner.best() : 0;
  if (threadIdx.x % kWarp != 0) return;
  a.scan.keys_of(index)[warp][0] = rank_key(most, a.first_id + likeliest);
  a.scan.keys_of(index)[warp][1] = best;
}

// -- The choice

enum class Draw { greedy, noisy, filtered, failed };

/// The kind of a row once its likeliest token is known.
__device__ Draw draw_of(const RowRule& rule, uint64_t likeliest) {
  const float maximum = logit_of(likeliest);
  if (!isfinite(maximum)) return Draw::failed;
  // Temperatures so low that the tempered logits overflow leave nothing but the likeliest token.
  if (!(rule.temperature > 0.0f) || !isfinite(maximum / rule.temperature)) return Draw::greedy;
  return rule.filtered() ? Draw::filtered : Draw::noisy;
}

/// The finds of the warps in a row, in every lane: the best keys without noise and with it.
struct BestKeys {
  uint64_t likeliest = 0, noisy = 0;

  __device__ void take(uint64_t other_likeliest, uint64_t other_noisy) {
    likeliest = max(likeliest, other_likeliest);
    noisy = max(noisy, other_noisy);
  }
  __device__ BestKeys(const RowScan& scan, int index) {
    for (int i = threadIdx.x % kWarp; i < scan.warps; i += kWarp)
      take(scan.keys_of(index)[i][0], scan.keys_of(index)[i][1]);
    likeliest = warp_max_key(likeliest);
    noisy = warp_max_key(noisy);
  }
  __device__ int token(const RowRule& rule) const {
    const Draw draw = draw_of(rule, likeliest);
    return draw == Draw::failed ? -1 : id_of(draw == Draw::noisy ? noisy : likeliest);
  }
};

/// One warp has one row.
__global__ void __launch_bounds__(kScanWarps* kWarp) choose_kernel(const SampleArguments a) {
  wait_for_previous();
  let_next_start();
  const int index = static_cast<int>(blockIdx.x) * kScanWarps + threadIdx.x / kWarp;
  if (index >= a.scan.rows) return;
  const BestKeys best(a.scan, index);
  if (threadIdx.x % kWarp != 0) return;
  a.token_ids[index] = best.token(rule_of(a, index));
  if (a.known) a.known[index] = {};
}

/// The same where every rank has scanned a part of the row: both keys are exchanged, in words. All
/// blocks run at once (PeerTable::most_blocks).
__global__ void __launch_bounds__(kScanWarps* kWarp)
    choose_among_ranks_kernel(const SampleArguments a, const __grid_constant__ PeerTable table) {
  wait_for_previous();
  let_next_start();
  Exchange exchange(table);
  exchange.begin_round();
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            index = static_cast<int>(blockIdx.x) * kScanWarps + warp;
  if (index < a.scan.rows) {
    BestKeys best(a.scan, index);
    if (threadIdx.x % kWarp == 0) {
      const auto send = [&](uint4* to, uint64_t key) {
        exchange.send(to, {static_cast<unsigned>(key), static_cast<unsigned>(key >> 32), 0, 0});
      };
      const auto receive = [&](const uint4* from) {
        const uint4 key = exchange.receive(from);
        return static_cast<uint64_t>(key.y) << 32 | key.x;
      };
      const BestKeys own = best;
      for (int r = 0; r < table.world; ++r) {
        if (r == table.rank) continue;
        send(exchange.words(r, table.rank) + 2 * warp, own.likeliest);
        send(exchange.words(r, table.rank) + 2 * warp + 1, own.noisy);
      }
      for (int r = 0; r < table.world; ++r) {
        if (r == table.rank) continue;
        const uint4* words = exchange.words(table.rank, r) + 2 * warp;
        const uint64_t likeliest = receive(words);
        best.take(likeliest, receive(words + 1));
      }
      a.token_ids[index] = best.token(rule_of(a, index));
    }
  }
  exchange.end();
}

/// One block has one row.
__global__ void __launch_bounds__(kRowThreads, 2) choose_filtered_kernel(const SampleArguments a) {
  __shared__ ChooseScratch s;
  let_next_start();
  wait_for_previous();
  const int index = blockIdx.x;
  const RowRule rule = rule_of(a, index);
  const RowSummary summary = summarise(a.scan, index, s.select, s.gather);
  const uint64_t(&best)[2] = summary.keys;
  const Draw draw = draw_of(rule, best[0]);
  int token = draw == Draw::failed ? -1 : id_of(best[draw == Draw::noisy]);
  if (draw == Draw::filtered) {
    const ScannedRow scanned{a.row(index), a.scan.chunk_max_of(index),
                             a.scan.tiles * kChunksPerTile, logit_of(best[0]), summary.lowest};
    const uint64_t total = rule.top_p_alone() ? total_mass(scanned, a.scan.weight_of(index),
                                                           rule.temperature, s.warp_sums)
                                              : 0;
    token = id_of(draw_filtered({scanned, rule, id_of(best[0]), total}, s));
  }
  if (threadIdx.x == 0) a.token_ids[index] = token;
}

/// Of the rows from `begin` on.
RowRules rules_of(const SamplingBatch& params, int64_t begin) {
  if (!params.has(kSampleRandom)) return {.all_greedy = true};
  return {.temperature = params.temperature.ptr<float>() + begin,
          .seed = params.seed.ptr<int64_t>() + begin,
          .position = params.position.ptr<int32_t>() + begin};
}

}  // namespace

#ifdef NANOVLLM_CUDA_HOPPER
bool CudaBackend::fused_gemm_sample(Tensor token_ids, Tensor x, Weight weight,
                                    const SamplingBatch& params) {
  const Tensor& w = weight.data;
  const int64_t rows = x.shape[0], vocab = w.shape[0];
  check(x.rank == 2 && w.rank == 2 && x.shape[1] == w.shape[1] && x.dtype == w.dtype &&
            token_ids.numel() == rows && static_cast<uint64_t>(vocab) <= kMaxVocab,
        "fused_gemm_sample: {} tokens from {} times {} transposed", token_ids.numel(), x.describe(),
        w.describe());
  if (params.has(kSampleFiltered)) return false;
  SampleArguments a{};
  a.rules = rules_of(params, 0);
  if (params.has(kSampleConstrained)) {
    a.rules.mask_rows = params.token_mask.ptr<int32_t>();
    a.rules.masks = params.token_masks.ptr<int32_t>();
    a.rules.mask_words = static_cast<int>(params.token_masks.shape[1]);
  }
  a.token_ids = token_ids.ptr<int32_t>();
  a.known = reinterpret_cast<KnownRow*>(scan_scratch_.get() + kScanBytes - kKnownBytes);
  if (!gemm_scan(x, weight, a.rules, a.scan)) return false;
  launch_early(choose_kernel, grid_size(ceil_div(rows, int64_t{kScanWarps})), kScanWarps * kWarp, 0,
               a);
  return true;
}
#endif

void CudaBackend::apply_token_masks(Tensor logits, Tensor mask_rows, Tensor masks) {
  const int64_t vocab = logits.shape[1], words = ceil_div(vocab, int64_t{kWarp});
  check(logits.rank == 2 && mask_rows.numel() == logits.shape[0] && masks.rank == 2 &&
            masks.shape[1] == words && masks.contiguous(),
        "apply_token_masks: masks {} of rows {} for {}", masks.describe(), mask_rows.describe(),
        logits.describe());
  constexpr int64_t kThreads = 128;
  launch_early(apply_token_masks_kernel,
               {grid_size(ceil_div(words, kThreads)), grid_size(logits.shape[0])}, kThreads, 0,
               logits.ptr<float>(), logits.stride[0], static_cast<int>(vocab),
               mask_rows.ptr<int32_t>(), masks.ptr<int32_t>(), static_cast<int>(words));
}

void CudaBackend::sample(Tensor token_ids, Tensor logits, const SamplingBatch& params) {
  sample_rows(token_ids, logits, params, 0, nullptr);
}

int CudaBackend::resident_sampling_blocks() const {
  return resident_blocks(reinterpret_cast<const void*>(choose_among_ranks_kernel),
                         kScanWarps * kWarp);
}

bool CudaBackend::sample_part(Tensor token_ids, Tensor logits, int64_t vocab_size,
                              const SamplingBatch& params) {
  // All ranks come to the same answer: by what they have in common.
  const int64_t most_rows = int64_t{peers_->most_blocks} * kScanWarps;
  const int64_t rows = logits.shape[0], n = logits.shape[1], first_id = peers_->rank * n;
  if (params.has(kSampleFiltered) || n % 4 != 0 || rows > most_rows ||
      (peers_->world - 1) * n >= vocab_size ||
      plan_scan(rows, n, num_sms_, nullptr, kScanBytes).rows < rows)
    return false;
  sample_rows(token_ids, logits.cols(0, std::min(n, vocab_size - first_id)), params, first_id,
              peers_);
  return true;
}

void CudaBackend::sample_rows(Tensor token_ids, Tensor logits, const SamplingBatch& params,
                              int64_t first_id, const PeerTable* peers) {
  const int64_t rows = logits.shape[0], vocab = logits.shape[1];
  check(logits.rank == 2 && token_ids.numel() == rows &&
            static_cast<uint64_t>(first_id + vocab) <= kMaxVocab && vocab > 0,
        "sample: {} tokens from logits {}", token_ids.numel(), logits.describe());
  SampleArguments a{};
  a.stride = logits.stride[0];
  a.vocab = static_cast<int>(vocab);
  a.first_id = static_cast<int>(first_id);
  a.any_filter = params.has(kSampleFiltered);
  a.wide = wide_rows({logits});
  for (int64_t begin = 0; begin < rows; begin += a.scan.rows) {
    a.scan = plan_scan(rows - begin, vocab, num_sms_, scan_scratch_.get(), kScanBytes);
    a.token_ids = token_ids.ptr<int32_t>() + begin;
    a.logits = logits.ptr<float>() + begin * a.stride;
    a.rules = rules_of(params, begin);
    if (a.any_filter) {
      a.top_k = params.top_k.ptr<int32_t>() + begin;
      a.top_p = params.top_p.ptr<float>() + begin;
      a.min_p = params.min_p.ptr<float>() + begin;
    }
    const int64_t count = a.scan.rows;
    launch_early(a.any_filter ? scan_kernel<true> : scan_kernel<false>,
                 grid_size(ceil_div(count * a.scan.warps, int64_t{kScanWarps})), kScanWarps * kWarp,
                 0, a);
    if (a.any_filter)
      launch_early(choose_filtered_kernel, grid_size(count), kRowThreads, 0, a);
    else if (const unsigned blocks = grid_size(ceil_div(count, int64_t{kScanWarps})); peers)
      launch_early(choose_among_ranks_kernel, blocks, kScanWarps * kWarp, 0, a, *peers);
    else
      launch_early(choose_kernel, blocks, kScanWarps * kWarp, 0, a);
  }
}

}  // namespace nanovllm
