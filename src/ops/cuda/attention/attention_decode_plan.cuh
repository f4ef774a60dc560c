// How the keys of a decode step are divided among the blocks of a grid that is the same for every
// step. The units of work, (sequence, KV head, chunk of keys), stand in one list, in this order;
// every block has a stretch of it, the stretches costing about the same.
//
// A pair (sequence, KV head) whose chunks lie in several blocks is merged by the block that
// finishes last. The block in which it begins leaves one partial result, of all its chunks, the
// blocks after it one per chunk: merging goes from the left (attention.cuh). A slot holds one
// partial result, and the slots of a pair follow one another. Blocks do their parts of such pairs
// first, so that none merges at its end if it has a whole pair besides.
#pragma once

#include "ops/cuda/attention/attention.cuh"

namespace nanovllm {

/// A place in the list of units; {num_seqs, 0, 0} is its end.
struct UnitPlace {
  int s, head, chunk;
};
__device__ inline bool operator==(const UnitPlace& a, const UnitPlace& b) {
  return a.s == b.s && a.head == b.head && a.chunk == b.chunk;
}
__device__ inline bool same_pair(const UnitPlace& a, const UnitPlace& b) {
  return a.s == b.s && a.head == b.head;
}

/// A pair that several blocks share: its slots, and which of the counters of done slots it uses.
struct SharedPair {
  int counter, first_slot, slots;
};

/// A sequence's one query row, and the keys that it sees: low .. end - 1. Sequences without a row
/// or a key (padding) have end 0, and no units.
struct RowKeys {
  int row = 0, low = 0, end = 0;
  RowKeys() = default;
  __device__ RowKeys(const int* cu_seqlens_q, const int* context_lens, int window, int s) {
    row = cu_seqlens_q[s];
    if (cu_seqlens_q[s + 1] > row) end = max(context_lens[s], 0);
    low = first_key(end - 1, window);
  }
  __device__ int first_chunk() const { return low / kChunk; }
  __device__ int last_chunk() const { return (end - 1) / kChunk; }
};

/// The work of one block: the units begin .. end.
struct alignas(16) ShareUnits {
  UnitPlace begin, end;
  UnitPlace middle;           // where the pair begins that a later block goes on with; else end
  RowKeys keys, middle_keys;  // of the sequences of begin and middle
  int slot, left_slot;        // the block's first slots for the pairs below
  SharedPair entered,         // the pair that an earlier block began, if begin is inside one
      left;                   // the pair at middle, if end is inside it
};
/// The same with what a block would else have to look up.
struct DecodeShare : ShareUnits {
  int blocks[kWarp];  // of the cache: where keys 8i .. 8i + 7 of the first unit's chunk are
};
static_assert(8 * kWarp == kChunk);

struct PlanArguments {
  const int *cu_seqlens_q, *context_lens;
  int num_seqs, kv_heads, window;
  int shares, max_slots;
  const int* block_tables;
  int64_t table_stride;
  int block_shift;
  DecodeShare* share;  // [shares]
};

constexpr int kPlanThreads = 512;      // at least the number of shares
constexpr int kMaxPlanSeqs = 4 << 10;  // their costs are in shared memory

/// Divides the units. One block; shared memory: plan_shared_bytes().
__global__ void attention_plan_kernel(PlanArguments a);
constexpr size_t plan_shared_bytes(int64_t num_seqs) {
  return sizeof(int) * static_cast<size_t>(num_seqs + 1);
}

}  // namespace nanovllm
