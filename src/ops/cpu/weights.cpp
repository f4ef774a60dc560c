#include "ops/cpu/weights.h"

#include <algorithm>
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/threads.h"

namespace nanovllm::cpu {
namespace {

template <class To, class From>
To convert_one(From value) {
  if constexpr (std::is_same_v<To, From>)
    return value;
  else
    return static_cast<To>(static_cast<float>(value));
}

/// Calls body with the two element types.
template <class Body>
void dispatch_conversion(DType dst, DType src, Body&& body) {
  dispatch_float(dst, [&]<class To>() {
    if (src == DType::f32)
      body.template operator()<To, float>();
    else if (src == DType::bf16)
      body.template operator()<To, bf16>();
    else if (src == DType::f16)
      body.template operator()<To, f16>();
    else
      fail(ErrorKind::model, "cannot load {} values as weights: f32, f16 and bf16 are supported",
           name_of(src));
  });
}

/// Rows [begin, end) of the source, in tiles small enough for the first-level cache on both sides.
/// The source may be unaligned (a mapped file), hence the copies.
template <class To, class From>
void pack_tile_rows(To* dst, const WeightLayout& layout, int64_t first, const Tensor& source,
                    int64_t begin, int64_t end) {
  constexpr int64_t kRows = 64, kColumns = 64;
  From values[kColumns];
  for (int64_t r0 = begin; r0 < end; r0 += kRows) {
    for (int64_t c0 = 0; c0 < layout.k; c0 += kColumns) {
      const int64_t columns = std::min(kColumns, layout.k - c0);
      for (int64_t r = r0; r < std::min(end, r0 + kRows); ++r) {
        std::memcpy(static_cast<void*>(values),
                    source.data + static_cast<size_t>(r * source.stride[0] + c0) * sizeof(From),
                    static_cast<size_t>(columns) * sizeof(From));
        To* row = dst + layout.rows.offset(first + r);
        const int64_t* at = layout.columns.data() + c0;
        for (int64_t c = 0; c < columns; ++c) row[at[c]] = convert_one<To>(values[c]);
      }
    }
  }
}

}  // namespace

WeightLayout panel_layout(DType dtype, int64_t n, int64_t k) {
  WeightLayout layout;
  layout.n = n;
  layout.k = k;
  const int64_t blocks = (n + kGemmBlock - 1) / kGemmBlock;
  layout.bytes = static_cast<size_t>(blocks * kGemmBlock * k) * size_of(dtype);
  layout.padded = n % kGemmBlock != 0;
  layout.rows = {.outer_stride = kGemmBlock * k, .digits = {{kGemmBlock, 1}}};
  layout.columns.resize(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) layout.columns[static_cast<size_t>(i)] = i * kGemmBlock;
  return layout;
}

void pack_rows(std::byte* dst, DType dtype, const WeightLayout& layout, int64_t first,
               const Tensor& source, int threads) {
  dispatch_conversion(dtype, source.dtype, [&]<class To, class From>() {
    // Shares are whole groups of 64 rows, so that threads do not write to one cache line.
    const int64_t rows = source.shape[0], groups = (first % 64 + rows + 63) / 64;
    parallel_for(threads, groups, rows * layout.k, [&](int64_t begin, int64_t end, int) {
      const auto row = [&](int64_t group) {
        return std::clamp<int64_t>(group * 64 - first % 64, 0, rows);
      };
      pack_tile_rows<To, From>(reinterpret_cast<To*>(dst), layout, first, source, row(begin),
                               row(end));
    });
  });
}

void convert(std::byte* dst, DType dst_type, const std::byte* src, DType src_type, int64_t n) {
  dispatch_conversion(dst_type, src_type, [&]<class To, class From>() {
    for (int64_t i = 0; i < n; ++i) {
      From value;
      std::memcpy(static_cast<void*>(&value), src + static_cast<size_t>(i) * sizeof(From),
                  sizeof(From));
      reinterpret_cast<To*>(dst)[i] = convert_one<To>(value);
    }
  });
}

}  // namespace nanovllm::cpu
