// Eight or sixteen rows of a packed weight (packed.cuh) by some rows of x, on any GPU: the weight's
// numbers become bf16 in registers, where they are an operand of mma.sync m16n8k16. One chain of
// k16 steps from zero: the bits of gemm_in_order.
#pragma once

#include "ops/cuda/quantised/packed.cuh"

namespace nanovllm {

/// Eight rows of x by 32 columns, two steps of k16, from shared memory: b[0], b[1] of the first.
/// `place`: of the lane's 16 bytes, columns 8 (lane / 8) and on of row lane % 8.
__device__ inline void load_row_quarter(uint32_t (&b)[4], uint32_t place) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(place));
}

/// A warp's tile: one or two eights of the weight's rows, which need not be neighbours, by kTiles
/// eights of rows of x. kGrouped: several groups of a record have scales.
///
/// Two eights are A: sum[j] is of C [16, 8], whose rows are the weight's. One is B, so that the
/// rows of x are A: sum[j / 2] is of C [16, 8], whose columns are the weight's rows. The bits are
/// the same.
template <WeightFormat::Numbers packing, int kUnits, int kTiles, bool kGrouped>
struct PackedTile {
  static constexpr int kSums = kUnits == 2 ? kTiles : (kTiles + 1) / 2;
  float sum[kSums][4];
  PackedNumbers<packing, kUnits> numbers;  // of the next chunk, from begin() or multiply() on
  Unpack<packing> unpack[kUnits];
  uint32_t a[2][2][4];  // the quarter that is multiplied next, and the one after it
  int unit_bytes, groups;

  /// The eights' records lie `apart` bytes from each other; `groups_of_record`:
  /// PackedLayout::groups. Where that is 0, numbers.scales are the caller's.
  __device__ PackedTile(int apart, int groups_of_record)
      : unit_bytes(apart), groups(groups_of_record) {
    clear();
  }
  __device__ void clear() {
#pragma unroll
    for (auto& c : sum) c[0] = c[1] = c[2] = c[3] = 0.0f;
  }
  template <int quarter>
  __device__ __forceinline__ void unpack_next() {
    if constexpr (kGrouped && quarter > 0)
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        unpack[u] = Unpack<packing>(numbers.scale(unit_bytes, u, groups * quarter / 4));
    unpack_quarter<quarter>(a[quarter % 2], numbers, unpack, unit_bytes, 1);
  }
  /// Takes the first records, in shared memory.
  __device__ __forceinline__ void begin(const unsigned char* records) {
    numbers.load(records, unit_bytes, groups > 0);
    unpack_next<0>();
  }
  /// One step of k16; b: load_row_quarter()'s.
  template <int step>
  __device__ __forceinline__ void add(const uint32_t (&w)[4], const uint32_t (&b)[kTiles][4]) {
#pragma unroll
    for (int j = 0; j < kSums; ++j)
      if constexpr (kUnits == 2) {
        mma_m16n8k16(sum[j], w, b[j][2 * step], b[j][2 * step + 1]);
      } else {
        constexpr bool kPairs = kTiles > 1;
        constexpr int kSecond = kPairs ? 1 : 0;
        const auto &first = b[2 * j], &second = b[2 * j + kSecond];
        mma_m16n8k16(sum[j],
                     {first[2 * step], kPairs ? second[2 * step] : 0u, first[2 * step + 1],
                      kPairs ? second[2 * step + 1] : 0u},
                     w[0], w[2]);
      }
  }
  /// Adds a chunk of 128 columns. rows(b, tile, quarter) loads what it needs of x
  /// (load_row_quarter). next() is called when the chunk's records have been read, and gives the
  /// place of the next ones.
  template <class Rows, class Next>
  __device__ __forceinline__ void multiply(Rows&& rows, Next&& next) {
    const auto multiply_quarter = [&]<int quarter>() {
      uint32_t b[kTiles][4];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) rows(b[j], j, quarter);
      unpack_next<(quarter + 1) % 4>();
      if constexpr (quarter == 2) numbers.load(next(), unit_bytes, groups > 0);
      add<0>(a[quarter % 2][0], b);
      add<1>(a[quarter % 2][1], b);
    };
    multiply_quarter.template operator()<0>();
    multiply_quarter.template operator()<1>();
    multiply_quarter.template operator()<2>();
    multiply_quarter.template operator()<3>();
  }
};

}  // namespace nanovllm
