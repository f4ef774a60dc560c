// Shared by the attention kernels: where a query row stands, where its keys lie, and the
// arithmetic that defines its bits.
//
// Exactness. The keys of a sequence are cut at fixed absolute positions into chunks of kChunk and
// tiles of kTileKeys. Within a chunk a row does the online softmax tile by tile; each chunk starts
// afresh and ends with a partial result (output, base, sum); partial results are merged in the
// order of the chunks by Merge. Whether one block walks all chunks of a row or each chunk has a
// block of its own therefore does not show in the bits, and neither does the company that a row has
// in its tile: a tile or a chunk of which the row sees no key changes nothing, whether it is walked
// or skipped.
//
// A tile of bf16, for one row (u: its base, -inf at the start of a chunk; sum and out 0 there):
//   scores = the chain of mma over the head's elements in order, from 0; masked ones -inf
//   if base_moves(u, max of the tile's scores): factor = rescaling(u, finite_or_zero(max)), u = max
//   else factor = 1 exactly, so that a whole warp may leave the rescaling out
//   w = weight_of(score, finite_or_zero(u))
//   sum, of each of the four lanes that share the row: sum * factor + tile_sum() of the lane's w
//   out = out * factor, then the chain of mma over the tile's keys in order, of bf16(w) and V
// Over keys of E4M3 a score is the chain's result times the scale of the key before anything else,
// and bf16(w) is bf16(scaled_weight(w, the scale of the value)); the chain over the head's elements
// takes sixteen at a time in the order of widen_e4m3().
// At the end of the chunk quad_sum() gives the row's sum. V is zeros where no row of the tile sees
// the key: whatever lies there (another sequence's NaN) must not meet the zero weights.
#pragma once

#include <bit>
#include <limits>
#include <numbers>

#include "core/batch.h"
#include "ops/cuda/ptx/e4m3.cuh"

namespace nanovllm {

constexpr int kTileKeys = 64;
constexpr int kChunk = 256;
constexpr float kMinusInfinity = -__builtin_huge_valf();
/// How far, in powers of two, a score may exceed the base of its row before the base moves. Weights
/// stay below 2^8, which a sum of 256 of them in f32 and bf16's rounding do not mind.
constexpr float kBaseSlack = 8.0f;

template <class T>
struct AttentionArguments {
  T* out;
  const T* q;
  const void *k, *v;  // the cache's elements: T or E4m3
  int64_t out_token_stride, out_head_stride, q_token_stride, q_head_stride;
  int64_t k_block_stride, k_head_stride, v_block_stride, v_head_stride;
  const int *cu_seqlens_q, *context_lens, *block_tables;
  int64_t table_stride;
  int num_seqs, num_heads, group;  // group: query heads per KV head
  int block_shift;                 // log2 of the block size
  int window;                      // keys that a row sees at most; 0: all up to its own
  float scale_log2;                // scale * log2(e): the softmax works in powers of two
  // Split sequences: partial results by [token, head, chunk].
  float* partial_out;   // [.., head_dim]
  float2* partial_sum;  // base, sum
  int max_chunks;
};

/// The first key that a row at `position` sees.
__device__ inline int first_key(int position, int window) {
  return window > 0 ? max(0, position - window + 1) : 0;
}

/// Where key `position` of sequence `s` is, in elements from the start of the cache for one head.
template <class T>
__device__ int64_t key_offset(const AttentionArguments<T>& a, int s, int position,
                              int64_t block_stride, int head_dim) {
  const int block = a.block_tables[s * a.table_stride + (position >> a.block_shift)];
  return block * block_stride + int64_t{position & ((1 << a.block_shift) - 1)} * head_dim;
}

/// The scale of key `position` of sequence `s` in a cache of E4M3, from the cache's start for one
/// head; those of the keys behind it in its block follow.
template <class T>
__device__ const float* row_scales(const AttentionArguments<T>& a, const E4m3* cache, int s,
                                   int position, int64_t block_stride, int head_dim) {
  const int size = 1 << a.block_shift;
  const int block = a.block_tables[s * a.table_stride + (position >> a.block_shift)];
  return reinterpret_cast<const float*>(cache + block * block_stride + int64_t{size} * head_dim) +
         (position & (size - 1));
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

/// A base fit for subtracting: a row that has seen no key yet has none.
__device__ inline float finite_or_zero(float base) { return base == kMinusInfinity ? 0.0f : base; }

/// Whether a tile with this maximum moves the row's base to it. A tile without a visible key leaves
/// a base alone.
__device__ inline bool base_moves(float base, float maximum, float scale_log2) {
  return base == kMinusInfinity || __fmul_rn(__fsub_rn(maximum, base), scale_log2) > kBaseSlack;
}

/// exp(scale * (score - base)); 0 for a masked score (-inf).
__device__ inline float weight_of(float score, float base, float scale_log2) {
  return power_of_two(__fmaf_rn(score, scale_log2, -__fmul_rn(base, scale_log2)));
}

/// The factor that makes results relative to an old base relative to a new one. Not
/// weight_of(): an unchanged base must give exactly 1, or keys that a row does not see would show.
__device__ inline float rescaling(float old_base, float new_base, float scale_log2) {
  return power_of_two(__fmul_rn(__fsub_rn(old_base, new_base), scale_log2));
}

/// The row's base for a tile with this maximum; `factor`: what sum and out are multiplied with.
__device__ inline float next_base(float base, float maximum, float scale_log2, float& factor) {
  if (!base_moves(base, maximum, scale_log2)) {
    factor = 1.0f;
    return base;
  }
  factor = rescaling(base, finite_or_zero(maximum), scale_log2);
  return maximum;
}

/// The sum of a lane's four weights of 16 keys 16g ..: lane t of a row's quad has the keys 2t, 2t +
/// 1, 2t + 8 and 2t + 9 of them (the accumulators of mma and of wgmma lie like that).
__device__ inline float group_sum(float w0, float w1, float w8, float w9) {
  return __fadd_rn(__fadd_rn(w0, w1), __fadd_rn(w8, w9));
}
/// The sum of a lane's weights of a tile, from those of its four groups of 16 keys.
__device__ inline float tile_sum(float g0, float g1, float g2, float g3) {
  return __fadd_rn(__fadd_rn(g0, g1), __fadd_rn(g2, g3));
}
/// A row's sum from those of its four lanes, in all of them.
__device__ inline float quad_sum(float sum) {
  sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 1));
  return __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 2));
}
/// A row's maximum from those of its four lanes, in all of them.
__device__ inline float quad_max(float maximum) {
  maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, 1));
  return fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, 2));
}

/// Merging a chunk's partial result into what the chunks before it gave: the factors of both, and
/// the new base and sum. Merging into nothing (base -inf, sum 0) gives the chunk's own result,
/// merging a chunk without a visible key what there was.
struct Merge {
  float old_factor, new_factor, base, sum;
  __device__ Merge(float old_base, float old_sum, float new_base, float new_sum, float scale_log2) {
    base = fmaxf(old_base, new_base);
    const float common = finite_or_zero(base);
    old_factor = rescaling(old_base, common, scale_log2);
    new_factor = rescaling(new_base, common, scale_log2);
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

// -- On the host --

/// A kernel's arguments; partial results are not set.
template <class T>
AttentionArguments<DeviceType<T>> attention_arguments(const Tensor& out, const Tensor& q,
                                                      const KvCache& cache, const Batch& batch,
                                                      float scale, int64_t window) {
  return {.out = device_ptr<T>(out),
          .q = device_ptr<T>(q),
          .k = cache.k.data,
          .v = cache.v.data,
          .out_token_stride = out.stride[0],
          .out_head_stride = out.stride[1],
          .q_token_stride = q.stride[0],
          .q_head_stride = q.stride[1],
          .k_block_stride = cache.k.stride[0],
          .k_head_stride = cache.k.stride[1],
          .v_block_stride = cache.v.stride[0],
          .v_head_stride = cache.v.stride[1],
          .cu_seqlens_q = batch.cu_seqlens_q.ptr<int32_t>(),
          .context_lens = batch.context_lens.ptr<int32_t>(),
          .block_tables = batch.block_tables.ptr<int32_t>(),
          .table_stride = batch.block_tables.stride[0],
          .num_seqs = static_cast<int>(batch.num_seqs()),
          .num_heads = static_cast<int>(q.shape[1]),
          .group = static_cast<int>(q.shape[1] / cache.k.shape[1]),
          .block_shift = std::countr_zero(static_cast<uint64_t>(cache.k.shape[2])),
          // A window that no context outgrows is none.
          .window = window < std::numeric_limits<int>::max() ? static_cast<int>(window) : 0,
          .scale_log2 = scale * std::numbers::log2e_v<float>,
          .partial_out = nullptr,
          .partial_sum = nullptr,
          .max_chunks = 1};
}

/// Calls body.template operator()<head_dim>(). Throws Error(invalid_argument) for sizes without a
/// kernel.
template <class Body>
void dispatch_head_dim(int64_t head_dim, Body&& body) {
  switch (head_dim) {
    case 64:
      return body.template operator()<64>();
    case 80:
      return body.template operator()<80>();
    case 96:
      return body.template operator()<96>();
    case 128:
      return body.template operator()<128>();
    case 256:
      return body.template operator()<256>();
    default:
      fail(ErrorKind::invalid_argument,
           "attention: head_dim {} has no GPU kernel; 64, 80, 96, 128 and 256 have", head_dim);
  }
}

}  // namespace nanovllm
