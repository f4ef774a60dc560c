// The products of layer_products.cuh: what a block has of them, how a warp brings its weights
// through a ring of its own, and how it multiplies them. A lone warp pays five cycles for an
// instruction, so that what repeats with each stage is little: places are kept, not computed.
//
// A unit is eight columns of y: the weight's rows are the second operand of mma.sync m16n8k16, and
// up to eight rows of x the first, which is the order and the instruction of gemm_in_order.cu. Of
// gate_up it is eight columns of both halves, in one thread.
#pragma once

#include "ops/cuda/ptx/mma.cuh"

namespace nanovllm::layer_products {

using Element = __nv_bfloat16;
using Row = Vec<Element>;  // eight elements of one

enum Product { kOut, kGateUp, kDown, kQkv, kProducts };

constexpr int kWarps = 8, kThreads = kWarps * kWarp, kMostRows = 8;
constexpr int kUnit = 8;  // columns of y
/// A stage: 8 rows of a weight by 128 of k or, of both halves, 16 by 64.
constexpr int kStageBytes = 2048, kDepth = 128, kGatedDepth = 64;
constexpr int kOperandPad = 16;  // bytes behind a row: ldmatrix without bank conflicts
constexpr int kMostNormWarps = 16;
constexpr unsigned kNap = 64, kFillNap = 400;  // ns

struct Matrix {
  const Element *w, *bias;  // [n, k], dense; [n] or null
  Element* y;               // [rows, outputs]; null: the words are
  uint64_t* words;          // [rows, outputs / 2]
  int n, k, half, units;    // half: of k, where the weight is in halves; else 0
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

/// The block's units of a product. They go round the warps, the first to `turn`, and those of the
/// next product after them, so that the later ones' first copies begin early.
struct Share {
  int first, count, turn;
  __device__ int of_warp() const {
    static_assert(kWarps == 8);
    return (static_cast<int>(threadIdx.x) / kWarp - turn) & (kWarps - 1);
  }
};

/// Shares of all products, one after another.
__device__ inline void divide(Share (&shares)[kProducts], const Arguments& a) {
  int turn = 0;
#pragma unroll 1
  for (int p = 0; p < kProducts; ++p) {
    const unsigned units = p < a.count ? static_cast<unsigned>(a.products[p].units) : 0;
    const unsigned first = units * blockIdx.x / gridDim.x,
                   end = units * (blockIdx.x + 1) / gridDim.x;
    shares[p] = {static_cast<int>(first), static_cast<int>(end - first), turn};
    turn += shares[p].count;
  }
}

__device__ inline uint32_t shared_place(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// A warp's copies: all of its units' stages, product by product. Bytes.
struct Supply {
  const Arguments& a;
  const Share* shares;
  int product, unit;
  int left = 0, deep, lane_k;  // of the unit's rows; of a stage; the lane's first in a stage
  const unsigned char* from[4];
  uint32_t to[4];

  __device__ Supply(const Arguments& arguments, const Share* of_block)
      : a(arguments), shares(of_block), product(0), unit(shares[0].of_warp() - kWarps) {
    next();
  }
  __device__ void next() {
    for (unit += kWarps; unit >= shares[product].count; unit = shares[product].of_warp())
      if (++product == kProducts) return;
    const Matrix& m = a.products[product];
    const bool gated = product == kGateUp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, chunks = gated ? 8 : 16,
              row = lane / chunks, chunk = lane % chunks, step = gated ? 4 : 2;
    left = m.k * 2;
    deep = chunks * 16;
    lane_k = chunk * 16;
    const auto* first = reinterpret_cast<const unsigned char*>(m.w) + lane_k;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Rows 8 and on are the second half's.
      const int at = (shares[product].first + unit) * kUnit + row + i * step +
                     (gated && i >= 2 ? m.n / 2 - kUnit : 0);
      from[i] = first + int64_t{at} * m.k * 2;
      to[i] = static_cast<uint32_t>(row * deep +
                                    ((chunk ^ row) * 16 ^ (gated ? i % 2 * 64 : i * 32)) + i * 512);
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
        from[i] += deep;
      }
      left -= deep;
      if (left <= 0) next();
    }
    commit_copies();
  }
};

__device__ inline void load_matrices_at(uint32_t (&r)[4], uint32_t place) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(place)
               : "memory");
}

template <int kStages>
struct Ring {
  static constexpr uint32_t kBytes = kStages * kStageBytes;
  uint32_t begin, slot,
      free;  // places in shared memory: this warp's; the next stage; the one before
  Supply supply;

  __device__ Ring(const unsigned char* rings, const Arguments& a, const Share* shares)
      : begin(shared_place(rings) + threadIdx.x / kWarp * kBytes),
        slot(begin),
        free(begin + kBytes - kStageBytes),
        supply(a, shares) {}
  /// Fills it; between the stages the warp naps.
  __device__ void fill(unsigned nap) {
#pragma unroll 1
    for (uint32_t stage = begin; stage != free; stage += kStageBytes) {
      supply.issue(stage);
      if (nap > 0) __nanosleep(nap);
    }
  }
  __device__ void await_stage() {
    wait_copies<kStages - 2>();
    __syncwarp();
  }
  /// The stage has been read: the place before it is filled again.
  __device__ void advance() {
    supply.issue(free);
    free = slot;
    slot += kStageBytes;
    if (slot == begin + kBytes) slot = begin;
  }
};

__device__ inline void step(float (&sum)[4], uint32_t x0, uint32_t x1, uint32_t w0, uint32_t w1) {
  const uint32_t rows[4] = {x0, 0, x1, 0};
  mma_m16n8k16(sum, rows, w0, w1);
}

/// The lane's part of an operand's rows in shared memory: `place`, and the bytes to the next 64 of
/// k. Lanes of rows that there are not read zeros, everywhere.
struct Operand {
  uint32_t place, next;
};

/// Multiplies a unit; sums[1]: the second half's.
template <bool kGated, int kStages>
__device__ void multiply(float (&sums)[2][4], Ring<kStages>& ring, Operand x, int length,
                         [[maybe_unused]] int half = 0) {
  [[maybe_unused]] FirstHalf<4> first;
  const uint32_t lane = threadIdx.x % kWarp, row = lane % 8, matrix = lane / 8,
                 at = kGated ? (row + matrix / 2 * 8) * 128 + ((matrix % 2 ^ row) * 16)
                             : row * 256 + ((matrix ^ row) * 16);
#pragma unroll 1
  for (int k = 0; k < length; k += kGated ? kGatedDepth : kDepth) {
    uint32_t w[4][4], r[4][4];
    ring.await_stage();
    const uint32_t here = ring.slot + at;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      load_matrices_at(w[i], kGated ? here ^ (i * 32) : (here ^ (i % 2 * 64)) + i / 2 * 128);
#pragma unroll
    for (uint32_t i = 0; i < (kGated ? 2 : 4); ++i) load_matrices_at(r[i], x.place + i * 64);
    x.place += kGated ? x.next : 2 * x.next;
    ring.advance();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kGated) {
        step(sums[0], r[i / 2][i % 2 * 2], r[i / 2][i % 2 * 2 + 1], w[i][0], w[i][1]);
        step(sums[1], r[i / 2][i % 2 * 2], r[i / 2][i % 2 * 2 + 1], w[i][2], w[i][3]);
      } else {
        if (i == 2 && k + kGatedDepth >= length) break;  // the last stage is half of one
        step(sums[0], r[i][0], r[i][1], w[i][0], w[i][1]);
        step(sums[0], r[i][2], r[i][3], w[i][2], w[i][3]);
      }
    }
    if constexpr (!kGated)
      if (k + kDepth == half) first.take(sums[0]);
  }
  if constexpr (!kGated)
    if (half > 0) first.add_to(sums[0]);
}

}  // namespace nanovllm::layer_products
