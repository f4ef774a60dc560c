#include "ops/cuda/attention_decode_plan.cuh"

namespace nanovllm {
namespace {

// Costs count groups of 16 keys, and what a unit costs beside its keys.
constexpr int kCostKeys = 16, kUnitCost = 2, kChunkCost = kChunk / kCostKeys + kUnitCost;

/// Of one pair.
__device__ int cost_of(const RowKeys& keys) {
  if (keys.end == 0) return 0;
  return (keys.end - 1) / kCostKeys - keys.low / kCostKeys + 1 +
         kUnitCost * (keys.last_chunk() - keys.first_chunk() + 1);
}

/// The sum of x over the threads before this one; `total`: over all.
__device__ int sum_before(int x, int* shared, int& total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int sum = x;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int other = __shfl_up_sync(kFullMask, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();  // shared may still be read by the call before
  if (lane == kWarp - 1) shared[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int i = 0; i < kPlanThreads / kWarp; ++i) {
    if (i < warp) before += shared[i];
    total += shared[i];
  }
  return before + sum - x;
}

struct Planner {
  const PlanArguments& a;
  const int* cost_before;  // [num_seqs + 1]: of one KV head, over the sequences before

  __device__ RowKeys keys(int s) const { return {a.cu_seqlens_q, a.context_lens, a.window, s}; }

  /// The place behind the last chunk of a pair.
  __device__ UnitPlace next_pair(UnitPlace at) const {
    if (at.head + 1 < a.kv_heads) return {at.s, at.head + 1, keys(at.s).first_chunk()};
    int s = at.s + 1;
    while (s < a.num_seqs && cost_before[s + 1] == cost_before[s]) ++s;
    return {s, 0, s < a.num_seqs ? keys(s).first_chunk() : 0};
  }

  /// Where block `b` begins: the unit, or with `whole` the pair, that begins nearest to its part of
  /// the cost.
  __device__ UnitPlace place(int b, bool whole) const {
    const int64_t all = int64_t{cost_before[a.num_seqs]} * a.kv_heads;
    const int64_t x = all * b / a.shares;
    if (x >= all) return {a.num_seqs, 0, 0};
    int low = 0, high = a.num_seqs;  // the last sequence that begins at or before x, with units
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (int64_t{cost_before[middle]} * a.kv_heads <= x ? low : high) = middle;
    }
    const int64_t within = x - int64_t{cost_before[low]} * a.kv_heads;
    const int cost = cost_before[low + 1] - cost_before[low];
    const RowKeys row = keys(low);
    const int head = static_cast<int>(within / cost), rest = static_cast<int>(within % cost);
    const int first = row.first_chunk(), last = row.last_chunk();
    int chunk = first;
    if (b > 0 && whole) chunk = 2 * rest < cost ? first : last + 1;
    // Were the pair's first chunk whole, chunk c would begin at kChunkCost * (c - first).
    if (b > 0 && !whole) {
      const int missing = row.low / kCostKeys - first * (kChunk / kCostKeys);
      chunk = min(first + (rest + missing + kChunkCost / 2) / kChunkCost, last + 1);
    }
    const UnitPlace at{low, head, chunk};
    return chunk > last ? next_pair(at) : at;
  }
};

/// The partial results that a block leaves.
struct Leaves {
  int entered = 0;  // one per chunk of the pair that it enters
  bool left = false;
};

__device__ Leaves leaves_of(const Planner& planner, const UnitPlace& begin, const UnitPlace& end) {
  Leaves leaves;
  if (begin == end) return leaves;
  const RowKeys row = planner.keys(begin.s);
  const bool ends_inside =
      end.s < planner.a.num_seqs && end.chunk > planner.keys(end.s).first_chunk();
  const bool enters = begin.chunk > row.first_chunk();
  if (enters)
    leaves.entered = (same_pair(begin, end) ? end.chunk : row.last_chunk() + 1) - begin.chunk;
  leaves.left = ends_inside && !(enters && same_pair(begin, end));
  return leaves;
}

}  // namespace

__global__ void __launch_bounds__(kPlanThreads) attention_plan_kernel(const PlanArguments a) {
  extern __shared__ int cost_before[];
  __shared__ int sums[kPlanThreads / kWarp];
  __shared__ UnitPlace places[kPlanThreads + 1];
  __shared__ int first_slot[kPlanThreads];
  __shared__ bool leaves_one[kPlanThreads];
  const Planner planner{a, cost_before};
  const int b = threadIdx.x, each = (a.num_seqs + kPlanThreads - 1) / kPlanThreads;
  const int from = min(b * each, a.num_seqs), to = min(from + each, a.num_seqs);
  int mine = 0, total = 0;
  for (int s = from; s < to; ++s) mine += cost_of(planner.keys(s));
  int before = sum_before(mine, sums, total);
  for (int s = from; s < to; ++s) {
    cost_before[s] = before;
    before += cost_of(planner.keys(s));
  }
  if (b == 0) cost_before[a.num_seqs] = total;
  __syncthreads();

  // Pairs are divided unless that takes more slots than there are.
  Leaves leaves;
  for (const bool whole : {false, true}) {
    if (b < a.shares) places[b] = planner.place(b, whole);
    if (b == 0) places[a.shares] = {a.num_seqs, 0, 0};
    __syncthreads();
    leaves = {};
    if (b < a.shares) leaves = leaves_of(planner, places[b], places[b + 1]);
    int slots = 0;
    first_slot[b] = sum_before(leaves.entered + leaves.left, sums, slots);
    leaves_one[b] = leaves.left;
    if (slots <= a.max_slots) break;
    __syncthreads();
  }
  __syncthreads();
  if (b >= a.shares) return;

  DecodeShare share{.begin = places[b], .end = places[b + 1], .slot = first_slot[b]};
  // The slots of the pair that block `first` begins and leaves: its last, and one per further
  // chunk.
  const auto pair_of = [&](int first) {
    const UnitPlace& inside = places[first + 1];
    return SharedPair{first, first_slot[first + 1] - 1,
                      planner.keys(inside.s).last_chunk() + 1 - inside.chunk + 1};
  };
  if (leaves.left) share.left = pair_of(b);
  if (leaves.entered > 0) {
    int first = b - 1;
    while (!leaves_one[first]) --first;
    share.entered = pair_of(first);
  }
  a.share[b] = share;
}

}  // namespace nanovllm
