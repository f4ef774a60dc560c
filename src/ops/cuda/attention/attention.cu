// Paged causal attention with grouped queries: prefill, chunks and decode in one op. bf16 runs on
// tensor cores (attention_mma.cuh); f32, which serves verification, on plain arithmetic (below).
// Both obey the rules of attention.cuh.
#include <bit>

#include "ops/cuda/attention/attention.cuh"
#include "ops/cuda/attention/attention_mma.cuh"
#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/rowwise/row_math.cuh"

namespace nanovllm {
namespace {

// -- f32: a block has one head of one token --

constexpr int kPlainThreads = 128;

/// Grid: tokens, heads. Tiles of 64 keys; warps take turns at the scores, threads have an element
/// of the output (or two).
template <class C>
__global__ void __launch_bounds__(kPlainThreads)
    attention_plain_kernel(const AttentionArguments<float> a, int d) {
  constexpr int kWarps = kPlainThreads / kWarp, kElements = 2;  // head_dim <= 256
  __shared__ float score[kTileKeys];
  __shared__ int64_t v_offset[kTileKeys];
  __shared__ float v_scale[kTileKeys];
  const C *const keys = static_cast<const C*>(a.k), *const values = static_cast<const C*>(a.v);
  const int token = blockIdx.x, head = blockIdx.y, kv_head = head / a.group;
  const int s = sequence_of(a.cu_seqlens_q, a.num_seqs, token);
  if (s < 0 || token < a.cu_seqlens_q[s]) return;
  const int end = a.context_lens[s] - (a.cu_seqlens_q[s + 1] - token) + 1;  // position + 1
  if (end <= 0) return;                                                     // padding
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const float* q = a.q + token * a.q_token_stride + head * a.q_head_stride;
  float value[kElements] = {}, maximum = kMinusInfinity, sum = 0.0f;
  const int begin = first_key(end - 1, a.window);
  for (int tile = begin / kTileKeys * kTileKeys; tile < end; tile += kTileKeys) {
    const int first = max(tile, begin), count = min(tile + kTileKeys, end) - first;
    for (int i = warp; i < count; i += kWarps) {
      const C* k =
          keys + key_offset(a, s, first + i, a.k_block_stride, d) + kv_head * a.k_head_stride;
      float dot = 0.0f;
      for (int c = lane; c < d; c += kWarp) dot = __fmaf_rn(q[c], to_float(k[c]), dot);
      dot = warp_sum(dot);
      if (lane == 0) {
        if constexpr (is_e4m3<C>) {
          dot *=
              *row_scales(a, keys + kv_head * a.k_head_stride, s, first + i, a.k_block_stride, d);
          v_scale[i] =
              *row_scales(a, values + kv_head * a.v_head_stride, s, first + i, a.v_block_stride, d);
        }
        score[i] = dot;
        v_offset[i] = key_offset(a, s, first + i, a.v_block_stride, d) + kv_head * a.v_head_stride;
      }
    }
    __syncthreads();
    float tile_maximum = maximum;
    for (int i = 0; i < count; ++i) tile_maximum = fmaxf(tile_maximum, score[i]);
    const float factor = exp2f((maximum - finite_or_zero(tile_maximum)) * a.scale_log2);
    maximum = tile_maximum;
    sum *= factor;
#pragma unroll
    for (int e = 0; e < kElements; ++e) value[e] *= factor;
    for (int i = 0; i < count; ++i) {
      const float weight = exp2f((score[i] - finite_or_zero(maximum)) * a.scale_log2);
      sum += weight;
      const float scaled = is_e4m3<C> ? scaled_weight(weight, v_scale[i]) : weight;
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (const int c = threadIdx.x + e * kPlainThreads; c < d)
          value[e] = __fmaf_rn(scaled, to_float(values[v_offset[i] + c]), value[e]);
    }
    __syncthreads();
  }
  // q is this block's alone, and all of it has been read: out may be q.
#pragma unroll
  for (int e = 0; e < kElements; ++e)
    if (const int c = threadIdx.x + e * kPlainThreads; c < d)
      a.out[token * a.out_token_stride + head * a.out_head_stride + c] = value[e] / sum;
}

}  // namespace

// -- The op --

void CudaBackend::check_attention(const Tensor& out, const Tensor& q, const KvCache& cache,
                                  int64_t window) {
  check(window >= 0, "attention: a window of {} keys", window);
  check_pages(cache);
  check(q.rank == 3 && out.rank == 3 && q.shape == out.shape && q.shape[2] == cache.k.shape[3] &&
            q.shape[1] % cache.k.shape[1] == 0 && q.dtype == out.dtype &&
            (q.dtype == cache.k.dtype || cache.k.dtype == DType::e4m3) && dense_last_axis(q) &&
            dense_last_axis(out),
        "attention: {} from queries {} and keys {}", out.describe(), q.describe(),
        cache.k.describe());
  const int64_t block_size = cache.k.shape[2];
  check(std::has_single_bit(static_cast<uint64_t>(block_size)) && block_size >= 8 &&
            block_size <= 256,
        ErrorKind::invalid_argument,
        "attention: the block size is {}; a power of two from 8 to 256 is needed", block_size);
  dispatch_head_dim(q.shape[2], [&]<int kHeadDim>() {
    static_assert(kHeadDim % 16 == 0);
  });  // f32 is refused where bf16 is
}

void CudaBackend::attention(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                            int64_t window) {
  check_attention(out, q, cache, window);
  if (q.numel() == 0 || batch.num_seqs() == 0) return;
  if (q.dtype == DType::f32)
    attention_f32(out, q, cache, batch, scale, window);
  else
    attention_bf16(out, q, cache, batch, scale, window);
}

void CudaBackend::attention_f32(Tensor out, Tensor q, KvCache cache, const Batch& batch,
                                float scale, int64_t window) {
  launch(
      cache.k.dtype == DType::e4m3 ? attention_plain_kernel<E4m3> : attention_plain_kernel<float>,
      {grid_size(q.shape[0]), grid_size(q.shape[1])}, kPlainThreads, 0,
      attention_arguments<float>(out, q, cache, batch, scale, window),
      static_cast<int>(q.shape[2]));
}

void CudaBackend::attention_bf16(Tensor out, Tensor q, KvCache cache, const Batch& batch,
                                 float scale, int64_t window) {
  check(wide_rows({q, out, cache.k, cache.v}),
        "attention: rows of {} or of the cache {} do not begin on 16 bytes", q.describe(),
        cache.k.describe());
  if (attention_decode(out, q, cache, batch, scale, window)) return;
#ifdef NANOVLLM_CUDA_HOPPER
  if (attention_prefill(out, q, cache, batch, scale, window)) return;
#endif
  auto arguments = attention_arguments<bf16>(out, q, cache, batch, scale, window);
  const int64_t tokens = q.shape[0], heads = q.shape[1], kv_heads = cache.k.shape[1],
                head_dim = q.shape[2], seqs = batch.num_seqs();
  const int64_t row_tiles = ceil_div(batch.max_seqlen_q * arguments.group, kTileRows);
  const int64_t chunks = ceil_div(batch.max_context_len, kChunk),
                partials = tokens * heads * chunks;
  // Split where there are too few blocks to fill the GPU, and the partial results fit. This choice
  // may depend on the batch: it does not show in the bits.
  constexpr int64_t kBlocksPerSm = 8;
  const bool split =
      chunks > 1 && row_tiles * kv_heads * seqs < kBlocksPerSm * num_sms_ &&
      static_cast<size_t>(partials * (head_dim + 2)) * sizeof(float) <= kPartialBytes;
  const auto run = [&]<int kHeadDim, class C>() {
    constexpr size_t kSharedBytes = sizeof(AttentionTile<kHeadDim, C>);
    const auto grid = [&](int64_t x) {
      return dim3{grid_size(x), grid_size(kv_heads), grid_size(seqs)};
    };
    if (!split) {
      launch(attention_mma_kernel<kHeadDim, false, C>, grid(row_tiles), kAttentionThreads,
             kSharedBytes, arguments);
      return;
    }
    arguments.max_chunks = static_cast<int>(chunks);
    arguments.partial_sum = reinterpret_cast<float2*>(partial_results());
    arguments.partial_out = reinterpret_cast<float*>(arguments.partial_sum + partials);
    launch(attention_mma_kernel<kHeadDim, true, C>, grid(row_tiles * chunks), kAttentionThreads,
           kSharedBytes, arguments);
    launch(attention_merge_kernel<kHeadDim>, {grid_size(tokens), grid_size(heads)},
           static_cast<unsigned>(kHeadDim), 0, arguments);
  };
  dispatch_head_dim(head_dim, [&]<int kHeadDim>() {
    if (cache.k.dtype == DType::e4m3)
      run.template operator()<kHeadDim, E4m3>();
    else
      run.template operator()<kHeadDim, __nv_bfloat16>();
  });
}

void CudaBackend::check_head_dim(int64_t head_dim) {
  dispatch_head_dim(head_dim, [&]<int kHeadDim>() {});
}

}  // namespace nanovllm
