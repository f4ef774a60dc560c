// The products of a mixture of experts whose weights are packed (packed.h), on any GPU: every tile
// of places with its expert's weight, which becomes bf16 in registers. One chain of mma m16n8k16
// steps over k per output: the bits of expert_gemm_kernel() with the numbers that the weight stands
// for.
//
// Floor: the chosen experts' stored bytes over the memory's bandwidth where tokens are few, the
// tensor cores where they are many; and for 16 rows by 16 columns about 20 instructions of
// unpacking, 4 bits, in the time of four or more steps of the tensor cores. A unit of work is some
// rows of an expert's weight by one tile; its stages are records as they are stored, 128 columns
// wide, and as many columns of the tokens. Each warp multiplies its own rows by all tokens, so that
// no number is unpacked twice; an operand has eight rows of the weight and eight others, a gate's
// and its up's where they are wanted.
#pragma once

#include <type_traits>

#include "ops/cuda/moe/moe_gemm.cuh"
#include "ops/cuda/quantised/packed.cuh"

namespace nanovllm {

/// How a block is cut: kMi operands of 16 rows of the weight for each of kWarps, by kNi eights of
/// tokens.
template <int kMi_, int kNi_, int kWarps_, int kBlocks_>
struct PackedExpertShape {
  static constexpr int kMi = kMi_, kNi = kNi_, kWarps = kWarps_, kBlocksPerSm = kBlocks_;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kTokens = 8 * kNi, kEights = 2 * kMi * kWarps;  // of a unit
  static constexpr int kHalfBytes = kTokens * 128;                     // 64 columns of the tokens
  static constexpr int kTokenBytes = 2 * kHalfBytes;                   // of a stage
  static constexpr int kStages(WeightFormat::Numbers numbers) {
    return (numbers == WeightFormat::int4 ? 4 : 3) - (kNi > 1 ? 1 : 0);
  }
  static constexpr int stage_bytes(int record_bytes) {
    return kTokenBytes + kEights * record_bytes;
  }
  static constexpr int columns(bool gated) { return kEights * kPackedRows / (gated ? 2 : 1); }
};

/// A stack of packed weights.
struct PackedExperts {
  const unsigned char* data;
  int64_t expert_bytes, row_bytes;  // of eight rows
  int64_t row_scales, zeros;        // PackedLayout's
  int record_bytes, groups, group;
};

/// The eights of rows that a warp has of a unit: the last ones again, where it would have none.
template <class Shape, bool kGated>
struct OwnEights {
  static constexpr int kCount = Shape::kMi * (kGated ? 1 : 2);  // of y's columns
  int first;                                                    // of y's columns
  __device__ OwnEights(int row_block, int columns)
      : first(min((row_block * Shape::kWarps + static_cast<int>(threadIdx.x) / kWarp) * kCount,
                  columns / kPackedRows - kCount)) {}
  /// Of y's columns: of half `u` of operand i.
  __device__ static constexpr int of_columns(int i, int u) { return kGated ? i : 2 * i + u; }
  /// Of the weight's rows.
  __device__ static int of_rows(int i, int u, int columns) {
    return of_columns(i, u) + (kGated ? u * (columns / kPackedRows) : 0);
  }
};

/// Copies the stages of a block's units, one after another.
template <class Shape, WeightFormat::Numbers packing, bool kGated>
class PackedExpertLoader {
  static constexpr int kRowsAtOnce = Shape::kThreads / 16;  // sixteen threads copy a row
  static constexpr int kTokenCopies = (Shape::kTokens + kRowsAtOnce - 1) / kRowsAtOnce;

 public:
  __device__ PackedExpertLoader(const ExpertProduct<__nv_bfloat16>& product, const ExpertPlan& plan,
                                const PackedExperts& weight, int units, int row_blocks)
      : product_(product), plan_(plan), weight_(weight), units_(units), row_blocks_(row_blocks) {
    restart();
  }

  /// Back to the first stage of the first unit.
  __device__ void restart() {
    unit_ = static_cast<int>(blockIdx.x);
    begin_unit();
  }
  /// A warp's own records of the next stage. Needs the plan only.
  __device__ void load_weight(unsigned char* stage) const {
    if (unit_ >= units_) return;
    constexpr int kNumberBytes = packed_number_bytes(packing), kWarpBytes = kWarp * 16;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    unsigned char* to =
        stage + Shape::kTokenBytes + warp * 2 * Shape::kMi * weight_.record_bytes + lane * 16;
#pragma unroll
    for (int j = 0; j < 2 * Shape::kMi; ++j, to += weight_.record_bytes) {
      const unsigned char* from =
          from_ +
          OwnEights<Shape, kGated>::of_rows(j / 2, j % 2, product_.columns) * weight_.row_bytes;
#pragma unroll
      for (int part = 0; part < kNumberBytes; part += kWarpBytes)
        copy_async(to + part, from + part, true);
      if (lane < 2 * weight_.groups) copy_async(to + kNumberBytes, from + kNumberBytes, true);
    }
  }
  /// The tokens' part; then moves on. Where a tile has fewer, what lies there is multiplied: nobody
  /// reads those sums.
  __device__ void load_tokens(unsigned char* stage) {
    if (unit_ >= units_) return;
    const int chunk = threadIdx.x % 16;
    stage += chunk / 8 * Shape::kHalfBytes;
#pragma unroll
    for (int i = 0; i < kTokenCopies; ++i) {
      const int row = i * kRowsAtOnce + static_cast<int>(threadIdx.x) / 16;
      if (row < tile_rows_)
        copy_async(stage + swizzled(row, chunk % 8),
                   reinterpret_cast<const uint4*>(product_.x) + (rows_[i] + (k_ / 8)), true);
    }
    advance();
  }
  /// Moves to the next stage (what load_tokens() ends with).
  __device__ void advance() {
    k_ += kPackedColumns;
    from_ += weight_.record_bytes;
    if (k_ < static_cast<uint32_t>(product_.k)) return;
    unit_ += static_cast<int>(gridDim.x);
    begin_unit();
  }

 private:
  __device__ void begin_unit() {
    k_ = 0;
    if (unit_ >= units_) return;
    const ExpertTile tile = tile_at(plan_, unit_ / row_blocks_);
    tile_rows_ = tile.rows;
    const OwnEights<Shape, kGated> own(unit_ % row_blocks_, product_.columns);
    from_ = weight_.data + tile.expert * weight_.expert_bytes +
            int64_t{own.first} * weight_.row_bytes + threadIdx.x % kWarp * 16;
#pragma unroll
    for (int i = 0; i < kTokenCopies; ++i) {
      const int row = i * kRowsAtOnce + static_cast<int>(threadIdx.x) / 16,
                place = tile.first + row;
      if (row < tile_rows_)
        rows_[i] = static_cast<uint32_t>((product_.by_token ? token_of(plan_, place) : place) *
                                         product_.x_stride / 8) +
                   threadIdx.x % 16;
    }
  }

  const ExpertProduct<__nv_bfloat16>& product_;
  const ExpertPlan& plan_;
  const PackedExperts& weight_;
  int units_, row_blocks_, unit_ = 0, tile_rows_ = 0;
  uint32_t k_ = 0, rows_[kTokenCopies] = {};  // rows_: of x, in pieces of eight columns
  const unsigned char* from_ = nullptr;       // the lane's first bytes
};

/// How numbers become bf16: by Unpack with one scale for a record or more, or by UnpackAny.
enum class Unpacks : uint8_t { with_one_scale, with_scales, any };

/// A warp's part of a unit.
template <class Shape, WeightFormat::Numbers packing, bool kGated, Unpacks how>
class PackedExpertSums {
  static constexpr bool kAny = how == Unpacks::any;
  static constexpr int kWords = WeightFormat(packing).bits() / 4;  // of a lane, for two steps
  static constexpr int kTogether = Shape::kNi < 4 ? Shape::kNi : 4;
  using Unpacking = std::conditional_t<kAny, UnpackAny<packing>, Unpack<packing>>;

 public:
  __device__ PackedExpertSums(const ExpertProduct<__nv_bfloat16>& product,
                              const PackedExperts& weight, const ExpertTile& tile, int row_block)
      : product_(product), weight_(weight), tile_(tile), own_(row_block, product.columns) {
    const unsigned char* const expert = weight.data + tile.expert * weight.expert_bytes;
    row_ = own_.first * kPackedRows + static_cast<int>(threadIdx.x) % kWarp / 4;
    zeros_ = expert + weight.zeros;
    if (weight.groups != 0) return;
    const auto* const scales = reinterpret_cast<const uint32_t*>(expert + weight.row_scales);
#pragma unroll
    for (int i = 0; i < Shape::kMi; ++i)
#pragma unroll
      for (int u = 0; u < 2; ++u) take_scale(i, u, scales[row_of(i, u)], 0);
  }

  /// Adds the products of a stage, whose first column is `column`.
  __device__ __forceinline__ void multiply(const unsigned char* stage, int column) {
    const unsigned char* const records =
        stage + Shape::kTokenBytes +
        static_cast<int>(threadIdx.x) / kWarp * 2 * Shape::kMi * weight_.record_bytes;
    multiply_quarter<0>(stage, records, column);
    multiply_quarter<1>(stage, records, column);
    multiply_quarter<2>(stage, records, column);
    multiply_quarter<3>(stage, records, column);
  }

  /// Two columns of y at a time.
  __device__ __forceinline__ void store() const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int j = 0; j < Shape::kNi; ++j) {
      if (j * 8 >= tile_.rows) break;
      const int row = j * 8 + lane / 4;
      __nv_bfloat16* const to = product_.y + (tile_.first + row) * product_.y_stride +
                                own_.first * kPackedRows + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < Shape::kMi; ++i)
#pragma unroll
        for (int u = 0; u < (kGated ? 1 : 2); ++u) {
          const float(&s)[4] = sum_[i][j];
          uint32_t two;
          if constexpr (kGated)
            two = pack_bf16(to_float(gated<__nv_bfloat16>(s[0], s[2])),
                            to_float(gated<__nv_bfloat16>(s[1], s[3])));
          else
            two = pack_bf16(s[2 * u], s[2 * u + 1]);
          two = transposed(two);
          if (row < tile_.rows)
            *reinterpret_cast<uint32_t*>(to + own_.of_columns(i, u) * kPackedRows) = two;
        }
    }
  }

 private:
  __device__ int64_t row_of(int i, int u) const {
    return row_ + int64_t{own_.of_rows(i, u, product_.columns)} * kPackedRows;
  }
  __device__ __forceinline__ void take_scale(int i, int u, uint32_t word, int column) {
    if constexpr (kAny)
      unpack_[i][u] = Unpacking(
          word, static_cast<signed char>(
                    zeros_[row_of(i, u) * (product_.k / weight_.group) + column / weight_.group]));
    else
      unpack_[i][u] = Unpacking(word);
  }

  /// Steps 2 quarter and 2 quarter + 1 of a stage, as operands.
  template <int quarter>
  __device__ __forceinline__ void unpack(uint32_t (&a)[Shape::kMi][2][4],
                                         const unsigned char* records, int column) {
    const int lane = threadIdx.x % kWarp, groups = weight_.groups;
#pragma unroll
    for (int i = 0; i < Shape::kMi; ++i)
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const unsigned char* const record = records + (2 * i + u) * weight_.record_bytes;
        if constexpr (quarter * kWords % 4 == 0)
          part_[i][u] = reinterpret_cast<const uint4*>(record)[quarter * kWords / 4 * kWarp + lane];
        if (groups > 0 &&
            (how == Unpacks::with_one_scale ? quarter == 0 : groups * quarter % 4 == 0))
          take_scale(i, u,
                     *reinterpret_cast<const uint32_t*>(
                         record + packed_number_bytes(packing) +
                         (groups * quarter / 4 * kPackedRows + lane / 4) * 4),
                     column + 32 * quarter);
        uint32_t pairs[4];
        unpack_[i][u](pairs, word_of(part_[i][u], quarter * kWords % 4),
                      word_of(part_[i][u], (quarter * kWords + kWords - 1) % 4));
#pragma unroll
        for (int s = 0; s < 2; ++s) a[i][s][u] = pairs[2 * s], a[i][s][u + 2] = pairs[2 * s + 1];
      }
  }

  template <int quarter>
  __device__ __forceinline__ void multiply_quarter(const unsigned char* stage,
                                                   const unsigned char* records, int column) {
    const int lane = threadIdx.x % kWarp;
    const unsigned char* const tokens = stage + quarter / 2 * Shape::kHalfBytes;
    uint32_t a[Shape::kMi][2][4];
    unpack<quarter>(a, records, column);
#pragma unroll
    for (int first = 0; first < Shape::kNi; first += kTogether) {
      if (first > 0 && Shape::kNi > kTogether && first * 8 >= tile_.rows) break;
      uint32_t b[kTogether][4];
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        load_matrices(
            b[j], reinterpret_cast<const __nv_bfloat16*>(
                      tokens + swizzled((first + j) * 8 + lane % 8, quarter % 2 * 4 + lane / 8)));
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
#pragma unroll
          for (int i = 0; i < Shape::kMi; ++i)
            mma_m16n8k16(sum_[i][first + j], a[i][s], b[j][2 * s], b[j][2 * s + 1]);
    }
  }

  const ExpertProduct<__nv_bfloat16>& product_;
  const PackedExperts& weight_;
  const ExpertTile& tile_;
  OwnEights<Shape, kGated> own_;
  int row_;  // of the weight, of the lane in the warp's first eight
  const unsigned char* zeros_;
  uint4 part_[Shape::kMi][2];
  Unpacking unpack_[Shape::kMi][2];
  float sum_[Shape::kMi][Shape::kNi][4] = {};
};

/// `early`: the plan is older than the kernel before this one, so that weights may be fetched while
/// that one ends.
template <class Shape, WeightFormat::Numbers packing, bool kGated, Unpacks how>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    expert_packed_kernel(const __grid_constant__ ExpertProduct<__nv_bfloat16> product,
                         const __grid_constant__ ExpertPlan plan,
                         const __grid_constant__ PackedExperts weight, int row_blocks, bool early) {
  extern __shared__ __align__(128) unsigned char packed_ring[];
  constexpr int kStages = Shape::kStages(packing);
  const int stage_bytes = Shape::stage_bytes(weight.record_bytes);
  if (!early) wait_for_previous();
  const int units = num_tiles(plan) * row_blocks;
  PackedExpertLoader<Shape, packing, kGated> loader(product, plan, weight, units, row_blocks);
  if (early) {
    for (int s = 0; s < kStages - 1; ++s) {
      loader.load_weight(packed_ring + s * stage_bytes);
      loader.advance();
    }
    wait_for_previous();
    loader.restart();
  }
  let_next_start();
  for (int s = 0; s < kStages - 1; ++s) {
    if (!early) loader.load_weight(packed_ring + s * stage_bytes);
    loader.load_tokens(packed_ring + s * stage_bytes);
    commit_copies();
  }

  unsigned char *stage = packed_ring, *free_stage = packed_ring + (kStages - 1) * stage_bytes,
                *const end = packed_ring + kStages * stage_bytes;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const ExpertTile tile = tile_at(plan, unit / row_blocks);
    PackedExpertSums<Shape, packing, kGated, how> sums(product, weight, tile, unit % row_blocks);
    for (int k = 0; k < product.k; k += kPackedColumns) {
      wait_copies<kStages - 2>();
      __syncthreads();  // the stage is there for all, and what was in the free one has been read
      loader.load_weight(free_stage);
      loader.load_tokens(free_stage);
      commit_copies();
      sums.multiply(stage, k);
      free_stage = stage;
      stage += stage_bytes;
      if (stage == end) stage = packed_ring;
    }
    sums.store();
  }
}

}  // namespace nanovllm
