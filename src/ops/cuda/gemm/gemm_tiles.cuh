// How products of few rows cut x and y into blocks of rows.
#pragma once

#include <algorithm>

#include "ops/cuda/core/layout.h"

namespace nanovllm {

/// The rows of x that a block of `tile_rows` copies of `rows` in all: no more than there are, in
/// eights.
inline int copied_rows(int64_t tile_rows, int64_t rows) {
  return static_cast<int>(std::min(tile_rows, ceil_div(rows, 8) * 8));
}

/// Where a block's tile lies: its first row of x and y, its first column of y.
struct TilePlace {
  int row, column;
  int own;  // rows before are another block's as well
};

/// The tile of block `block`, of `outputs` columns. The last rows' block begins early rather than
/// end behind them: the copy engine is slow where it fills with zeros.
template <class Shape>
__device__ TilePlace place_of(const Shape& shape, int outputs, int block) {
  const int own = block % shape.row_blocks * shape.block_rows;
  return {max(min(own, shape.rows - shape.block_rows), 0), block / shape.row_blocks * outputs, own};
}

}  // namespace nanovllm
