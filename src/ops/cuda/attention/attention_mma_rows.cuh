// State of its rows that a warp of attention_mma.cuh keeps from tile to tile.
#pragma once

#include "ops/cuda/attention/attention_mma_load.cuh"

namespace nanovllm {

/// A warp's 16 rows: their running softmax within a chunk, and the result of the chunks before it
/// (its output: Results). Every lane has two of the rows (lane / 4 and 8 below it), index 0 and 1
/// here.
template <int kHeadDim>
struct RowState {
  float out[kHeadDim / 8][4];
  float base[2], sum[2], merged_base[2], merged_sum[2];
  bool merged_any;

  __device__ void start_chunk() {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[j][e] = 0.0f;
    base[0] = base[1] = kMinusInfinity;
    sum[0] = sum[1] = 0.0f;
  }
  __device__ void start() {
    start_chunk();
    merged_base[0] = merged_base[1] = kMinusInfinity;
    merged_sum[0] = merged_sum[1] = 0.0f;
    merged_any = false;
  }
  __device__ void finish_chunk() {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = quad_sum(sum[r]);
  }
  /// out becomes the result so far, which the first chunk's output is as it is: its factor is 1, or
  /// it is 0. `results`: those before.
  template <class Results>
  __device__ void merge_chunk(const Results& results, float scale_log2) {
    float old_factor[2], new_factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Merge merge(merged_base[r], merged_sum[r], base[r], sum[r], scale_log2);
      merged_base[r] = merge.base;
      merged_sum[r] = merge.sum;
      old_factor[r] = merge.old_factor;
      new_factor[r] = merge.new_factor;
    }
    if (merged_any) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const float4 old = results.get(j);
        const float value[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          out[j][e] =
              __fmaf_rn(out[j][e], new_factor[e / 2], __fmul_rn(value[e], old_factor[e / 2]));
      }
    }
    merged_any = true;
  }
  /// Keeps what merge_chunk() made.
  template <class Results>
  __device__ void keep_merged(Results& results) const {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
      results.set(j, {out[j][0], out[j][1], out[j][2], out[j][3]});
  }
};

/// A lane's part of the result of earlier chunks: in shared memory, or in registers.
template <int kHeadDim, bool kShared = AttentionRows<kHeadDim>::kKeepsQueries>
struct Results {
  float4* place;
  __device__ float4 get(int j) const { return place[j * kWarp]; }
  __device__ void set(int j, const float4& value) { place[j * kWarp] = value; }
};
template <int kHeadDim>
struct Results<kHeadDim, false> {
  float4 values[kHeadDim / 8];
  __device__ explicit Results(float4*) {}
  __device__ float4 get(int j) const { return values[j]; }
  __device__ void set(int j, const float4& value) { values[j] = value; }
};

/// A warp's queries as mma's first operand, 16 elements at a time: kept in registers, or loaded
/// again for each tile of keys.
template <int kHeadDim, class C>
struct Queries {
  static constexpr bool kKeeps = AttentionRows<kHeadDim>::kKeepsQueries;
  static constexpr int kSteps = kKeeps ? kHeadDim / 16 : 1;
  AttentionTile<kHeadDim, C>& tile;
  int row;  // the warp's first
  uint32_t kept[kSteps][4];
  __device__ Queries(AttentionTile<kHeadDim, C>& of, int warp_row) : tile(of), row(warp_row) {}
  __device__ __forceinline__ void load(uint32_t (&q)[4], int step) const {
    const int lane = threadIdx.x % kWarp;
    if constexpr (is_e4m3<C>)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        in_widened_order(*reinterpret_cast<const uint2*>(tile.query(row + lane / 4 + 8 * r) +
                                                         step * 16 + lane % 4 * 4),
                         q[r], q[2 + r]);
    else
      load_matrices(q, tile.query(row + lane % 16) + step * 16 + lane / 16 * 8);
  }
  /// When they are there, and before results are.
  __device__ __forceinline__ void keep() {
    if constexpr (kKeeps) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) load(kept[i], i);
      __syncwarp();
    }
  }
  __device__ __forceinline__ void get(uint32_t (&q)[4], int step) const {
    if constexpr (kKeeps)
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = kept[step][i];
    else
      load(q, step);
  }
};

}  // namespace nanovllm
