// What the attention kernels share: where a query row stands, where its keys lie, and the
// arithmetic that defines its bits.
//
// Exactness. The keys of a sequence are cut at fixed absolute positions into chunks of kChunk and
// tiles of kTileKeys. Within a chunk a row does the online softmax tile by tile; each chunk starts
// afresh and ends with a partial result (output, maximum, sum); partial results are merged in the
// order of the chunks by merge(). Whether one block walks all chunks of a row or each chunk has a
// block of its own therefore does not show in the bits, and neither does the company that a row has
// in its tile: a tile whose keys all lie past the row's position adds exact zeros.
#pragma once

#include "ops/cuda/device.cuh"

namespace nanovllm {

constexpr int kTileKeys = 64;
constexpr int kChunk = 256;
constexpr float kMinusInfinity = -__builtin_huge_valf();

template <class T>
struct AttentionArguments {
  T* out;
  const T *q, *k, *v;
  int64_t out_token_stride, out_head_stride, q_token_stride, q_head_stride;
  int64_t k_block_stride, k_head_stride, v_block_stride, v_head_stride;
  const int *cu_seqlens_q, *context_lens, *block_tables;
  int64_t table_stride;
  int num_seqs, num_heads, group;  // group: query heads per KV head
  int block_shift;                 // log2 of the block size
  float scale_log2;                // scale * log2(e): the softmax works in powers of two
  // Split sequences: partial results by [token, head, chunk].
  float* partial_out;   // [.., head_dim]
  float2* partial_sum;  // maximum, sum
  int max_chunks;
};

/// Where key `position` of sequence `s` is, in elements from the start of the cache for one head.
template <class T>
__device__ int64_t key_offset(const AttentionArguments<T>& a, int s, int position,
                              int64_t block_stride, int head_dim) {
  const int block = a.block_tables[s * a.table_stride + (position >> a.block_shift)];
  return block * block_stride + int64_t{position & ((1 << a.block_shift) - 1)} * head_dim;
}

/// The sequence that a token row belongs to: the last one that begins at or before it; -1 for rows
/// past the last (padding).
__device__ inline int sequence_of(const int* cu_seqlens_q, int num_seqs, int row) {
  if (row >= cu_seqlens_q[num_seqs]) return -1;
  int low = 0, high = num_seqs;  // cu[low] <= row < cu[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (cu_seqlens_q[middle] <= row ? low : high) = middle;
  }
  return low;
}

__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// A maximum fit for subtracting: a row that has seen no key yet has none.
__device__ inline float finite_or_zero(float maximum) {
  return maximum == kMinusInfinity ? 0.0f : maximum;
}

/// exp(scale * (score - maximum)); 0 for a masked score (-inf).
__device__ inline float weight_of(float score, float maximum, float scale_log2) {
  return power_of_two(__fmaf_rn(score, scale_log2, -__fmul_rn(maximum, scale_log2)));
}

/// What results relative to an old maximum are multiplied with to be relative to a new one. Not
/// weight_of(): an unchanged maximum must give exactly 1, or keys that a row does not see would
/// show.
__device__ inline float rescaling(float old_maximum, float new_maximum, float scale_log2) {
  return power_of_two(__fmul_rn(__fsub_rn(old_maximum, new_maximum), scale_log2));
}

/// Merging a chunk's partial result into what the chunks before it gave: the factors of both, and
/// the new maximum and sum.
struct Merge {
  float old_factor, new_factor, maximum, sum;
  __device__ Merge(float old_maximum, float old_sum, float new_maximum, float new_sum,
                   float scale_log2) {
    maximum = fmaxf(old_maximum, new_maximum);
    const float base = finite_or_zero(maximum);
    old_factor = rescaling(old_maximum, base, scale_log2);
    new_factor = rescaling(new_maximum, base, scale_log2);
    sum = __fmaf_rn(new_sum, new_factor, __fmul_rn(old_sum, old_factor));
  }
  __device__ float operator()(float old_value, float new_value) const {
    return __fmaf_rn(new_value, new_factor, __fmul_rn(old_value, old_factor));
  }
};

/// The end: the weighted sum over the sum of weights. Adding zero makes a negative zero positive,
/// whichever masked keys it came from.
__device__ inline float finish(float value, float sum) {
  return __fadd_rn(__fmul_rn(value, __frcp_rn(sum)), 0.0f);
}

}  // namespace nanovllm
