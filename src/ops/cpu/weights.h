// How a plain weight matrix w[n, k] lies in memory for gemm() and embedding(): a blocked layout
// that oneDNN chose, or our own panels of 16 rows. Either way the place of an element is the sum of
// a term of its row and a term of its column, so one description serves packing (straight from the
// mapped file, no second copy) and reading single rows back out (tied embeddings).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/weight.h"
#include "ops/cpu/kernels/kernels.h"

namespace nanovllm::cpu {

/// One axis of a blocked layout: the offset of an index is index / block * outer_stride plus its
/// digits inside the block.
struct BlockedAxis {
  struct Digit {
    int64_t size, stride;  // innermost first
  };
  int64_t outer_stride = 0;
  std::vector<Digit> digits;

  int64_t offset(int64_t index) const {
    int64_t at = 0;
    for (const Digit& digit : digits) {
      at += index % digit.size * digit.stride;
      index /= digit.size;
    }
    return at + index * outer_stride;
  }
};

struct WeightLayout {
  int64_t n = 0, k = 0;
  size_t bytes = 0;
  bool padded = false;  // some of the bytes belong to no element and must be zero
  BlockedAxis rows;
  std::vector<int64_t> columns;  // offset of every column
};

/// Panels of kGemmBlock rows: [ceil(n / 16), k, 16].
WeightLayout panel_layout(DType dtype, int64_t n, int64_t k);
/// The order in which bf16 tile products read a weight: [ceil(n / 32), ceil(k / 32), 2 tiles, 16
/// pairs of columns, 16 rows, 2].
WeightLayout tile_layout(int64_t n, int64_t k);

/// Writes rows [first, first + source.shape[0]) of the matrix at `dst` from a host matrix of any
/// float type, its rows possibly strided.
void pack_rows(std::byte* dst, DType dtype, const WeightLayout& layout, int64_t first,
               const Tensor& source, int threads);

/// How a quantised weight [n, k] lies at `data`; its panels take this many bytes.
QuantisedPanels quantised_panels(const std::byte* data, WeightFormat format, int64_t k);
size_t quantised_bytes(WeightFormat format, int64_t n, int64_t k);
/// The scale of all rows that meet it, or 0 where they have their own.
float input_scale(const std::byte* data, WeightFormat format, int64_t n, int64_t k);
/// Writes it there.
void pack_quantised(std::byte* data, WeightFormat format, int64_t n, int64_t k,
                    const QuantizedRows& rows, int threads);

/// y = row `row` of the packed matrix.
template <class T>
void unpack_row(T* y, const T* packed, const WeightLayout& layout, int64_t row) {
  const T* p = packed + layout.rows.offset(row);
  for (size_t i = 0; i < layout.columns.size(); ++i) y[i] = p[layout.columns[i]];
}

/// Converts n elements between float types (f32, f16, bf16 to f32 or bf16).
void convert(std::byte* dst, DType dst_type, const std::byte* src, DType src_type, int64_t n);

}  // namespace nanovllm::cpu
