// The products of layer_products.cuh: what a block has of them, how a warp brings its weights
// through a ring of its own, and how it multiplies them. A lone warp pays five cycles for an
// instruction, so that what repeats with each stage is little: places are kept, not computed.
//
// A unit is eight columns of y: the weight's rows are the second operand of mma.sync m16n8k16, and
// up to eight rows of x the first, which is the order and the instruction of gemm_in_order.cu. A
// unit of two chains, gate and up or the halves of k, has two neighbouring warps, one for each.
#pragma once

#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm::layer_products {

using Element = __nv_bfloat16;
using Row = Vec<Element>;  // eight elements of one

enum Product { kOut, kGateUp, kDown, kQkv, kProducts };

constexpr int kWarps = 8, kThreads = kWarps * kWarp, kMostRows = 8;
constexpr int kUnit = 8;  // columns of y
/// A stage: 8 rows of a weight by 128 of k. A chain's last may be half of one.
constexpr int kStageBytes = 2048, kDepth = 128, kHalfDepth = 64;
constexpr int kOperandPad = 16;  // bytes behind a row: ldmatrix without bank conflicts
constexpr int kMostNormWarps = 16;
constexpr unsigned kNap = 64;  // ns

struct Matrix {
  const Element *w, *bias;  // [n, k], dense; [n] or null
  Element* y;               // [rows, outputs]; null: the words are
  uint64_t* words;          // [rows, outputs / 2]
  int n, k, units;
  int chain;       // of k, of each of a unit's chains
  int64_t second;  // elements from the weights of a unit's first chain to the second's; 0: one
  __device__ bool is_pair() const { return second > 0; }
};

struct Arguments {
  Matrix products[kProducts];
  int count;             // products: the last layer has no next qkv
  const Element* heads;  // o's operand [rows, k]
  const Element *post_norm, *next_norm;
  const Element* stream;  // before the layer's sums
  Element* next_stream;   // behind those that are made here
  int64_t stream_stride, next_stride;
  uint32_t *epochs, last_epoch;  // each block's last
  uint64_t* all_words;
  int64_t total_words;
  int rows, hidden, norm_warps;
  float eps;
};

/// The block's units of a product. Their chains go round the warps, the first to `turn`, and those
/// of the next product after them, so that the later ones' first copies begin early.
struct Share {
  int first, count, turn;  // count: of chains
  __device__ int of_warp() const {
    static_assert(kWarps == 8);
    return (static_cast<int>(threadIdx.x) / kWarp - turn) & (kWarps - 1);
  }
};

/// Shares of all products, one after another: each has a lane of a warp.
__device__ inline void divide(Share (&shares)[kProducts], const Arguments& a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, p = min(lane, kProducts - 1);
  const unsigned units = p < a.count ? static_cast<unsigned>(a.products[p].units) : 0;
  const unsigned first = units * blockIdx.x / gridDim.x, end = units * (blockIdx.x + 1) / gridDim.x;
  const int count = static_cast<int>(end - first) * (a.products[p].is_pair() ? 2 : 1);
  int turn = 0;
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int other = __shfl_sync(kFullMask, count, i);
    if (i < p) turn += (other + 1) / 2 * 2;  // the warps of a pair are 2 i and 2 i + 1
  }
  if (lane < kProducts) shares[lane] = {static_cast<int>(first), count, turn};
}

__device__ inline uint32_t shared_place(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// A warp's copies: all of its chains' stages, product by product. Bytes.
struct Supply {
  const Arguments& a;
  const Share* shares;
  int product, chain;
  int left = 0, lane_k;  // of the chain's rows; the lane's first in a stage
  const unsigned char* from[4];
  uint32_t to[4];

  __device__ Supply(const Arguments& arguments, const Share* of_block)
      : a(arguments), shares(of_block), product(0), chain(shares[0].of_warp() - kWarps) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, row = lane / 16, chunk = lane % 16;
    lane_k = chunk * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      to[i] = static_cast<uint32_t>(row * 256 + ((chunk ^ row) * 16 ^ i * 32) + i * 512);
    next();
  }
  __device__ void next() {
    for (chain += kWarps; chain >= shares[product].count; chain = shares[product].of_warp())
      if (++product == kProducts) return;
    const Matrix& m = a.products[product];
    const bool is_pair = m.is_pair();
    const int unit = shares[product].first + (is_pair ? chain / 2 : chain);
    const Element* w = m.w + (is_pair && chain % 2 == 1 ? m.second : 0);
    left = m.chain * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = unit * kUnit + static_cast<int>(threadIdx.x) % kWarp / 16 + i * 2;
      from[i] = reinterpret_cast<const unsigned char*>(w + int64_t{row} * m.k) + lane_k;
    }
  }
  /// Copies the next stage, if one is left, to the place in shared memory. A group of copies in any
  /// case.
  __device__ void issue(uint32_t stage) {
    if (left > 0) {
      const int bytes = lane_k < left ? 16 : 0;  // the last stage may be half of one
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(stage + to[i]),
                     "l"(bytes > 0 ? from[i] : reinterpret_cast<const unsigned char*>(a.heads)),
                     "r"(bytes)
                     : "memory");
        from[i] += kDepth * 2;
      }
      left -= kDepth * 2;
      if (left <= 0) next();
    }
    commit_copies();
  }
};

template <int kStages>
struct Ring {
  static constexpr uint32_t kBytes = kStages * kStageBytes;
  uint32_t begin, slot;  // places in shared memory: this warp's; the next stage
  Supply supply;

  __device__ Ring(const unsigned char* rings, const Arguments& a, const Share* shares)
      : begin(shared_place(rings) + threadIdx.x / kWarp * kBytes), slot(begin), supply(a, shares) {}
  /// Fills the stages from .. to - 1.
  __device__ void fill(int from, int to) {
#pragma unroll 1
    for (int i = from; i < to; ++i) supply.issue(begin + static_cast<uint32_t>(i * kStageBytes));
  }
  __device__ void await_stage() {
    wait_copies<kStages - 1>();
    __syncwarp();
  }
  /// The stage has been read: its place is filled again.
  __device__ void advance() {
    supply.issue(slot);
    slot += kStageBytes;
    if (slot == begin + kBytes) slot = begin;
  }
};

/// Multiplies a chain. `x`: the lane's place in its operand's rows; `next`: bytes to the next
/// stage, 0 in lanes without a row, which read zeros everywhere.
template <int kStages>
__device__ void multiply(float (&sum)[4], Ring<kStages>& ring, uint32_t x, uint32_t next,
                         int length) {
  const uint32_t lane = threadIdx.x % kWarp, row = lane % 8, at = row * 256 + (lane / 8 ^ row) * 16;
#pragma unroll 1
  for (int left = length; left > 0; left -= kDepth) {
    uint32_t w[4][4], r[4][4];
    ring.await_stage();
    const uint32_t here = ring.slot + at;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      load_matrices(w[i], (here ^ (i % 2 * 64)) + i / 2 * 128);
      load_matrices(r[i], x + i * 64);
    }
    x += next;
    ring.advance();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i == 2 && left <= kHalfDepth) break;  // the last stage is half of one
      const uint32_t first[4] = {r[i][0], 0, r[i][1], 0}, second[4] = {r[i][2], 0, r[i][3], 0};
      mma_m16n8k16(sum, first, w[i][0], w[i][1]);
      mma_m16n8k16(sum, second, w[i][2], w[i][3]);
    }
  }
}

}  // namespace nanovllm::layer_products
