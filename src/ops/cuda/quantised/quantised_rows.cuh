// Where rows of E4M3 numbers and their scales (docs/contract.md has the definition) lie for
// gemm_fp8.cuh, whoever makes them: numbers [m, k]; a scale for each row, or [k / 128, m] of groups
// of 128.
#pragma once

#include "ops/cuda/ptx/e4m3.cuh"
#include "ops/cuda/quantised/fp8_kernels.h"

namespace nanovllm {

constexpr int kGroupLanes = kRowGroup / Vec<__nv_bfloat16>::size;  // that have a group

struct QuantisedRows {
  uint2* numbers;  // in eights
  float* scales;
  int columns;
  int scale_stride;  // from a group of columns to the next
  __device__ void put(int64_t row, int column, const Vec<__nv_bfloat16>& v, float scale) const {
    numbers[(row * columns + column) / 8] = quantise_eight(v, scale);
  }
  /// The same with the scale of its group, whose other eights the lanes beside this one have.
  __device__ void put_of_group(int64_t row, int column, const Vec<__nv_bfloat16>& v,
                               bool inside = true) const {
    const float scale = row_scale(most_of_lanes<kGroupLanes>(most_of(v)));
    if (!inside) return;
    if (column % kRowGroup == 0) scales[int64_t{column / kRowGroup} * scale_stride + row] = scale;
    put(row, column, v, scale);
  }
};

inline QuantisedRows rows_in(std::byte* numbers, std::byte* scales, int64_t rows, int64_t columns) {
  return {reinterpret_cast<uint2*>(numbers), reinterpret_cast<float*>(scales),
          static_cast<int>(columns), static_cast<int>(rows_with_room(rows))};
}

}  // namespace nanovllm
