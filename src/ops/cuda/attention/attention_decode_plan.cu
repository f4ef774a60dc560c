#include "ops/cuda/attention/attention_decode_plan.cuh"

namespace nanovllm {
namespace {

// Costs count groups of 16 keys.
constexpr int kCostKeys = 16;
/// The cost of a pair and of a unit beside their keys: measured with sequences of all lengths, by
/// when blocks with many of each end.
constexpr int kPairCost = 6, kUnitCost = 10;
/// Of a chunk that is seen whole.
constexpr int kChunkCost = kChunk / kCostKeys + kUnitCost;
/// The cost of merging pairs that several blocks share where blocks have nothing else to do.
constexpr int kMergeCost = kChunkCost / 2;

/// Of one pair.
__device__ int cost_of(const RowKeys& keys) {
  if (keys.end == 0) return 0;
  return (keys.end - 1) / kCostKeys - keys.low / kCostKeys + 1 + kPairCost +
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

__device__ int block_maximum(int x, int* shared) {
  x = warp_max(x);
  __syncthreads();  // as above
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  for (int i = 0; i < kPlanThreads / kWarp; ++i) x = max(x, shared[i]);
  return x;
}

/// Where a share begins, and what all units before it cost.
struct Start {
  UnitPlace place;
  int64_t cost;
};

struct Planner {
  const PlanArguments& a;
  const int* cost_before;  // [num_seqs + 1]: of one KV head, over the sequences before
  int64_t fair = 0;        // total() / shares: 64-bit divisions are long, and one is enough

  __device__ RowKeys keys(int s) const { return {a.cu_seqlens_q, a.context_lens, a.window, s}; }

  /// The first unit behind the pair of `at`.
  __device__ UnitPlace next_pair(UnitPlace at) const {
    if (at.head + 1 < a.kv_heads) return {at.s, at.head + 1, keys(at.s).first_chunk()};
    int s = at.s + 1;
    while (s < a.num_seqs && cost_before[s + 1] == cost_before[s]) ++s;
    return {s, 0, s < a.num_seqs ? keys(s).first_chunk() : 0};
  }

  __device__ int64_t total() const { return int64_t{cost_before[a.num_seqs]} * a.kv_heads; }
  __device__ Start end() const { return {{a.num_seqs, 0, 0}, total()}; }

  /// Where block `b` begins: the unit, or with `whole` the pair, that begins nearest to its part of
  /// the cost.
  __device__ Start start(int b, bool whole) const {
    const int64_t x = fair * b + static_cast<int>(total() - fair * a.shares) * b / a.shares;
    if (x >= total()) return end();
    int low = 0, high = a.num_seqs;  // the last sequence that begins at or before x: it has units
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (int64_t{cost_before[middle]} * a.kv_heads <= x ? low : high) = middle;
    }
    const int cost = cost_before[low + 1] - cost_before[low];  // of a pair
    const int64_t before = int64_t{cost_before[low]} * a.kv_heads;
    const int inside = static_cast<int>(x - before), head = inside / cost, rest = inside % cost;
    const int64_t pair_begins = before + int64_t{head} * cost;
    const RowKeys row = keys(low);
    const int first = row.first_chunk(), last = row.last_chunk();
    // Were the pair's first chunk whole, chunk c would begin at kChunkCost * (c - first).
    const int missing = row.low / kCostKeys - first * (kChunk / kCostKeys) - kPairCost;
    int chunk = first + (rest + missing + kChunkCost / 2) / kChunkCost;
    if (whole) chunk = 2 * rest < cost ? first : last + 1;
    if (b == 0 || chunk <= first) return {{low, head, first}, pair_begins};
    if (chunk > last) return {next_pair({low, head, last}), pair_begins + cost};
    return {{low, head, chunk}, pair_begins + kChunkCost * (chunk - first) - missing};
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

/// A share's first unit: the keys from `begin` of a sequence with `end` keys; none: 0 and 0.
struct FirstUnit {
  int s = 0, begin = 0, end = 0;
  FirstUnit() = default;
  __device__ explicit FirstUnit(const ShareUnits& share) {
    const bool leaves = !(share.middle == share.end);
    const UnitPlace& at = leaves ? share.middle : share.begin;
    if (share.begin == share.end) return;
    s = at.s;
    begin = at.chunk * kChunk;
    end = (leaves ? share.middle_keys : share.keys).end;
  }
};

/// Notes where the keys of the first units are, so that a block finds them with its share.
__device__ void note_blocks(const PlanArguments& a, const FirstUnit* units) {
  constexpr int kWarps = kPlanThreads / kWarp, kAtOnce = 10;
  const int lane = threadIdx.x % kWarp;
  for (int first = threadIdx.x / kWarp; first < a.shares; first += kAtOnce * kWarps) {
    int block[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const FirstUnit unit =
          first + k * kWarps < a.shares ? units[first + k * kWarps] : FirstUnit{};
      const int key = unit.begin + 8 * lane;
      block[k] =
          key < unit.end ? a.block_tables[unit.s * a.table_stride + (key >> a.block_shift)] : 0;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k * kWarps < a.shares) a.share[first + k * kWarps].blocks[lane] = block[k];
  }
}

/// Where the shares lie, as all threads see it.
struct Division {
  UnitPlace places[kPlanThreads + 1];
  int64_t costs[kPlanThreads + 1];
  int first_slot[kPlanThreads];
  bool leaves_one[kPlanThreads];

  /// The slots of the pair that block `first` begins and leaves: its last, and one per further
  /// chunk.
  __device__ SharedPair pair_of(const Planner& planner, int first) const {
    const UnitPlace& inside = places[first + 1];
    return {first, first_slot[first + 1] - 1,
            planner.keys(inside.s).last_chunk() + 1 - inside.chunk + 1};
  }
  /// The share of block `b`.
  __device__ ShareUnits share(const Planner& planner, int b, const Leaves& leaves) const {
    ShareUnits share{.begin = places[b], .end = places[b + 1]};
    if (share.begin.s < planner.a.num_seqs) share.keys = planner.keys(share.begin.s);
    share.middle = share.end;
    share.slot = first_slot[b];
    share.left_slot = share.slot + leaves.entered;
    if (leaves.left) {
      share.middle_keys = planner.keys(share.end.s);
      share.middle.chunk = share.middle_keys.first_chunk();
      share.left = pair_of(planner, b);
    }
    if (leaves.entered > 0) {
      int first = b - 1;
      while (!leaves_one[first]) --first;
      share.entered = pair_of(planner, first);
    }
    return share;
  }
};

/// The cost of pairs, summed up over the sequences. Returns the largest cost.
__device__ int sum_costs(const Planner& planner, int* cost_before, int* sums) {
  const PlanArguments& a = planner.a;
  const int b = threadIdx.x, each = (a.num_seqs + kPlanThreads - 1) / kPlanThreads;
  const int from = min(b * each, a.num_seqs), to = min(from + each, a.num_seqs);
  int mine = 0, total = 0, largest = 0;
  for (int s = from; s < to; ++s) {
    const int cost = cost_of(planner.keys(s));
    mine += cost;
    largest = max(largest, cost);
  }
  largest = block_maximum(largest, sums);
  int before = sum_before(mine, sums, total);
  for (int s = from; s < to; ++s) {
    cost_before[s] = before;
    before += cost_of(planner.keys(s));
  }
  if (b == 0) cost_before[a.num_seqs] = total;
  __syncthreads();
  return largest;
}

}  // namespace

__global__ void __launch_bounds__(kPlanThreads) attention_plan_kernel(const PlanArguments a) {
  extern __shared__ int cost_before[];
  __shared__ int sums[kPlanThreads / kWarp];
  __shared__ Division division;
  __shared__ FirstUnit first_units[kPlanThreads];
  Planner planner{a, cost_before};
  const int b = threadIdx.x, largest = sum_costs(planner, cost_before, sums);
  planner.fair = planner.total() / a.shares;

  // Pairs stay whole if that hardly makes the longest share longer, which it does where shares have
  // more than two of the longest or less than one, or if dividing them takes more slots than there
  // are.
  Leaves leaves;
  const int64_t bearable = planner.fair + kMergeCost;
  bool whole = largest <= bearable && planner.fair < 2 * largest;
  for (int attempt = whole ? 0 : 1; attempt < 3; ++attempt, whole = !whole) {
    const Start start = b < a.shares ? planner.start(b, whole) : planner.end();
    __syncthreads();
    division.places[b] = start.place;
    division.costs[b] = start.cost;
    if (b == 0) {
      division.places[kPlanThreads] = planner.end().place;
      division.costs[kPlanThreads] = planner.total();
    }
    __syncthreads();
    leaves =
        b < a.shares ? leaves_of(planner, division.places[b], division.places[b + 1]) : Leaves{};
    division.leaves_one[b] = leaves.left;
    int slots = 0;
    division.first_slot[b] = sum_before(leaves.entered + leaves.left, sums, slots);
    const int longest =
        block_maximum(static_cast<int>(division.costs[b + 1] - division.costs[b]), sums);
    if (whole ? attempt > 0 || longest <= bearable : slots <= a.max_slots) break;
  }
  __syncthreads();
  if (b < a.shares) {
    const ShareUnits share = division.share(planner, b, leaves);
    static_cast<ShareUnits&>(a.share[b]) = share;
    first_units[b] = FirstUnit(share);
  }
  __syncthreads();
  note_blocks(a, first_units);
}

}  // namespace nanovllm
