// A lane's part of its warp's 16 rows in the prefill kernel of Hopper (attention_prefill.cuh):
// the keys that they see, and their softmax.
#pragma once

#include "ops/cuda/attention/attention_prefill_load.cuh"

namespace nanovllm {

/// A lane's part of two rows (lane / 4 and 8 below it) of its warp's 16.
struct ItemRows {
  int row[2], begin[2], end[2];  // rows count from the sequence's first; keys begin .. end - 1
  int warp_begin, warp_end;      // keys that all 16 rows see
  int first_tile, end_tile;      // of the warpgroup's rows

  __device__ ItemRows(const PrefillItem& item, const PrefillArguments& a) {
    const int warp = uniform(static_cast<int>(threadIdx.x / kWarp)) - 4,
              first = item.first_row + warp / 4 * kConsumerRows,
              warp_first = item.first_row + warp * 16;
    // A row past the end repeats the last.
    const auto position = [&](int packed) {
      return item.first_position + token_of(min(packed, item.rows - 1), a.group_reciprocal);
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r] = warp_first + static_cast<int>(threadIdx.x % kWarp) / 4 + 8 * r;
      end[r] = position(row[r]) + 1;
      begin[r] = first_key(end[r] - 1, a.window);
    }
    warp_begin = first_key(position(warp_first + 15), a.window);
    warp_end = position(warp_first) + 1;
    first_tile = first_key(position(first), a.window) / kTileKeys;
    end_tile = position(first + kConsumerRows - 1) / kTileKeys + 1;
    if (first >= item.rows) first_tile = end_tile = item.end_tile;
  }
  /// Masks the keys of tile `tile` that a row does not see.
  __device__ void mask(float (&score)[kTileKeys / 8][4], int tile) const {
    const int first = tile * kTileKeys;
    if (first >= warp_begin && first + kTileKeys <= warp_end) return;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first + 8 * j + static_cast<int>(threadIdx.x % 4) * 2 + e % 2;
        if (key < begin[e / 2] || key >= end[e / 2]) score[j][e] = kMinusInfinity;
      }
  }
};

/// Weights below this are not of scores that move the base: half of 2 to the power of kBaseSlack.
constexpr float kLeastMoving = 0x1p7f;
static_assert(kBaseSlack == 8.0f);

/// How many tiles a warp looks for maxima in after one that moved a base.
constexpr int kWaryTiles = 16;

/// The running softmax of a lane's two rows within a chunk.
///
/// Where scores lie close together few tiles move a base, and the sum of a tile's weights, needed
/// anyway, says whether this one may: if it does not, the scores need no maximum. If it does, they
/// are weighed again, which costs more than maxima would have. So a warp whose bases have moved
/// looks for maxima first, for a while. Both ways give the same bits.
struct ChunkSoftmax {
  float base[2], sum[2], factor[2];
  float most[2];  // a sum of a lane's weights below this says that its scores do not move the base
  int wary = 0;   // so many tiles more look for maxima first; the same in all lanes of a warp

  __device__ void start() {
    base[0] = base[1] = kMinusInfinity;
    sum[0] = sum[1] = 0.0f;
  }
  /// The weights of a tile's scores; `fresh`: of a chunk's first tile. Whether a row's results so
  /// far must be multiplied with `factor`.
  __device__ bool add(const float (&score)[kTileKeys / 8][4], float (&weight)[kTileKeys / 8][4],
                      float scale_log2, bool fresh) {
    float tile[2];
    if (!fresh && wary == 0) {
      weigh(score, weight, tile, scale_log2);
      if (!__any_sync(kFullMask, !(tile[0] < most[0] && tile[1] < most[1]))) {
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = __fadd_rn(sum[r], tile[r]);
        return false;
      }
    }
    move(score, scale_log2);
    weigh(score, weight, tile, scale_log2);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = __fmaf_rn(sum[r], factor[r], tile[r]);
    if (fresh) return true;
    const bool moved = __any_sync(kFullMask, factor[0] != 1.0f || factor[1] != 1.0f);
    wary = moved ? kWaryTiles : max(wary - 1, 0);
    return moved;
  }

 private:
  /// Bases and factors for these scores.
  __device__ void move(const float (&score)[kTileKeys / 8][4], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = score[0][2 * r], odd = score[0][2 * r + 1];
#pragma unroll
      for (int j = 1; j < kTileKeys / 8; ++j) {
        even = fmaxf(even, score[j][2 * r]);
        odd = fmaxf(odd, score[j][2 * r + 1]);
      }
      base[r] = next_base(base[r], quad_max(fmaxf(even, odd)), scale_log2, factor[r]);
      // A weight is not above the sum, and its exponent is what base_moves() compares but for
      // rounding, which is far below one unless the base is huge.
      most[r] = fabsf(base[r] * scale_log2) < 0x1p20f ? kLeastMoving : -1.0f;
    }
  }
  /// Weights, and their sums in a lane.
  __device__ void weigh(const float (&score)[kTileKeys / 8][4], float (&weight)[kTileKeys / 8][4],
                        float (&tile)[2], float scale_log2) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float common = finite_or_zero(base[r]);
      float group[4];
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        float(&low)[4] = weight[2 * g], (&high)[4] = weight[2 * g + 1];
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          low[e] = weight_of(score[2 * g][e], common, scale_log2);
          high[e] = weight_of(score[2 * g + 1][e], common, scale_log2);
        }
        group[g] = group_sum(low[2 * r], low[2 * r + 1], high[2 * r], high[2 * r + 1]);
      }
      tile[r] = tile_sum(group[0], group[1], group[2], group[3]);
    }
  }
};

}  // namespace nanovllm
