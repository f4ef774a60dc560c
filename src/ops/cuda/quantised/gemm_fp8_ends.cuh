// The ends of gemm_fp8.cuh's tiles: scales of whole rows, the gate, and the way to y.
#pragma once

#include "ops/cuda/comm/sent_parts.cuh"
#include "ops/cuda/gemm/gated.cuh"
#include "ops/cuda/gemm/gemm_pieces.cuh"
#include "ops/cuda/moe/moe.cuh"
#include "ops/cuda/quantised/fp8_kernels.h"
#include "ops/cuda/quantised/half_results.cuh"

namespace nanovllm {

struct Fp8Shape {
  int rows, columns;  // of y
  int copied_rows;    // that x has room for: as many, in eights
  int64_t stride;     // of y's rows
  int height;         // rows of w of a tile: eights of gate and up in turn, where gated
  int row_blocks;     // that cover all rows
  int block_rows;     // of x that a block copies: a multiple of 8
  int rows_together;  // blocks of rows that run side by side
  int items;          // tiles, or pairs of them
  int halves = 1;     // of k that a block has, one after the other: 1 or 2
  int blocks;         // of 128 along k, or a half of it
  int steps, stages;  // stages that cover those; of the ring
  int stage_bytes;
  bool is_f32, is_whole;  // y; whether its rows are made of pieces of 16 bytes that bf16 fills
  // Grouped: the places, whose tiles the items are (`items`: of each, along the weight's rows), and
  // the way from an expert's weight to the next one's, in blocks of k.
  ExpertPlan plan;
  int64_t expert_blocks;
  SentParts sent;  // where there are rounds of it, results go there for y
  __device__ bool sends() const { return sent.round != nullptr; }
};

/// Scales of whole rows; not for blocks.
struct Fp8RowScales {
  const float *w, *x;
};

/// Where a tile lies.
struct Fp8Place {
  int row, own;  // the first row that is copied; the first that is not another block's as well
  int end;       // of the rows that are the block's
  int tile;      // of columns
  int expert = 0;
  __device__ Fp8Place(const Fp8Shape& shape, int item) : tile(item % shape.items) {
    const ExpertTile at = tile_at(shape.plan, item / shape.items);
    row = own = at.first;
    end = at.first + at.rows;
    expert = at.expert;
  }
  __device__ Fp8Place(const Fp8Shape& shape, int item, int cluster, int rank) {
    const int columns = shape.items / shape.row_blocks, in_group = shape.rows_together * columns,
              group = item / in_group, first = group * shape.rows_together,
              high = min(shape.rows_together, shape.row_blocks - first), rest = item % in_group;
    own = (first + rest % high) * shape.block_rows;
    row = max(min(own, shape.copied_rows - shape.block_rows), 0);
    end = shape.rows;
    tile = rest / high * cluster + rank;
  }
};

/// Matrices of 8 x 8 bf16 to shared memory, transposed: lane l gives the address of a row of matrix
/// l / 8.
__device__ inline void store_two_transposed(void* row, uint32_t first, uint32_t second) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
      "r"(first), "r"(second)
      : "memory");
}
__device__ inline void store_transposed(void* row, uint32_t matrix) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared_address(row)),
      "r"(matrix)
      : "memory");
}

/// Where a lane's sum i lies in y, counted from the tile's first row and column; of up, where gated
/// and `part` is 1.
template <Fp8Tile tile>
struct Fp8Element {
  int row, column, part;
  __device__ Fp8Element(int i, int group, int warp) {
    const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4, j = i / 4, half = i / 2 % 2;
    if constexpr (tile.has_rows_first()) {
      row = kFp8Height * group + 16 * warp + 8 * half + g;
      column = 8 * (j / tile.parts()) + 2 * t + i % 2;
      part = j % tile.parts();
    } else {
      row = 8 * j + 2 * t + i % 2;
      column = 16 / tile.parts() * warp + (tile.gated ? 0 : 8 * half) + g;
      part = tile.gated ? half : 0;
    }
  }
};

/// The scales of whole rows: sum * (row of x * row of w).
template <Fp8Tile tile>
__device__ void fp8_scale(float (&sum)[tile.sums()], const Fp8Shape& shape,
                          const Fp8RowScales& scales, const Fp8Place& place, int group, int warp) {
  const int first = place.tile * (shape.height / tile.parts());
  const float* const of_w =
      scales.w + (tile.grouped ? place.expert * shape.expert_blocks * (kFp8Block / 4) : 0);
#pragma unroll
  for (int i = 0; i < tile.sums(); ++i) {
    const Fp8Element<tile> at(i, group, warp);
    const int column = min(first + at.column, shape.columns - 1);
    sum[i] *=
        scales.x[min(place.row + at.row, shape.rows - 1)] * of_w[at.part * shape.columns + column];
  }
}

/// `is_second_half`: y has the first one's.
__device__ inline void store_piece(__nv_bfloat16* y, uint4 piece, bool is_second_half) {
  auto* const to = reinterpret_cast<uint4*>(y);
  if (is_second_half) {
    const uint4 first = *to;
    piece = {pair_of_halves(first.x, piece.x), pair_of_halves(first.y, piece.y),
             pair_of_halves(first.z, piece.z), pair_of_halves(first.w, piece.w)};
  }
  *to = piece;
}

/// Results of f32, or of rows that begin anywhere.
template <Fp8Tile tile, class Y>
__device__ void fp8_store_each(Y* y, const Fp8Shape& shape, const Fp8Place& place,
                               const float (&sum)[tile.sums()], int group, int warp,
                               bool is_second_half) {
  const int first = place.tile * shape.height;
#pragma unroll
  for (int i = 0; i < tile.sums(); ++i) {
    const Fp8Element<tile> at(i, group, warp);
    const int row = place.row + at.row, column = first + at.column;
    if (at.column < shape.height && column < shape.columns && at.row < shape.block_rows &&
        row >= place.own && row < shape.rows)
      store_half(y + row * shape.stride + column, sum[i], is_second_half);
  }
}

/// Results of few rows are transposed in shared memory.
template <Fp8Tile tile>
__device__ void fp8_store_few(__nv_bfloat16* y, const Fp8Shape& shape, const Fp8Place& place,
                              const float (&sum)[tile.sums()], unsigned char* results, int warp,
                              bool is_second_half) {
  constexpr int kPitch = tile.pitch();
  const int lane = threadIdx.x % kWarp, thread = threadIdx.x % kGroupThreads;
  sync_threads<1, kGroupThreads>();  // the tile before is stored
#pragma unroll
  for (int j = 0; j < tile.rows / 8; ++j) {
    unsigned char* const row = results + (8 * j + lane % 8) * kPitch;
    const uint32_t first = pack_bf16(sum[4 * j], sum[4 * j + 1]),
                   second = pack_bf16(sum[4 * j + 2], sum[4 * j + 3]);
    if constexpr (tile.gated)
      store_transposed(row + warp * 16,
                       pack_bf16(silu_times_straight(low_of(first), low_of(second)),
                                 silu_times_straight(high_of(first), high_of(second))));
    else
      store_two_transposed(row + warp * 32 + lane / 8 % 2 * 16, first, second);
  }
  sync_threads<1, kGroupThreads>();
  constexpr int kUnits = kFp8Height / kFp8Unit / tile.parts();
  const int height = shape.height / tile.parts(), unit = thread % kUnits * kFp8Unit,
            column = place.tile * height + unit;
  if (unit >= height || column >= shape.columns) return;
  const int end = min(shape.block_rows, place.end - place.row);
  for (int row = thread / kUnits + place.own - place.row; row < end; row += kGroupThreads / kUnits)
    store_piece(y + (place.row + row) * shape.stride + column,
                *reinterpret_cast<const uint4*>(results + row * kPitch + unit * 2), is_second_half);
}

/// Results of many rows leave registers as pieces of rows, for put(row, column, piece).
template <Fp8Tile tile, class Put>
__device__ void fp8_put_many(const Fp8Shape& shape, const Fp8Place& place,
                             float (&sum)[tile.sums()], int group, int warp, const Put& put) {
  constexpr int kColumns = 2 * tile.sums() / tile.parts();
  float result[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    if constexpr (tile.gated) {
      const uint32_t pair = pack_bf16(sum[i / 4 * 8 + i % 4], sum[i / 4 * 8 + 4 + i % 4]);
      result[i] = silu_times_straight(low_of(pair), high_of(pair));
    } else {
      result[i] = sum[i];
    }
  }
  const int first = kFp8Height * group + 16 * warp + threadIdx.x % kWarp / 4,
            height = shape.height / tile.parts();
  for_pieces<kColumns>(result, [&](int half, int in_tile, const uint4& piece) {
    const int own = first + half, row = place.row + own, column = place.tile * height + in_tile;
    if (own < shape.block_rows && row >= place.own && row < place.end && in_tile < height &&
        column < shape.columns)
      put(row, column, piece);
  });
}
template <Fp8Tile tile>
__device__ void fp8_store_many(__nv_bfloat16* y, const Fp8Shape& shape, const Fp8Place& place,
                               float (&sum)[tile.sums()], int group, int warp,
                               bool is_second_half) {
  fp8_put_many<tile>(shape, place, sum, group, warp, [&](int row, int column, const uint4& piece) {
    store_piece(y + row * shape.stride + column, piece, is_second_half);
  });
}
template <Fp8Tile tile>
__device__ void fp8_send_many(const Fp8Shape& shape, const Fp8Place& place,
                              float (&sum)[tile.sums()], int group, int warp) {
  const PartSender sender(shape.sent, place.tile * shape.height);
  fp8_put_many<tile>(shape, place, sum, group, warp, [&](int row, int column, const uint4& piece) {
    sender.send(row, column, piece);
  });
}

}  // namespace nanovllm
