// The products of a mixture of experts in bf16: every tile of places with its expert's weight, one
// chain of mma m16n8k16 steps over k per output, as gemm_in_order() adds.
//
// Floor: the chosen experts' weights over the memory's bandwidth where tokens are few, the tensor
// cores where they are many. The weight's rows are the 16 rows of the instruction and the tokens
// its 8 columns, so that few tokens waste nothing that is scarce. A block takes unit after unit
// (some rows of an expert's weight by one tile); weights and tokens come 64 columns at a time
// through a ring of stages, which runs on from one unit into the next. Where a gated product is
// wanted a block has the same rows of both halves and each warp both values of an output.
#pragma once

#include "ops/cuda/moe/moe.cuh"
#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm {

/// How a block is cut: kMi x kNi instructions per warp, kWm x kWn warps, kStages in the ring.
template <int kMi_, int kNi_, int kWm_, int kWn_, int kStages_, int kBlocks_>
struct ExpertShape {
  static constexpr int kMi = kMi_, kNi = kNi_, kWm = kWm_, kWn = kWn_, kStages = kStages_;
  static constexpr int kBlocksPerSm = kBlocks_;
  static constexpr int kThreads = kWm * kWn * kWarp;
  static constexpr int kRows = kWm * kMi * 16;   // of the weight
  static constexpr int kTokens = kWn * kNi * 8;  // of a tile
  static constexpr int kDepth = 64;              // columns in a stage: rows of 128 bytes
  static constexpr int kRowBytes = kDepth * 2;
  static constexpr int kStageBytes = (kRows + kTokens) * kRowBytes;
  static constexpr size_t kSharedBytes = size_t{kStages} * kStageBytes;
  static constexpr int kRowsAtOnce = kThreads / 8;  // eight threads copy a row
  static_assert(kRows % kRowsAtOnce == 0 && kRows / 2 % kRowsAtOnce == 0 && kMi % 2 == 0);
  static_assert(kTokens % 8 == 0 && (kNi == 1 || kNi % 2 == 0));
};

/// Byte offset of 16-byte chunk `chunk` of a stage's row: neighbouring rows' chunks lie in
/// different banks.
__device__ inline int swizzled(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

/// The matrix transposed: two values of a row in each register become two of a column.
__device__ inline uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

/// Copies the stages of a block's units, one after another.
template <class Shape, bool kGated>
class ExpertLoader {
  static constexpr int kTokenCopies =
      (Shape::kTokens + Shape::kRowsAtOnce - 1) / Shape::kRowsAtOnce;

 public:
  __device__ ExpertLoader(const ExpertProduct<__nv_bfloat16>& product, const ExpertPlan& plan,
                          int units, int row_blocks, char* ring)
      : product_(product),
        plan_(plan),
        ring_(ring),
        units_(units),
        row_blocks_(row_blocks),
        unit_(static_cast<int>(blockIdx.x)) {
    begin_unit();
  }

  /// The weight's part of the next stage, which goes to `slot` of the ring. Needs the plan only.
  __device__ void load_weight(int slot) const {
    if (unit_ >= units_) return;
    constexpr int kHalf = kGated ? Shape::kRows / 2 : Shape::kRows;
    const bool in_k = k_ + chunk() * 8 < product_.k;
    const int64_t step = int64_t{Shape::kRowsAtOnce} * product_.k,
                  to_second = int64_t{product_.columns - kHalf} * product_.k;
    const __nv_bfloat16* from = weight_ + k_;
    char* to = ring_ + slot * Shape::kStageBytes + swizzled(row_in_pass(), chunk());
#pragma unroll
    for (int i = 0; i < Shape::kRows / Shape::kRowsAtOnce; ++i, from += step) {
      constexpr int kPasses = kHalf / Shape::kRowsAtOnce;
      if (kGated && i == kPasses) from += to_second;
      const int column = column_ + i % kPasses * Shape::kRowsAtOnce + row_in_pass();  // of y
      copy_async(to + i * Shape::kRowsAtOnce * Shape::kRowBytes, from,
                 in_k && column < product_.columns);
    }
  }

  /// The tokens' part; then moves on.
  __device__ void load_tokens(int slot) {
    if (unit_ >= units_) return;
    const bool in_k = k_ + chunk() * 8 < product_.k;
    char* to = ring_ + slot * Shape::kStageBytes + Shape::kRows * Shape::kRowBytes;
#pragma unroll
    for (int i = 0; i < kTokenCopies; ++i) {
      const int row = i * Shape::kRowsAtOnce + row_in_pass();
      if (row >= Shape::kTokens) break;
      const int place = row < tile_.rows ? tile_.first + row : -1;
      if (k_ == 0) source_[i] = place >= 0 && product_.by_token ? token_of(plan_, place) : place;
      const bool valid = in_k && place >= 0;
      copy_async(
          to + swizzled(row, chunk()),
          valid ? product_.x + source_[i] * product_.x_stride + k_ + chunk() * 8 : product_.x,
          valid);
    }
    advance();
  }

  /// Moves to the next stage (what load_tokens() ends with).
  __device__ void advance() {
    k_ += Shape::kDepth;
    if (k_ < product_.k) return;
    k_ = 0;
    unit_ += static_cast<int>(gridDim.x);
    begin_unit();
  }

  /// Back to the first stage of the first unit.
  __device__ void restart() {
    k_ = 0;
    unit_ = static_cast<int>(blockIdx.x);
    begin_unit();
  }

 private:
  __device__ void begin_unit() {
    if (unit_ >= units_) return;
    tile_ = tile_at(plan_, unit_ / row_blocks_);
    column_ = unit_ % row_blocks_ * (kGated ? Shape::kRows / 2 : Shape::kRows);
    weight_ = product_.w + tile_.expert * product_.expert_stride +
              int64_t{column_ + row_in_pass()} * product_.k + chunk() * 8;
  }
  __device__ static int chunk() { return threadIdx.x % 8; }
  __device__ static int row_in_pass() { return threadIdx.x / 8; }

  const ExpertProduct<__nv_bfloat16>& product_;
  const ExpertPlan& plan_;
  char* ring_;
  int units_, row_blocks_, unit_, k_ = 0;
  ExpertTile tile_{};
  int column_ = 0;                         // of y, the unit's first
  const __nv_bfloat16* weight_ = nullptr;  // of the row and the chunk that this thread copies first
  int source_[kTokenCopies];               // row of x
};

/// One stage: four steps of k for all of a warp's outputs.
template <class Shape, bool kGated>
__device__ void multiply_stage(float (&sum)[Shape::kMi][Shape::kNi][4], const char* stage,
                               int warp_m, int warp_n) {
  const int lane = threadIdx.x % kWarp;
  const char* tokens = stage + Shape::kRows * Shape::kRowBytes;
  const auto at = [](const char* base, int row, int chunk) {
    return reinterpret_cast<const __nv_bfloat16*>(base + swizzled(row, chunk));
  };
  uint32_t one_tile[4];  // kNi == 1: two steps' worth of tokens
#pragma unroll
  for (int step = 0; step < Shape::kDepth / 16; ++step) {
    uint32_t a[Shape::kMi][4], b[Shape::kNi][2];
#pragma unroll
    for (int i = 0; i < Shape::kMi; ++i) {
      // The second half of the fragments is the same rows of the weight's second half.
      constexpr int kHalf = kGated ? Shape::kMi / 2 : Shape::kMi;
      const int row = i / kHalf * (Shape::kRows / 2) + (warp_m * kHalf + i % kHalf) * 16;
      load_matrices(a[i], at(stage, row + lane % 16, step * 2 + lane / 16));
    }
    if constexpr (Shape::kNi == 1) {
      if (step % 2 == 0)
        load_matrices(one_tile, at(tokens, warp_n * 8 + lane % 8, step * 2 + lane / 8));
      b[0][0] = one_tile[step % 2 * 2];
      b[0][1] = one_tile[step % 2 * 2 + 1];
    } else {
#pragma unroll
      for (int j = 0; j < Shape::kNi; j += 2) {
        const int row = (warp_n * Shape::kNi + j) * 8 + lane / 16 * 8 + lane % 8;
        uint32_t r[4];
        load_matrices(r, at(tokens, row, step * 2 + lane / 8 % 2));
        b[j][0] = r[0], b[j][1] = r[1], b[j + 1][0] = r[2], b[j + 1][1] = r[3];
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::kMi; ++i)
#pragma unroll
      for (int j = 0; j < Shape::kNi; ++j) mma_m16n8k16(sum[i][j], a[i], b[j][0], b[j][1]);
  }
}

/// A warp's outputs of a unit, two columns of y at a time.
template <class Shape, bool kGated>
__device__ void store_unit(const ExpertProduct<__nv_bfloat16>& product, const ExpertTile& tile,
                           int column, float (&sum)[Shape::kMi][Shape::kNi][4], int warp_m,
                           int warp_n) {
  const int lane = threadIdx.x % kWarp;
  constexpr int kOut = kGated ? Shape::kMi / 2 : Shape::kMi;
#pragma unroll
  for (int j = 0; j < Shape::kNi; ++j) {
    const int row = (warp_n * Shape::kNi + j) * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      uint32_t packed[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kGated) {
          const float(&gate)[4] = sum[i][j], (&up)[4] = sum[kOut + i][j];
          const __nv_bfloat162 pair{gated<__nv_bfloat16>(gate[2 * h], up[2 * h]),
                                    gated<__nv_bfloat16>(gate[2 * h + 1], up[2 * h + 1])};
          packed[h] = transposed(*reinterpret_cast<const uint32_t*>(&pair));
        } else {
          packed[h] = transposed(pack_bf16(sum[i][j][2 * h], sum[i][j][2 * h + 1]));
        }
      }
      __nv_bfloat16* to = product.y + (tile.first + row) * product.y_stride;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int c = column + (warp_m * kOut + i) * 16 + h * 8 + lane % 4 * 2;
        if (row < tile.rows && c < product.columns)
          *reinterpret_cast<uint32_t*>(to + c) = packed[h];
      }
    }
  }
}

/// `early`: the plan is older than the kernel before this one, so that weights may be fetched while
/// that one ends.
template <class Shape, bool kGated>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    expert_gemm_kernel(const __grid_constant__ ExpertProduct<__nv_bfloat16> product,
                       const __grid_constant__ ExpertPlan plan, int row_blocks, bool early) {
  extern __shared__ __align__(128) char ring[];
  constexpr int kStages = Shape::kStages;
  if (!early) wait_for_previous();
  const int units = num_tiles(plan) * row_blocks;
  const int stages_of_unit = (product.k + Shape::kDepth - 1) / Shape::kDepth;
  ExpertLoader<Shape, kGated> loader(product, plan, units, row_blocks, ring);
  for (int s = 0; early && s < kStages - 1; ++s) {
    loader.load_weight(s);
    loader.advance();
  }
  if (early) {
    wait_for_previous();
    loader.restart();
  }
  let_next_start();
  for (int s = 0; s < kStages - 1; ++s) {
    if (!early) loader.load_weight(s);
    loader.load_tokens(s);
    commit_copies();
  }

  const int warp = threadIdx.x / kWarp, warp_m = warp % Shape::kWm, warp_n = warp / Shape::kWm;
  int slot = 0, free_slot = kStages - 1;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    float sum[Shape::kMi][Shape::kNi][4] = {};
    for (int s = 0; s < stages_of_unit; ++s) {
      wait_copies<kStages - 2>();
      __syncthreads();  // the stage is there for all, and what was in the free slot has been read
      loader.load_weight(free_slot);
      loader.load_tokens(free_slot);
      commit_copies();
      multiply_stage<Shape, kGated>(sum, ring + slot * Shape::kStageBytes, warp_m, warp_n);
      slot = slot + 1 == kStages ? 0 : slot + 1;
      free_slot = free_slot + 1 == kStages ? 0 : free_slot + 1;
    }
    const int column = unit % row_blocks * (kGated ? Shape::kRows / 2 : Shape::kRows);
    store_unit<Shape, kGated>(product, tile_at(plan, unit / row_blocks), column, sum, warp_m,
                              warp_n);
  }
}

}  // namespace nanovllm
