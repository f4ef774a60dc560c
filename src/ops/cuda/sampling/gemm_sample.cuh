// Sampling without logits, on sm_90: the head's product x[m, k] w[vocab, k]^T, and of each of its
// rows what scan_kernel (sampling.cu) would find, in one kernel. The logits of 256 rows of 151,936
// tokens would be 155 MB to write and to read again.
//
// Floor: the weight's bytes from memory, and from 128 rows on the tensor cores. One block stays on
// each SM and goes through tiles of 128 tokens by up to 128 rows. One warp issues bulk copies into
// a ring of stages, on across tiles; one or two groups of four warps multiply, 64 rows of x (A)
// with the weight's rows (B): one chain of k16 steps from zero, the bits of gemm_in_order. They
// leave their sums in shared memory, where more warps look through them while the next tile is
// multiplied: noise takes the other units of an SM as long as a product takes its tensor cores.
//
// The state of a row lies in shared memory: the best keys so far, and bounds that rule out
// nearly all that follows. Blocks tell each other their bounds.
#pragma once

#include "ops/cuda/gemm/gemm_skinny.cuh"
#include "ops/cuda/ptx/gemm_cluster.cuh"
#include "ops/cuda/sampling/noisy_best.cuh"
#include "ops/cuda/sampling/row_noise.cuh"

namespace nanovllm {

struct HeadShape {
  int rows, vocab;
  int tile_rows;   // of x, to a group: a multiple of 8, at most 64
  int row_blocks;  // that cover all rows
  int tiles;       // that cover the vocabulary
  int slices;      // of the vocabulary: blocks for each row block
  int steps;       // stages that cover k
  int stages;      // of the ring
};

constexpr int kHeadColumns = 128;  // tokens of a tile: four to a lane
constexpr int kHeadGroup = 128;    // threads of four warps
constexpr int kHeadWeightBytes = kHeadColumns * kSliceRowBytes;
constexpr int kHeadPitch = kHeadColumns + 8;  // of a row of logits: no two lanes store to one bank
/// The warps that scan. Beside two groups of multipliers, all that have room with their 90
/// registers: noise takes longer than products. One group waits for memory.
constexpr int head_scan_warps(int groups) { return groups == 1 ? 8 : 11; }

/// A block's knowledge of a row of logits. One warp has the row.
struct SampledRow {
  float most = -kInfinity,
        offset;              // the largest logit, and Bar::offset of a score that a token has
  float temperature, scale;  // Bar::scale
  uint64_t likeliest = 0, noisy = 0;  // keys
  const int* mask;                    // RowRules::mask_of()
  RowNoise noise;

  __device__ SampledRow(const RowRule& rule, const int* mask)
      : temperature(rule.temperature), mask(mask), noise(rule.seed, rule.position) {
    // Nothing is ruled out before the first score; in a greedy row all noise is.
    const bool noisy_row = rule.temperature > 0.0f;
    scale = noisy_row ? Bar(rule.temperature).scale : 0.0f;
    offset = noisy_row ? __int_as_float(0x7fffffff) : -kInfinity;
  }
  /// Takes what other blocks have found.
  __device__ void learn(const KnownRow& known) {
    if (known.most != 0 && !(most >= float_of(known.most))) most = float_of(known.most);
    if (known.score != 0) raise(float_of(known.score));
  }
  __device__ void raise(float score) {
    const float other = Bar::offset_of(score);
    if (isfinite(other) && !(offset <= other)) offset = other;
  }
};

/// Shared memory: barriers, rows, logits, then the ring on a boundary of 1024; A reads 64 rows,
/// whatever there are.
struct HeadLayout {
  int groups, tile_rows;
  constexpr int rows() const { return groups * tile_rows; }
  constexpr int threads() const {
    return groups * kHeadGroup + (head_scan_warps(groups) + 1) * kWarp;
  }
  constexpr int logits_at() const {
    return kSkinnyBarrierBytes + rows() * static_cast<int>(sizeof(SampledRow));
  }
  constexpr int ring_at() const {
    return logits_at() + rows() * kHeadPitch * static_cast<int>(sizeof(float));
  }
  constexpr int stage_bytes() const { return kHeadWeightBytes + rows() * kSliceRowBytes; }
  constexpr int fixed_bytes() const { return ring_at() + 1024 + (64 - tile_rows) * kSliceRowBytes; }
};

/// A block's part: tiles of one slice, for the rows of one row block.
struct HeadPlace {
  int slice, row;
};

/// One thread's part: all copies. What fits the ring of the weight is asked for before the kernel
/// before has ended.
__device__ inline void copy_head(const CUtensorMap& w, const CUtensorMap& x, const HeadShape& shape,
                                 const ProductRing& ring, const HeadPlace& place) {
  const auto weight = [&](int tile, int step, int stage) {
    arrive_expecting(ring.full + stage, ring.stage_bytes);
    copy_box_once(ring.weight(stage), &w, ring.full + stage, 0, tile * kHeadColumns, 0, step);
  };
  const auto rows = [&](int step, int stage) {
    copy_box(ring.rows(stage), &x, ring.full + stage, 0, place.row, 0, step);
  };
  const int first = min(shape.steps, shape.stages);
  for (int i = 0; i < first; ++i) weight(place.slice, i, i);
  wait_for_previous();
  let_next_start();
  for (int i = 0; i < first; ++i) rows(i, i);
  RingCursor at = first == shape.stages ? RingCursor{0, 0} : RingCursor{first, 1};
  for (int tile = place.slice, step = first; tile < shape.tiles; tile += shape.slices, step = 0)
    for (; step < shape.steps; ++step, at.next(shape.stages)) {
      wait_barrier(ring.empty + at.stage, at.parity);
      weight(tile, step, at.stage);
      rows(step, at.stage);
    }
}

// Names of barriers between those who multiply and those who scan.
constexpr int kLogitsFull = 2, kLogitsEmpty = 3;

/// A group's part: the products of all tiles.
template <int kGroups>
__device__ void multiply_tiles(float* logits, const HeadShape& shape, const ProductRing& ring,
                               const HeadPlace& place, int group) {
  constexpr int kThreads = kGroups * kHeadGroup + head_scan_warps(kGroups) * kWarp;
  const int lane = threadIdx.x % kWarp, first = group * shape.tile_rows,
            warp_row = threadIdx.x / kWarp % 4 * 16;
  float* const mine = logits + (first + warp_row + lane / 4) * kHeadPitch + lane % 4 * 2;
  RingCursor at;
#pragma unroll 1
  for (int tile = place.slice; tile < shape.tiles; tile += shape.slices) {
    float sum[kHeadColumns / 2];
#pragma unroll
    for (float& s : sum) s = 0.0f;
    for (int step = 0; step < shape.steps; ++step, at.next(shape.stages)) {
      wait_barrier(ring.full + at.stage, at.parity);
      const uint64_t w = tile_of(ring.weight(at.stage)),
                     x = tile_of(ring.rows(at.stage) + first * kSliceRowBytes);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSliceWidth / 16; ++i) product<kHeadColumns>(sum, x + 2 * i, w + 2 * i);
      wgmma_commit();
      // Stages are few: one that is done waits for none. The tensor cores have the other group's
      // products meanwhile, or nothing to wait for but memory.
      wgmma_wait<0>();
      if (lane == 0) arrive(ring.empty + at.stage);
    }
    pin(sum);
    sync_threads<kLogitsEmpty, kThreads>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (warp_row + 8 * half + lane / 4 >= shape.tile_rows) continue;
#pragma unroll
      for (int j = 0; j < kHeadColumns / 8; ++j)
        *reinterpret_cast<float2*>(mine + 8 * half * kHeadPitch + 8 * j) = {
            sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]};
    }
    __syncwarp();
    arrive_at<kLogitsFull, kThreads>();
  }
}

// -- The scan: a warp has a row of a tile, a lane four neighbouring tokens --

/// A lane's tokens of a row, and their random bits.
struct HeadTokens {
  Vec<float> logits;
  float most;
  Philox4 bits;

  /// Tokens that may not come, and those beyond the vocabulary, have no chance.
  __device__ void load(const SampledRow& row, const float* from, int id, int vocab) {
    unsigned allowed = id < vocab ? 0xfu : 0u;
    if (row.mask && allowed != 0)
      allowed = static_cast<unsigned>(__ldg(row.mask + id / kWarp)) >> id % kWarp & 0xfu;
    const float4 v = *reinterpret_cast<const float4*>(from);
    logits = {{v.x, v.y, v.z, v.w}};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if ((allowed >> j & 1u) == 0) logits.v[j] = -kInfinity;
    most = max_of(logits);
  }
  __device__ bool has_chance() const { return most != -kInfinity; }
  __device__ float room(const SampledRow& row) const {
    return has_chance() ? Bar(row.scale, row.offset).room(most) : -kInfinity;
  }
  __device__ void draw(const SampledRow& row, int id) {
    bits = row.noise.bits(static_cast<uint32_t>(id) / 4);
  }
};

/// One of the tokens may be the likeliest.
__device__ inline void take_likeliest(SampledRow& row, KnownRow* known, const HeadTokens& tokens,
                                      int id) {
  uint64_t key = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) key = max(key, rank_key(tokens.logits.v[j], id + j));
  key = warp_max_key(key);
  __syncwarp();
  if (threadIdx.x % kWarp == 0 && key > row.likeliest) {
    row.likeliest = key;
    row.most = logit_of(key);
    atomicMax(&known->most, order_of_key(key));
  }
  __syncwarp();
}

/// One may win with its noise: raises the bar, and computes the scores that pass it.
__device__ inline void take_noisy(SampledRow& row, KnownRow* known, const HeadTokens& tokens,
                                  int id) {
  Bar bar(row.scale, row.offset);
  const Vec<float>& logits = tokens.logits;
  float lower = -kInfinity;
#pragma unroll
  for (int j = 0; j < 4; ++j) lower = fmaxf(lower, bar.lower(logits.v[j], tokens.bits.x[j]));
  lower = float_of(__reduce_max_sync(kFullMask, order_of(lower))) * (1.0f / kLog2E);
  lower -= 0.01f + 1e-6f * fabsf(lower);
  __syncwarp();
  if (threadIdx.x % kWarp == 0) {
    row.raise(lower);
    if (isfinite(lower)) atomicMax(&known->score, order_of(lower));
  }
  __syncwarp();
  bar.offset = row.offset;
  uint64_t best = 0;
#pragma unroll 1
  for (int j = 0; j < 4; ++j) {
    const float logit = value_of(logits, j);
    const uint32_t bits = bits_of(tokens.bits, j);
    if (Bar::passes(bar.room(logit), bits))
      best = max(best, noisy_key(logit, id + j, bits, row.temperature));
  }
  best = warp_max_key(best);
  if (threadIdx.x % kWarp == 0) row.noisy = max(row.noisy, best);
  __syncwarp();
}

/// `drawn`: the tokens have their bits, since some noise might make up for what they lack.
__device__ inline void look_through(SampledRow& row, KnownRow* known, const HeadTokens& tokens,
                                    int id, bool drawn) {
  if (__any_sync(kFullMask, tokens.has_chance() && !(tokens.most < row.most)))
    take_likeliest(row, known, tokens, id);
  if (!drawn) return;
  const float room = tokens.room(row);
  const bool may_win = !Bar::hopeless(room) && Bar::passes(room, largest(tokens.bits));
  if (__any_sync(kFullMask, may_win)) take_noisy(row, known, tokens, id);
}

__device__ inline KnownRow load_known(const KnownRow* p) {
  const uint2 known = __ldcg(reinterpret_cast<const uint2*>(p));
  return {known.x, known.y};
}

/// A warp's part, `warp` of head_scan_warps(): of all tiles the rows warp, warp + so many, ... of
/// `count`.
template <int kGroups>
__device__ void scan_tiles(SampledRow* rows, KnownRow* known, const float* logits,
                           const HeadShape& shape, const HeadPlace& place, int warp, int count) {
  constexpr int kWarps = head_scan_warps(kGroups), kThreads = kGroups * kHeadGroup + kWarps * kWarp;
  const int lane = threadIdx.x % kWarp, own = warp + kWarps * lane;
  arrive_at<kLogitsEmpty, kThreads>();
  for (int tile = place.slice; tile < shape.tiles; tile += shape.slices) {
    sync_threads<kLogitsFull, kThreads>();
    const bool is_first = tile == place.slice;
    KnownRow news{};
    if (!is_first && own < count) news = load_known(known + own);
    const int id = tile * kHeadColumns + 4 * lane;
    // Two rows at a time: one's random bits take as long as two's.
#pragma unroll 1
    for (int r = warp; r < count; r += 2 * kWarps) {
      const int other = min(r + kWarps, count - 1);
      HeadTokens tokens, more;
      tokens.load(rows[r], logits + r * kHeadPitch + 4 * lane, id, shape.vocab);
      more.load(rows[other], logits + other * kHeadPitch + 4 * lane, id, shape.vocab);
      const bool draws = __any_sync(kFullMask, !Bar::hopeless(tokens.room(rows[r])) ||
                                                   !Bar::hopeless(more.room(rows[other])));
      if (draws) {
        tokens.draw(rows[r], id);
        more.draw(rows[other], id);
      }
      look_through(rows[r], known + r, tokens, id, draws);
      if (r + kWarps < count) look_through(rows[other], known + other, more, id, draws);
    }
    if (tile + shape.slices < shape.tiles) arrive_at<kLogitsEmpty, kThreads>();
    if (own < count) rows[own].learn(is_first ? load_known(known + own) : news);
  }
}

/// Grid: row_blocks * slices. `w`: boxes of a tile's rows, `x`: of a block's rows, by a slice of k.
template <int kGroups>
__global__ void __launch_bounds__(HeadLayout{kGroups, 64}.threads(), 1)
    gemm_sample_kernel(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x,
                       const HeadShape shape, const RowRules rules, const RowScan scan,
                       KnownRow* known) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kMultipliers = kGroups * kHeadGroup, kScanners = head_scan_warps(kGroups) * kWarp;
  const HeadLayout layout{kGroups, shape.tile_rows};
  auto* const full = reinterpret_cast<uint64_t*>(shared);
  uint64_t* const empty = full + kMostStages;
  auto* const rows = reinterpret_cast<SampledRow*>(shared + kSkinnyBarrierBytes);
  auto* const logits = reinterpret_cast<float*>(shared + layout.logits_at());
  unsigned char* const data = shared + layout.ring_at();
  const ProductRing ring{data + (1024 - shared_address(data) % 1024) % 1024, layout.stage_bytes(),
                         full, empty, kHeadWeightBytes};
  const int block = static_cast<int>(blockIdx.x);
  const HeadPlace place{block / shape.row_blocks, block % shape.row_blocks * layout.rows()};
  const int count = min(layout.rows(), shape.rows - place.row);
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (threadIdx.x == kMultipliers + kScanners) {
    prefetch_map(&w);
    prefetch_map(&x);
    for (int i = 0; i < shape.stages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&empty[i], kMultipliers / kWarp);
    }
    fence_new_barriers();
  }
  __syncthreads();
  if (warp == (kMultipliers + kScanners) / kWarp) {
    if (threadIdx.x == kMultipliers + kScanners) copy_head(w, x, shape, ring, place);
    return;
  }
  wait_for_previous();
  let_next_start();
  if (warp < kMultipliers / kWarp)
    return multiply_tiles<kGroups>(logits, shape, ring, place,
                                   kGroups == 1 ? 0 : warp / (kHeadGroup / kWarp));
  const int thread = static_cast<int>(threadIdx.x) - kMultipliers, row = place.row + thread;
  if (thread < count) rows[thread] = SampledRow(rules.of(row), rules.mask_of(row));
  sync_threads<1, kScanners>();
  scan_tiles<kGroups>(rows, known + place.row, logits, shape, place, warp - kMultipliers / kWarp,
                      count);
  sync_threads<1, kScanners>();
  if (thread >= count) return;
  scan.keys_of(row)[place.slice][0] = rows[thread].likeliest;
  scan.keys_of(row)[place.slice][1] = rows[thread].noisy;
}

}  // namespace nanovllm
