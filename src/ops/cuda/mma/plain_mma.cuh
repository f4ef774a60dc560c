// Sixteen rows of a plain bf16 weight by some rows of x, on any GPU, as PackedTile has them of a
// packed one: a record is eight rows by 128 columns as they are, and the sums lie alike. Operands
// come from shared memory a part of the chunk before they are multiplied, so that a warp that has
// a quarter of an SM to itself does not wait for them.
#pragma once

#include "ops/cuda/mma/packed_mma.cuh"
#include "ops/cuda/ptx/mbarrier.cuh"

namespace nanovllm {

/// Where 16 bytes of a record lie: ldmatrix finds eight rows in different banks.
__device__ inline int plain_place(int row, int piece) {
  return row * kPlainRowBytes + (piece ^ row % 8) * 16;
}

/// By kTiles eights of rows of x.
template <int kTilesOf>
struct PlainTile {
  static constexpr bool kPlain = true;
  static constexpr int kUnits = 2, kTiles = kTilesOf, kSums = kTiles,
                       kNumberBytes = kPackedRows * kPlainRowBytes,
                       kPitch = mma_panel_pitch(kTiles);
  // A part of a chunk: two steps of k16; with many rows one, for the registers.
  static constexpr int kSteps = kTiles == 8 ? 1 : 2, kParts = kPackedColumns / 16 / kSteps;
  static constexpr int kLoads = kTiles * kSteps / 2;  // of x
  struct Part {
    uint32_t w[kSteps][4], x[kLoads][4];
    /// Eight rows of x, half of a step.
    __device__ uint32_t rows(int j, int step, int half) const {
      const int at = (j * kSteps + step) * 2 + half;
      return x[at / 4][at % 4];
    }
  };
  float sum[kSums][4];
  Part part[2];
  uint32_t weight;  // the lane's place of the chunk

  __device__ PlainTile(int, int) { clear(); }
  __device__ void clear() {
#pragma unroll
    for (auto& c : sum) c[0] = c[1] = c[2] = c[3] = 0.0f;
  }
  /// As PackedTile's.
  __device__ static int row_place(int lane, int rows) {
    const int row = kSteps == 1 ? lane % 8 + lane / 16 * 8 : lane % 8,
              piece = kSteps == 1 ? lane / 8 % 2 : lane / 8;
    return (kTiles == 1 ? min(row, rows - 1) : row) * kPitch + piece * 16;
  }
  __device__ __forceinline__ void load_weight(Part& to, int i) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      load_matrices(to.w[step], weight ^ ((i * kSteps + step) * 32));
  }
  __device__ __forceinline__ void load_rows(Part& to, uint32_t rows, int i) {
#pragma unroll
    for (int g = 0; g < kLoads; ++g)
      load_matrices(to.x[g], rows + g * (kSteps == 1 ? 16 : 8) * kPitch + i * kSteps * 32);
  }
  __device__ __forceinline__ void begin(const unsigned char* records) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    weight = shared_address(records) + plain_place(lane % 16, lane / 16);
    load_weight(part[0], 0);
  }
  __device__ __forceinline__ void begin_panel(uint32_t rows) { load_rows(part[0], rows, 0); }
  template <class Next>
  __device__ __forceinline__ void multiply(uint32_t rows, bool more, Next&& next) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const Part& now = part[i % 2];
      Part& later = part[(i + 1) % 2];
      if (i + 1 < kParts) {
        load_weight(later, i + 1);
        load_rows(later, rows, i + 1);
      } else {
        begin(next());
        if (more) load_rows(later, rows + kPlainRowBytes, 0);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          mma_m16n8k16(sum[j], now.w[step], now.rows(j, step, 0), now.rows(j, step, 1));
    }
  }
};

}  // namespace nanovllm
