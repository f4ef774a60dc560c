// Eight or sixteen rows of a packed weight (packed.cuh) by some rows of x, on any GPU: the weight's
// numbers become bf16 in registers, where they are an operand of mma.sync m16n8k16. One chain of
// k16 steps from zero: the bits of gemm_in_order.
#pragma once

#include "ops/cuda/quantised/packed.cuh"

namespace nanovllm {

/// A warp's tile: one or two eights of the weight's rows, which need not be neighbours, by kTiles
/// eights of rows of x. kGrouped: several groups of a record have scales.
///
/// Two eights are A: sum[j] is of C [16, 8], whose rows are the weight's. One is B, so that the
/// rows of x are A: sum[j / 2] is of C [16, 8], whose columns are the weight's rows. The bits are
/// the same.
template <WeightFormat::Numbers packing, int kUnitsOf, int kTilesOf, bool kGrouped>
struct PackedTile {
  static constexpr bool kPlain = false;
  static constexpr int kUnits = kUnitsOf, kTiles = kTilesOf;
  static constexpr int kSums = kUnits == 2 ? kTiles : (kTiles + 1) / 2,
                       kPitch = mma_panel_pitch(kTiles);
  static constexpr int kNumberBytes = packed_number_bytes(packing);  // of a record
  float sum[kSums][4];
  FirstHalf<4> first[kSums];               // of a weight in halves
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
  /// Between the halves of k, and behind the second.
  __device__ void end_first_half() {
#pragma unroll
    for (int j = 0; j < kSums; ++j) first[j].take(sum[j]);
  }
  __device__ void add_halves() {
#pragma unroll
    for (int j = 0; j < kSums; ++j) first[j].add_to(sum[j]);
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
  /// One step of k16; b: the quarter's rows of x.
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
  /// The lane's place in rows of x, from their first column on. Of fewer than eight rows other
  /// lanes read the last one again.
  __device__ static int row_place(int lane, int rows) {
    const int row = kTiles == 1 ? min(lane % 8, rows - 1) : lane % 8;
    return row * kPitch + lane / 8 * 16;
  }
  /// At the first chunk of a panel of x.
  __device__ void begin_panel(uint32_t) {}
  /// Adds a chunk of 128 columns. `rows`: the lane's place of it in x; `more`: the next chunk's
  /// columns lie behind these. next() is called when the chunk's records have been read, and gives
  /// the place of the next ones.
  template <class Next>
  __device__ __forceinline__ void multiply(uint32_t rows, [[maybe_unused]] bool more, Next&& next) {
    const auto multiply_quarter = [&]<int quarter>() {
      uint32_t b[kTiles][4];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) load_matrices(b[j], rows + j * 8 * kPitch + quarter * 64);
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
