// Quantised weights as a GPU keeps them: where their numbers lie.
//
// Eight rows by 128 columns are a record: the numbers, ordered so that a lane (g = lane / 4, t =
// lane % 4) finds in 16 bytes what it holds of row g in tensor core tiles (mma.cuh), then a word of
// scale for each group of columns and row. The records of eight rows follow each other. Where a
// whole row has one scale, these words lie behind all records instead. Last come zero points, a
// byte for each row and group. Four bits whose scales leave room have them in the words as well,
// and there the bytes' second highest bit is not the highest one.
//
// Four bits, from -8 as 0: word i of a lane's four has steps 2i and 2i + 1 of 16 columns, and its
// bits 4p .. 4p + 3 and 16 + 4p .. are pair p: columns 2t and 2t + 1 of the first step, 2t + 8 and
// 2t + 9 of it, and the same of the second. Eight bits (int8 from -128 as 0): a word has one step,
// its bytes are columns 2t, 2t + 1, 2t + 8, 2t + 9; the lanes' second 16 bytes lie behind all first
// ones.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "core/weight.h"
#include "ops/cuda/gemm/gemm_kernels.h"

namespace nanovllm {

/// The bit in which a zero point's byte differs where its scale's word has it as well.
constexpr int kZeroInScale = 0x40;

constexpr int packed_number_bytes(WeightFormat format) {
  return kPackedRows * kPackedColumns * format.bits() / 8;
}

/// Of a weight [n, k]; n is a multiple of 8, k of 128, and a group is 32, 64, a multiple of 128 or
/// k columns.
struct PackedLayout {
  int64_t n, k, group;
  int groups;                 // of a record that have scales in it: 1, 2, 4; 0: whole rows have
  int record_bytes, columns;  // records side by side
  constexpr PackedLayout(WeightFormat format, int64_t rows, int64_t cols)
      : n(rows),
        k(cols),
        group(format.group),
        groups(packed_groups(format, cols)),
        record_bytes(packed_record_bytes(format, cols)),
        columns(static_cast<int>(k / kPackedColumns)) {}
  constexpr int64_t records() const { return n / kPackedRows * columns; }
  constexpr int64_t row_scales() const { return records() * record_bytes; }  // bytes before them
  constexpr int64_t zeros() const { return row_scales() + (groups == 0 ? n * 4 : 0); }
  constexpr int64_t bytes(bool has_zeros) const {
    return zeros() + (has_zeros ? n * (k / group) : 0);
  }
};

/// f<numbers>() of a packed weight's.
template <class F>
void with_numbers(WeightFormat format, F&& f) {
  switch (format.numbers) {
    case WeightFormat::int4:
      return f.template operator()<WeightFormat::int4>();
    case WeightFormat::int8:
      return f.template operator()<WeightFormat::int8>();
    default:
      return f.template operator()<WeightFormat::e4m3>();
  }
}

/// Whether registers unpack it: all zero points are 0, or the numbers have 4 bits; and then scales
/// have at most 12 significant bits.
bool unpacks_evenly(WeightFormat format, const QuantizedRows& rows);

/// Fills the weight from numbers [n, k] (as QuantizedRows has them), scales and, but for E4M3,
/// zeros [n, k / group], all on the device.
void pack_weight(const Weight& to, const int8_t* numbers, const float* scales, const int8_t* zeros,
                 bool even, cudaStream_t stream);

/// to [n, k], dense: the weight's numbers.
void unpack_weight(Tensor to, const Weight& from, bool even, cudaStream_t stream);

}  // namespace nanovllm
