// bf16 attention on Hopper: blocks stay on their SM and take items of 128 packed query rows of one
// KV head (attention_work.cuh). The first warpgroup loads (attention_prefill_load.cuh); two others
// have 64 rows each: S = Q K^T and O += P V by wgmma, with Q and P in registers. A warpgroup
// computes the scores of tile j + 1 while it adds tile j to the output, and each fills the gaps
// that the softmax of the other leaves. The bits are those of attention_mma.cuh (rules:
// attention.cuh). Over a cache of E4M3 the first and a fourth one widen
// (attention_prefill_widen.cuh).
#pragma once

#include "ops/cuda/attention/attention_prefill_rows.cuh"
#include "ops/cuda/attention/attention_prefill_widen.cuh"

namespace nanovllm {

/// A warpgroup's state of an item: its queries, the output of the chunk it is in, and the result
/// of the chunks before (the values in shared memory).
template <int kHeadDim, class C>
struct Consumer {
  using Shared = PrefillShared<kHeadDim, C>;
  Shared& shared;
  const PrefillArguments& a;
  unsigned at = 0;  // tiles met so far, of all items: the place in the ring
  uint32_t query[kHeadDim / 16][4], weight[kTileKeys / 16][4];
  float score[kTileKeys / 8][4], weighed[kTileKeys / 8][4], out[kHeadDim / 8][4];
  ChunkSoftmax softmax;
  float merged_base[2], merged_sum[2], old_factor[2], new_factor[2];
  bool merged_any;              // there is a chunk before this one
  float2 scale[kTileKeys / 8];  // over E4M3, of the lane's keys, then of their values
  bool has_odd_scale;

  __device__ Consumer(Shared& s, const PrefillArguments& arguments) : shared(s), a(arguments) {}

  __device__ void load_queries(int n) {
    wait_barrier(&shared.q_full, n % 2);
    if constexpr (is_e4m3<C>) {
      const int lane = threadIdx.x % kWarp, first = (threadIdx.x / kWarp - 4) * 16 + lane / 4;
#pragma unroll
      for (int kk = 0; kk < kHeadDim / 16; ++kk)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = first + 8 * r;
          const uint4* unit = &shared.q[row][(2 * kk + lane % 4 / 2) ^ row % 8];
          in_widened_order(reinterpret_cast<const uint2*>(unit)[lane % 2], query[kk][r],
                           query[kk][2 + r]);
        }
    } else {
      const int row = (threadIdx.x / kWarp - 4) * 16 + threadIdx.x % 16,
                part = threadIdx.x / 16 % 2;
#pragma unroll
      for (int kk = 0; kk < kHeadDim / 16; ++kk)
        load_matrices(query[kk], reinterpret_cast<const __nv_bfloat16*>(
                                     &shared.q[row][(2 * kk + part) ^ row % 8]));
    }
    release(&shared.q_empty);
  }
  __device__ static void release(uint64_t* empty) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(empty);
  }
  __device__ static int stage(unsigned n) { return static_cast<int>(n % Shared::kStages); }
  __device__ static int parity(unsigned n) { return static_cast<int>(n / Shared::kStages % 2); }
  // The warpgroups take turns at beginning products, so that one has its softmax while the other
  // has the tensor cores. Both have one turn for each of an item's tiles and one more.
  __device__ static void begin_turn() {
    asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(threadIdx.x / kConsumerThreads)),
                 "n"(kConsumers * kConsumerThreads)
                 : "memory");
  }
  __device__ static void end_turn() {
    asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(3 - threadIdx.x / kConsumerThreads)),
                 "n"(kConsumers * kConsumerThreads)
                 : "memory");
  }
  __device__ static void skip_turn() {
    begin_turn();
    end_turn();
  }
  /// Tiles that only the other warpgroup needs.
  __device__ void skip(int tiles) {
    for (; tiles > 0; --tiles, ++at) {
      skip_turn();
      wait_barrier(&shared.k_full[stage(at)], parity(at));
      release(&shared.k_empty[stage(at)]);
      wait_barrier(&shared.v_full[stage(at)], parity(at));
      release(&shared.v_empty[stage(at)]);
    }
  }
  /// Begins score = Q K^T of tile n of the ring.
  __device__ void begin_scores(unsigned n) {
    wait_barrier(&shared.k_full[stage(n)], parity(n));
    const uint32_t k = describe_rows(shared.k[stage(n)]);
    pin(score);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk)
      wgmma_k16<false>(score, query[kk], k + kk / 4 * (kTileKeys * 128 / 16) + kk % 4 * 2, kk > 0);
    wgmma_commit();
  }
  /// Begins out (+)= P V of tile n of the ring.
  __device__ void begin_output(unsigned n, bool accumulate) {
    wait_barrier(&shared.v_full[stage(n)], parity(n));
    const uint32_t v = describe_columns(shared.v[stage(n)], kTileKeys);
    pin(out);
    pin(weight);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kTileKeys / 16; ++kk)
      wgmma_k16<true>(out, weight[kk], v + kk * 128, accumulate || kk > 0);
    wgmma_commit();
  }
  __device__ void finish_output() {
    wgmma_wait<0>();
    pin(out);
    pin(weight);
    release(&shared.v_empty[stage(at)]);
  }
  /// The scales of the lane's keys of a tile, before whatever the next step waits for.
  __device__ void load_scales(const float (&scales)[kTileKeys]) {
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j)
      scale[j] = *reinterpret_cast<const float2*>(&scales[8 * j + threadIdx.x % 4 * 2]);
  }
  /// Of tile n of the ring, whose products are under way.
  __device__ void load_key_scales(unsigned n) {
    if constexpr (is_e4m3<C>) load_scales(shared.numbers.k_scale[stage(n)]);
  }
  __device__ void load_value_scales(unsigned n) {
    if constexpr (is_e4m3<C>) {
      wait_barrier(&shared.v_full[stage(n)], parity(n));
      has_odd_scale = shared.numbers.has_odd_scale[stage(n)].any != 0;
      load_scales(shared.numbers.v_scale[stage(n)]);
    }
  }
  /// Scores of tile n of the ring, whose products are done.
  __device__ void take_scores(unsigned n) {
    pin(score);
    if constexpr (is_e4m3<C>) {
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          score[j][e] = __fmul_rn(score[j][e], e % 2 == 0 ? scale[j].x : scale[j].y);
    }
    release(&shared.k_empty[stage(n)]);
  }
  /// A tile's weights, for its values.
  __device__ void pack_weights() {
    if constexpr (is_e4m3<C>) {
      const auto weigh = [&](auto&& scaled) {
#pragma unroll
        for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            weighed[j][e] = scaled(weighed[j][e], e % 2 == 0 ? scale[j].x : scale[j].y);
      };
      if (has_odd_scale)
        weigh([](float weight, float x) { return scaled_weight(weight, x); });
      else  // the same, by fewer instructions
        weigh([](float weight, float x) { return __fmul_rn(weight, x); });
    }
#pragma unroll
    for (int g = 0; g < kTileKeys / 16; ++g) {
      const float(&low)[4] = weighed[2 * g], (&high)[4] = weighed[2 * g + 1];
      weight[g][0] = pack_bf16(low[0], low[1]);
      weight[g][1] = pack_bf16(low[2], low[3]);
      weight[g][2] = pack_bf16(high[0], high[1]);
      weight[g][3] = pack_bf16(high[2], high[3]);
    }
  }
  __device__ void rescale_output() {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[j][e] = __fmul_rn(out[j][e], softmax.factor[e / 2]);
  }
  /// The chunk's weights are complete: how its output goes into the result (merge_output()).
  __device__ void end_chunk() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Merge merge(merged_base[r], merged_sum[r], softmax.base[r], quad_sum(softmax.sum[r]),
                        a.scale_log2);
      merged_base[r] = merge.base;
      merged_sum[r] = merge.sum;
      old_factor[r] = merge.old_factor;
      new_factor[r] = merge.new_factor;
    }
    softmax.start();
  }
  /// The first chunk's output is the result so far as it is: its factor is 1, or it is 0.
  template <bool kLast>
  __device__ void merge_output() {
    float4* merged =
        &shared.merged[threadIdx.x / kConsumerThreads - 1][0][threadIdx.x % kConsumerThreads];
    if (merged_any) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const float4 old = merged[j * kConsumerThreads];
        const float value[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          out[j][e] =
              __fmaf_rn(out[j][e], new_factor[e / 2], __fmul_rn(value[e], old_factor[e / 2]));
      }
    }
    if constexpr (!kLast)
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j)
        merged[j * kConsumerThreads] = {out[j][0], out[j][1], out[j][2], out[j][3]};
    merged_any = true;
  }
  __device__ void start() {
    softmax.start();
    merged_base[0] = merged_base[1] = kMinusInfinity;
    merged_sum[0] = merged_sum[1] = 0.0f;
    merged_any = false;
  }
  /// All tiles of an item: afterwards `out` is the weighted sum, merged_sum the sum of weights.
  __device__ void run(const ItemRows& rows) {
    const float scale_log2 = a.scale_log2;
    start();
    begin_turn();
    begin_scores(at);
    end_turn();
    load_key_scales(at);
    wgmma_wait<0>();
    take_scores(at);
    rows.mask(score, rows.first_tile);
    softmax.add(score, weighed, scale_log2, true);
    load_value_scales(at);
    pack_weights();
    bool accumulate = false;  // the chunk has an output
    bool merge = false;       // there is an output of the chunk before, which is complete
    for (int tile = rows.first_tile + 1; tile < rows.end_tile; ++tile, ++at) {
      begin_turn();
      begin_scores(at + 1);
      if (merge) {
        end_turn();  // merging takes long
        merge_output<false>();
        begin_output(at, accumulate);
      } else {
        begin_output(at, accumulate);
        end_turn();
      }
      const bool chunk_begins = tile % (kChunk / kTileKeys) == 0;
      if (chunk_begins) end_chunk();
      load_key_scales(at + 1);
      wgmma_wait<1>();
      take_scores(at + 1);
      rows.mask(score, tile);
      const bool rescale = softmax.add(score, weighed, scale_log2, chunk_begins);
      // The assembler moves a wait up as far as it can, but not out of a branch: the weights are to
      // be computed while the tensor cores are busy. All warps of the warpgroup take the same one,
      // as waiting asks for.
      pin(weighed);
      load_value_scales(at + 1);
      if (chunk_begins) {
        finish_output();
      } else {
        finish_output();
        if (rescale) rescale_output();
      }
      accumulate = !chunk_begins;
      merge = chunk_begins;
      pack_weights();
    }
    if (merge) merge_output<false>();
    begin_turn();
    begin_output(at, accumulate);
    end_turn();
    end_chunk();
    finish_output();
    ++at;
    merge_output<true>();
  }
  __device__ void store(const PrefillItem& item, const ItemRows& rows) const {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int packed = rows.row[r];
      const int in_sequence = token_of(packed, a.group_reciprocal);
      const int64_t token = item.first_token + in_sequence;
      const int head = (item.kv_head - in_sequence) * a.group + packed;
      __nv_bfloat16* to = a.out + token * a.out_token_stride + head * a.out_head_stride;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; j += 4) {
        uint32_t unit[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          unit[i] = pack_bf16(finish(out[j + i][2 * r], merged_sum[r]),
                              finish(out[j + i][2 * r + 1], merged_sum[r]));
        transpose_quad(unit);
        if (packed < item.rows)
          *reinterpret_cast<uint4*>(to + (j + lane) * 8) = {unit[0], unit[1], unit[2], unit[3]};
      }
    }
  }
};

template <int kHeadDim, class C>
__device__ void compute_items(PrefillShared<kHeadDim, C>& shared, const PrefillArguments& a) {
  Consumer<kHeadDim, C> consumer(shared, a);
  const bool first = threadIdx.x < 2 * kConsumerThreads;  // to begin
  if (!first) consumer.end_turn();
  for (int n = 0;; ++n) {
    const PrefillItem item = take_item(shared, n);
    if (item.sequence < 0) break;
    const ItemRows rows(item, a);
    consumer.load_queries(n);
    consumer.skip(rows.first_tile - item.first_tile);
    if (rows.first_tile < rows.end_tile) {
      consumer.run(rows);
      consumer.store(item, rows);
    } else {
      consumer.skip_turn();
    }
    consumer.skip(item.end_tile - rows.end_tile);
  }
  if (first) consumer.begin_turn();  // the other's last
}

// -- The kernel --

/// The maps are of a cache of bf16.
template <int kHeadDim, class C>
__global__ void __launch_bounds__(kPrefillThreads<C>, 1)
    attention_prefill_kernel(const __grid_constant__ PrefillArguments a,
                             const __grid_constant__ CUtensorMap k_map,
                             const __grid_constant__ CUtensorMap v_map) {
  using Shared = PrefillShared<kHeadDim, C>;
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = kConsumers * kConsumerThreads / kWarp,
                  kFillers = is_e4m3<C> ? kConsumerThreads / kWarp : 1;
    for (int i = 0; i < Shared::kStages; ++i) {
      init_barrier(&shared.k_full[i], kFillers);
      init_barrier(&shared.v_full[i], kFillers);
      init_barrier(&shared.k_empty[i], kConsumerWarps);
      init_barrier(&shared.v_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      init_barrier(&shared.item_full[i], 1);
      init_barrier(&shared.item_empty[i], kPrefillThreads<C> - kWarp);
    }
    init_barrier(&shared.partial, 1);
    init_barrier(&shared.q_full, is_e4m3<C> ? kConsumerThreads : kQueryThreads);
    init_barrier(&shared.q_empty, kConsumerWarps);
    fence_new_barriers();
    if constexpr (!is_e4m3<C>) {
      prefetch_map(&k_map);
      prefetch_map(&v_map);
    }
  }
  __syncthreads();
  wait_for_previous();
  const bool computes = threadIdx.x / kConsumerThreads == 1 || threadIdx.x / kConsumerThreads == 2;
  if (computes) {
    take_registers<is_e4m3<C> ? 216 : 232>();
    compute_items(shared, a);
  } else if constexpr (is_e4m3<C>) {
    leave_registers<40>();
    if (threadIdx.x < kConsumerThreads)
      widen_keys_of_items(shared, a);
    else
      widen_values_of_items(shared, a);
  } else {
    leave_registers<40>();
    if (threadIdx.x < kWarp)
      load_keys_of_items(shared, a, &k_map);
    else if (threadIdx.x < 2 * kWarp)
      load_values_of_items(shared, a, &v_map);
    else
      load_queries_of_items(shared, a);
  }
}

}  // namespace nanovllm
