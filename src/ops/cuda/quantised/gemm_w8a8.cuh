// y[m, n] = x[m, k] w[n, k]^T of 8-bit numbers with scales, by mma.sync m16n8k32, for any number of
// rows: integers on every GPU, E4M3 on those from sm_89 on that gemm_fp8.cuh has no code for.
//
// Sums of integers are exact, in whatever order. E4M3: the sum over a block of 128 of k is four
// steps from zero, and sums of blocks are added in f32, in ascending order of k; so tiles of any
// shape give the same bits. The weight's rows are the 16 of the tensor cores' operand, eights of
// gate and up in turn where gated, those of x its 8 columns.
//
// All warps of a block copy the next stages and multiply the oldest. A row of 128 bytes in shared
// memory has its pieces of 16 in an order of its own, so that eight rows lie in different banks.
//
// Of experts, the rows of x are places (moe.cuh), and a tile has those of a tile of their plan.
#pragma once

#include "ops/cuda/gemm/gated.cuh"
#include "ops/cuda/moe/moe.cuh"
#include "ops/cuda/ptx/mma_bytes.cuh"
#include "ops/cuda/quantised/fp8_kernels.h"
#include "ops/cuda/quantised/half_results.cuh"
#include "ops/cuda/quantised/w8a8_copies.cuh"

namespace nanovllm::w8a8 {

struct Shape {
  int rows, columns;             // of y
  int64_t stride;                // of y's rows
  int k, blocks;                 // of 128 along k, or along a half of it
  int halves;                    // of k, one after the other: 1 or 2 (WeightFormat::in_halves)
  int column_tiles;              // that cover all columns
  int row_tiles, items;          // that cover all rows; tiles of y
  int stages;                    // of the ring
  int scale_stride, units;       // of blocks: from a block's scales of x to the next one's; of w
  bool gated, is_f32, is_whole;  // y; whether its rows are made of pieces of 16 bytes
  ExpertPlan plan;               // of experts
  int64_t expert_bytes;          // from an expert's weight to the next one's
};

/// `of_w`: of each row, or [blocks, units] for eights of rows; `of_x`: of each row, or [blocks, m].
struct Scales {
  const float *of_w, *of_x;
};

/// `of_x`: in the memory of the rows.
inline Scales scales_of(const Weight& w, const std::byte* of_x) {
  const std::byte* const of_w = w.data.data + Fp8Layout(w.format, w.n(), w.k()).scales();
  return {reinterpret_cast<const float*>(of_w), reinterpret_cast<const float*>(of_x)};
}

/// A product of so many rows, as its operands decide it: tiles and the ring are the launch's.
inline Shape shape_of(const Tensor& y, const Weight& w, int64_t rows, bool gated) {
  Shape shape{};
  shape.rows = static_cast<int>(rows);
  shape.columns = static_cast<int>(y.shape[1]);
  shape.stride = y.stride[0];
  shape.k = static_cast<int>(w.k());
  shape.halves = w.format.in_halves ? 2 : 1;
  shape.blocks = static_cast<int>(w.k() / kByteBlock) / shape.halves;
  shape.scale_stride = static_cast<int>(rows_with_room(rows));
  shape.units = static_cast<int>(Fp8Layout(w.format, w.n(), w.k()).units());
  shape.gated = gated;
  return shape;
}

constexpr int kRowTilesTogether = 8;  // run side by side, so that a weight is read once

/// Where a tile lies: the rows of x [first, end), or the first of these; tiles of columns before
/// it.
struct Place {
  int first, end, column, expert = 0;
  /// A tile of `rows` rows.
  __device__ Place(const Shape& shape, int item, int rows) : end(shape.rows) {
    const int in_group = kRowTilesTogether * shape.column_tiles, group = item / in_group,
              first_tile = group * kRowTilesTogether,
              high = min(kRowTilesTogether, shape.row_tiles - first_tile), rest = item % in_group;
    first = (first_tile + rest % high) * rows;
    column = rest / high;
  }
  /// Of experts.
  __device__ Place(const Shape& shape, int item) : column(item % shape.column_tiles) {
    const ExpertTile tile = tile_at(shape.plan, item / shape.column_tiles);
    first = tile.first;
    end = tile.first + tile.rows;
    expert = tile.expert;
  }
};

/// A warp's part of a tile.
template <int kTile, WeightFormat::Numbers numbers, bool kBlocks, bool kGrouped>
struct Part {
  static constexpr W8a8Tile tile = kW8a8Tiles[kTile];
  static constexpr int kUnits = tile.units(), kEights = tile.eights();
  static constexpr bool is_int8 = numbers == WeightFormat::int8;
  using Number = std::conditional_t<is_int8, int, float>;
  using Sums = Number[kUnits][kEights][4];
  /// Integers: a chain of sums for each block of a stage, none of which waits for another.
  static constexpr int kChains = is_int8 ? tile.depth : 1;

  const Shape& shape;
  const Scales& scales;
  int lane, unit0, row0;  // the first 16 of the tile's rows of w; the first row of x in it
  uint32_t w, x;          // the lane's rows in a block
  Sums sum[kChains];

  __device__ Part(const Shape& of, const Scales& by) : shape(of), scales(by) {
    lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    unit0 = warp % tile.warps * kUnits;
    row0 = warp / tile.warps * kEights * 8;
    const auto turn = static_cast<uint32_t>(lane % 8);
    w = (unit0 * 16 + lane % 16) * kByteBlock + ((lane / 16 ^ turn) << 4);
    x = (tile.columns + row0 + lane % 8) * kByteBlock + ((lane / 8 ^ turn) << 4);
  }
  __device__ void clear() {
#pragma unroll
    for (auto& chain : sum)
#pragma unroll
      for (auto& unit : chain)
#pragma unroll
        for (auto& c : unit) c[0] = c[1] = c[2] = c[3] = 0;
  }
  /// The first row of w of half of a unit of the tile in `place`.
  __device__ int row_of_w(const Place& place, int u, int half) const {
    const int unit = unit0 + u;
    return shape.gated ? half * shape.columns + (place.column * (tile.columns / 16) + unit) * 8
                       : place.column * tile.columns + unit * 16 + half * 8;
  }
  /// The column of y that is there.
  __device__ int column_of(const Place& place, int u, int half) const {
    return row_of_w(place, u, shape.gated ? 0 : half);
  }
  /// The lane's first row of x, of two, of an eight of the tile.
  __device__ int row_of_x(const Place& place, int j) const {
    return place.first + row0 + 8 * j + lane % 4 * 2;
  }
  /// The scales of the weight in that place.
  __device__ const float* scales_of_w(const Place& place) const {
    return kGrouped ? scales.of_w + place.expert * (shape.expert_bytes / sizeof(float))
                    : scales.of_w;
  }
  /// The scales of rows `row` and the next one, or of the last one: `end` are there, in eights.
  __device__ float2 scales_of_x(const float* from, int row, int end) const {
    if (!kGrouped) return *reinterpret_cast<const float2*>(from + min(row, end - 2));
    return {from[min(row, end - 1)], from[min(row + 1, end - 1)]};
  }

  /// c += the products of a block of k, which lies at `block` in shared memory.
  __device__ __forceinline__ void multiply(Sums& c, uint32_t block) const {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t b[kEights][4];
#pragma unroll
      for (int j = 0; j < kEights; ++j)
        load_byte_rows(b[j], ((block + x) ^ (half << 6)) + j * 8 * kByteBlock);
#pragma unroll
      for (uint32_t step = 0; step < 2; ++step)
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          uint32_t a[4];
          load_byte_rows(a, ((block + w) ^ (half << 6 | step << 5)) + u * 16 * kByteBlock);
#pragma unroll
          for (int j = 0; j < kEights; ++j)
            mma_m16n8k32(c[u][j], a, b[j][2 * step], b[j][2 * step + 1]);
        }
    }
  }
  /// Adds block `at` of k to the sums.
  template <int chain>
  __device__ __forceinline__ void add(const Place& place, uint32_t block, int at) {
    if constexpr (is_int8) {
      multiply(sum[chain % kChains], block);
    } else {
      float of_w[kUnits][2];
      float2 of_x[kEights];
      if constexpr (kBlocks) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            of_w[u][half] = scales_of_w(
                place)[at * shape.units + min(row_of_w(place, u, half) / 8, shape.units - 1)];
#pragma unroll
        for (int j = 0; j < kEights; ++j)
          of_x[j] = scales_of_x(scales.of_x + int64_t{at} * shape.scale_stride, row_of_x(place, j),
                                shape.scale_stride);
      }
      Sums part{};
      multiply(part, block);
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int j = 0; j < kEights; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& s = sum[0][u][j][i];
            if constexpr (kBlocks)
              s = fmaf(part[u][j][i], (i % 2 ? of_x[j].y : of_x[j].x) * of_w[u][i / 2], s);
            else
              s += part[u][j][i];
          }
    }
  }

  /// The sums with scales of whole rows.
  __device__ __forceinline__ void scale(const Place& place, float (&y)[kUnits][kEights][4]) const {
    float2 of_x[kEights];
#pragma unroll
    for (int j = 0; !kBlocks && j < kEights; ++j) {
      const int row = row_of_x(place, j), last = place.end - 1;
      of_x[j] = {scales.of_x[min(row, last)], scales.of_x[min(row + 1, last)]};
    }
    const int last = shape.columns * (shape.gated ? 2 : 1) - 1;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float of_w =
            kBlocks ? 1.0f : scales_of_w(place)[min(row_of_w(place, u, half) + lane / 4, last)];
#pragma unroll
        for (int j = 0; j < kEights; ++j)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            Number all = sum[0][u][j][i];
#pragma unroll
            for (int c = 1; c < kChains; ++c) all += sum[c][u][j][i];
            y[u][j][i] = static_cast<float>(all);
            if constexpr (!kBlocks) y[u][j][i] *= (i % 2 ? of_x[j].y : of_x[j].x) * of_w;
          }
      }
  }

  /// Results one by one: of f32, or of rows that begin anywhere. (Not gated.)
  template <class Y>
  __device__ void store_each(Y* y, const Place& place, const float (&result)[kUnits][kEights][4],
                             bool is_second_half) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int j = 0; j < kEights; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = row_of_x(place, j) + i % 2,
                    column = column_of(place, u, i / 2) + lane / 4;
          if (row < place.end && column < shape.columns)
            store_half(y + row * shape.stride + column, result[u][j][i], is_second_half);
        }
  }

  /// Of an eight of rows of x: v[b], pairs of y's columns 8 b and on, from column0 on.
  template <int kCount>
  __device__ __forceinline__ void store_row(__nv_bfloat16* y, int row, int end, int column0,
                                            uint32_t (&v)[kCount], bool is_second_half) const {
    constexpr int kAtOnce = kCount % 4 == 0 ? 4 : kCount;
    struct alignas(4 * kAtOnce) Piece {
      uint32_t pair[kAtOnce];
    };
    const int t = lane % 4;
    y += row * shape.stride;
#pragma unroll
    for (int first = 0; first < kCount; first += kAtOnce) {
      uint32_t some[kAtOnce];
#pragma unroll
      for (int b = 0; b < kAtOnce; ++b) some[b] = v[first + b];
      if constexpr (kAtOnce > 1) transpose_quad(some);
      const int column = column0 + 8 * first +
                         (kAtOnce == 4   ? 8 * t
                          : kAtOnce == 2 ? t % 2 * 8 + t / 2 * 4
                                         : 2 * t);
      if (row < end && column < shape.columns) {
        auto* const to = reinterpret_cast<Piece*>(y + column);
        Piece piece{};
        if (is_second_half) piece = *to;
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b)
          piece.pair[b] = is_second_half ? pair_of_halves(piece.pair[b], some[b]) : some[b];
        *to = piece;
      }
    }
  }
  template <bool kGated>
  __device__ void store(__nv_bfloat16* y, const Place& place,
                        const float (&result)[kUnits][kEights][4], bool is_second_half) const {
    constexpr int kOfUnit = kGated ? 1 : 2;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      uint32_t v[kUnits * kOfUnit];
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const float(&c)[4] = result[u][j];
        const uint32_t first = pack_bf16(c[0], c[1]), second = pack_bf16(c[2], c[3]);
        if constexpr (kGated) {
          v[u] = transposed(pack_bf16(silu_times_straight(low_of(first), low_of(second)),
                                      silu_times_straight(high_of(first), high_of(second))));
        } else {
          v[2 * u] = transposed(first);
          v[2 * u + 1] = transposed(second);
        }
      }
      store_row(y, place.first + row0 + 8 * j + lane / 4, place.end, column_of(place, 0, 0), v,
                is_second_half);
    }
  }
  /// `is_second_half`: y has the first half's.
  __device__ void finish(void* y, const Place& place, bool is_second_half) const {
    float result[kUnits][kEights][4];
    scale(place, result);
    auto* const y_bf16 = static_cast<__nv_bfloat16*>(y);
    if (shape.gated)
      store<true>(y_bf16, place, result, false);
    else if (shape.is_f32)
      store_each(static_cast<float*>(y), place, result, is_second_half);
    else if (!shape.is_whole)
      store_each(y_bf16, place, result, is_second_half);
    else
      store<false>(y_bf16, place, result, is_second_half);
  }
};

template <int kTile, WeightFormat::Numbers numbers, bool kBlocks, bool kGrouped = false>
__global__ void __launch_bounds__(kW8a8Tiles[kTile].threads(), 1)
    gemm_w8a8_kernel(void* y, const uint8_t* w, const uint8_t* x, const Scales scales,
                     const __grid_constant__ Shape shape) {
  constexpr W8a8Tile tile = kW8a8Tiles[kTile];
  extern __shared__ __align__(1024) unsigned char shared[];
  using FromW = Copies<tile.columns, tile.threads()>;
  using FromX = Copies<tile.rows, std::min(tile.threads(), 8 * tile.rows)>;
  const int row = static_cast<int>(threadIdx.x) / 8,
            of_half = (shape.blocks + tile.depth - 1) / tile.depth, steps = shape.halves * of_half;
  const int64_t k = shape.k;
  Part<kTile, numbers, kBlocks, kGrouped> part(shape, scales);
  part.clear();
  if constexpr (kGrouped) wait_for_previous();  // with which the plan is there
  const int items = kGrouped ? num_tiles(shape.plan) * shape.column_tiles : shape.items;
  bool is_first = true;
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const Place place = [&] {
      if constexpr (kGrouped)
        return Place(shape, item);
      else
        return Place(shape, item, tile.rows);
    }();
    // Of rows of w that lie FromW::kStep apart in the tile: gated, eights of gate and up in turn.
    const int64_t up = shape.columns * k;
    const int first_w = shape.gated ? place.column * (tile.columns / 2) + row / 16 * 8 + row % 8
                                    : place.column * tile.columns + row,
              step_w = !shape.gated        ? FromW::kStep
                       : FromW::kStep == 8 ? 8
                                           : FromW::kStep / 2;
    const bool alternates = shape.gated && FromW::kStep == 8;
    const FromW from_w(
        w + place.expert * shape.expert_bytes + first_w * k + (shape.gated && row / 8 % 2 ? up : 0),
        alternates ? up : step_w * k, (alternates ? 8 : 2 * step_w) * k,
        rows_before(shape.columns, first_w, step_w) * (alternates ? 2 : 1));
    const int first_x = place.first + row;
    const FromX from_x(x + first_x * k, FromX::kStep * k, 2 * FromX::kStep * k,
                       rows_before(place.end, first_x, FromX::kStep));
    // The blocks of k of a step: the first one, and the end of its half.
    const auto first_of = [&](int step) {
      return step * tile.depth - (step >= of_half ? of_half * tile.depth - shape.blocks : 0);
    };
    const auto end_of = [&](int step) {
      return step < of_half ? shape.blocks : shape.halves * shape.blocks;
    };
    const auto copy_w = [&](int step, int slot) {
#pragma unroll
      for (int d = 0; d < tile.depth; ++d)
        from_w.issue(shared + slot * tile.stage_bytes() + d * tile.block_bytes(),
                     first_of(step) + d, end_of(step));
    };
    const auto copy_x = [&](int step, int slot) {
      if (row < tile.rows)
#pragma unroll
        for (int d = 0; d < tile.depth; ++d)
          from_x.issue(shared + slot * tile.stage_bytes() + d * tile.block_bytes() +
                           tile.columns * kByteBlock,
                       first_of(step) + d, end_of(step));
      commit_copies();
    };
    wait_copies<0>();
    __syncthreads();  // the tile before has been read
    for (int step = 0; step + 1 < shape.stages; ++step) copy_w(step, step);
    if (is_first) wait_for_previous(), let_next_start();
    is_first = false;
    for (int step = 0; step + 1 < shape.stages; ++step) copy_x(step, step);
    int oldest = 0, free = shape.stages - 1;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_stage(shape.stages);
      __syncthreads();
      copy_w(step + shape.stages - 1, free);
      copy_x(step + shape.stages - 1, free);
      const uint32_t stage = shared_address(shared) + oldest * tile.stage_bytes();
      [&]<int... d>(std::integer_sequence<int, d...>) {
        ((!kBlocks || d == 0 || first_of(step) + d < end_of(step)
              ? part.template add<d>(place, stage + d * tile.block_bytes(), first_of(step) + d)
              : void()),
         ...);
      }
      (std::make_integer_sequence<int, tile.depth>());
      free = oldest;
      if (++oldest == shape.stages) oldest = 0;
      if (step + 1 != of_half && step + 1 != steps) continue;
      part.finish(y, place, step >= of_half);
      part.clear();
    }
  }
}

}  // namespace nanovllm::w8a8
