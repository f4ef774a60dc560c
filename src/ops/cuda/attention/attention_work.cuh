// The work of a prefill kernel that stays on its SM: items of kItemRows packed query rows (queries
// times the heads of their group) of one KV head. Nothing is planned ahead: a warp finds item i
// among the sequences by itself. Items are numbered in sections, of some sequences or of some KV
// heads of one, whose keys and values fit the L2 cache; within a section those with the most keys
// come first, so that the blocks end together.
#pragma once

#include "ops/cuda/attention/attention.cuh"

namespace nanovllm {

constexpr int kItemRows = 128;

/// One item: rows first_row .. first_row + 127, less past the sequence's end, which see the tiles
/// first_tile .. end_tile - 1.
struct PrefillItem {
  int sequence, kv_head;            // sequence -1: there is no more work
  int first_token, first_position;  // of the sequence's queries
  int first_row, rows;              // rows: of the whole sequence
  int context_len, first_key;       // the first key that any of the rows sees
  int first_tile, end_tile;
};

struct PrefillArguments : AttentionArguments<__nv_bfloat16> {
  int kv_heads;
  int max_tiles;  // of keys, in any sequence: a bound
  int section_seqs,
      section_heads;  // of a section: at most 32 sequences; more than one only with all heads
  int* counters;      // items begun beyond each block's first; blocks done. Zeros between kernels
  uint32_t group_reciprocal;  // reciprocal_of_group()
};

/// For dividing by the group: 2^31 / group, rounded up. A division proper is 30 instructions in a
/// row, and a warp that runs alone waits for each of them.
constexpr uint32_t reciprocal_of_group(int group) {
  return ((1u << 31) + static_cast<uint32_t>(group) - 1) / static_cast<uint32_t>(group);
}
/// row / group, of rows below 2^31 / group.
__device__ inline int token_of(int row, uint32_t group_reciprocal) {
  return static_cast<int>(static_cast<uint64_t>(row) * group_reciprocal >> 31);
}

/// A sequence's queries.
struct QueryRange {
  int first_token = 0, count = 0, first_position = 0;
  __device__ int items(int group) const { return (count * group + kItemRows - 1) / kItemRows; }
  /// Items that see more than the first `keys` keys: the last ones.
  __device__ int items_past(int keys, int group) const {
    if (keys >= first_position + count) return 0;
    return items(group) - max(keys - first_position, 0) * group / kItemRows;
  }
};

/// Finds items of growing numbers. All of it is done by a whole warp; a lane has one sequence of
/// the section.
class ItemFinder {
 public:
  __device__ explicit ItemFinder(const PrefillArguments& arguments) : a_(arguments) { load(); }

  /// The item of this number, the same in all lanes.
  __device__ PrefillItem find(int index) {
    PrefillItem item{};
    item.sequence = -1;
    while (index >= base_ + items_ * a_.kv_heads) {
      base_ += items_ * a_.kv_heads;
      first_sequence_ += a_.section_seqs;
      if (first_sequence_ >= a_.num_seqs) return item;
      load();
    }
    const int in_section = index - base_,
              heads_begin = in_section / (items_ * a_.section_heads) * a_.section_heads,
              heads = min(a_.section_heads, a_.kv_heads - heads_begin),
              in_heads = in_section - heads_begin * items_;
    item.kv_head = heads_begin + in_heads % heads;
    place(item, in_heads / heads);
    return item;
  }

 private:
  __device__ void load() {
    const int lane = threadIdx.x % kWarp, s = first_sequence_ + lane;
    mine_ = {};
    if (lane < a_.section_seqs && s < a_.num_seqs) {
      mine_.first_token = a_.cu_seqlens_q[s];
      mine_.count = a_.cu_seqlens_q[s + 1] - mine_.first_token;
      mine_.first_position = a_.context_lens[s] - mine_.count;
    }
    items_ = warp_sum(mine_.items(a_.group));
  }
  /// Item `rank` of the section's items of one KV head, the one with the most keys first.
  __device__ void place(PrefillItem& item, int rank) const {
    // It ends in tile `low`: `rank` of them or less end past it, more do not end before it.
    int low = 0, high = a_.max_tiles, past_high = 0;
    while (high - low > 1) {
      const int middle = (low + high) / 2,
                past = warp_sum(mine_.items_past(middle * kTileKeys, a_.group));
      if (past > rank) {
        low = middle;
      } else {
        high = middle;
        past_high = past;
      }
    }
    rank -= past_high;
    const int lane = threadIdx.x % kWarp, past = mine_.items_past(high * kTileKeys, a_.group),
              here = mine_.items_past(low * kTileKeys, a_.group) - past;
    int upto = here;  // items of the lanes up to this one
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, upto, offset);
      if (lane >= offset) upto += other;
    }
    const unsigned found = __ballot_sync(kFullMask, upto > rank);
    const int owner = __ffs(static_cast<int>(found)) - 1;
    const int number = mine_.items(a_.group) - 1 - past - (rank - (upto - here));
    const auto of_owner = [&](int x) { return __shfl_sync(kFullMask, x, owner); };
    item.sequence = first_sequence_ + owner;
    item.first_row = of_owner(number) * kItemRows;
    item.first_token = of_owner(mine_.first_token);
    item.first_position = of_owner(mine_.first_position);
    const int count = of_owner(mine_.count);
    item.rows = count * a_.group;
    item.context_len = item.first_position + count;
    const int last_row = min(item.first_row + kItemRows, item.rows) - 1;
    item.first_key = first_key(item.first_position + item.first_row / a_.group, a_.window);
    item.first_tile = item.first_key / kTileKeys;
    item.end_tile = (item.first_position + last_row / a_.group) / kTileKeys + 1;
  }

  const PrefillArguments& a_;
  int first_sequence_ = 0, base_ = 0;  // of the section; base: the number of its first item
  int items_;                          // of the section, for one KV head
  QueryRange mine_;
};

}  // namespace nanovllm
