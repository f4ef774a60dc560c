#include "ops/cpu/weights.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "ops/cpu/threads.h"

namespace nanovllm::cpu {
namespace {

/// n values from memory that need not be aligned (a mapped file).
template <class To, class From>
void convert_row(To* to, const std::byte* from, int64_t n) {
  if constexpr (std::is_same_v<To, From>) {
    std::memcpy(static_cast<void*>(to), from, static_cast<size_t>(n) * sizeof(To));
  } else {
    for (int64_t i = 0; i < n; ++i) {
      From value;
      std::memcpy(static_cast<void*>(&value), from + static_cast<size_t>(i) * sizeof(From),
                  sizeof(From));
      to[i] = static_cast<To>(static_cast<float>(value));
    }
  }
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

/// Two elements that are moved as one.
struct Pair {
  bf16 first, second;
};

/// Whether the layout keeps neighbouring columns side by side, as bf16 dot products want them.
bool keeps_pairs(const WeightLayout& layout) {
  if (layout.k % 2 || layout.rows.offset(1) % 2) return false;
  for (size_t c = 0; c < layout.columns.size(); c += 2)
    if (layout.columns[c] % 2 || layout.columns[c + 1] != layout.columns[c] + 1) return false;
  return true;
}

constexpr int64_t kTile = 64;

/// Packs rows [begin, end) of the source, which become rows first + begin .. of the matrix, in
/// units of one element or a pair; `columns` are the units' offsets, in units. Works in tiles that
/// stay in the first-level cache, down their columns: those are scattered in the source but
/// together in the layout.
template <class To, class From, class Unit>
void pack_range(std::byte* dst, const WeightLayout& layout, std::span<const int64_t> columns,
                int64_t first, const Tensor& source, int64_t begin, int64_t end) {
  constexpr int64_t kElements = sizeof(Unit) / sizeof(To);
  Unit* const to = reinterpret_cast<Unit*>(dst);
  for (int64_t r0 = begin; r0 < end; r0 += kTile) {
    int64_t rows[kTile];
    const int64_t count = std::min(kTile, end - r0);
    for (int64_t r = 0; r < count; ++r) rows[r] = layout.rows.offset(first + r0 + r) / kElements;
    for (int64_t c0 = 0; c0 < layout.k; c0 += kTile) {
      const int64_t width = std::min(kTile, layout.k - c0);
      Unit tile[kTile][kTile / kElements];
      for (int64_t r = 0; r < count; ++r)
        convert_row<To, From>(
            reinterpret_cast<To*>(tile[r]),
            source.data + static_cast<size_t>((r0 + r) * source.stride[0] + c0) * sizeof(From),
            width);
      for (int64_t c = 0; c < width / kElements; ++c) {
        const int64_t column = columns[static_cast<size_t>(c0 / kElements + c)];
        for (int64_t r = 0; r < count; ++r) to[column + rows[r]] = tile[r][c];
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

WeightLayout tile_layout(int64_t n, int64_t k) {
  WeightLayout layout;
  layout.n = n;
  layout.k = k;
  const int64_t blocks = (n + kTileColumns - 1) / kTileColumns, steps = (k + kTileK - 1) / kTileK;
  constexpr int64_t kLanes = 16, kTile = kLanes * kTileK;
  layout.bytes = static_cast<size_t>(blocks * steps * 2 * kTile) * sizeof(bf16);
  layout.padded = n % kTileColumns != 0 || k % kTileK != 0;
  layout.rows = {.outer_stride = steps * 2 * kTile, .digits = {{kLanes, 2}, {2, kTile}}};
  layout.columns.resize(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i)
    layout.columns[static_cast<size_t>(i)] =
        i / kTileK * 2 * kTile + i % kTileK / 2 * 2 * kLanes + i % 2;
  return layout;
}

void pack_rows(std::byte* dst, DType dtype, const WeightLayout& layout, int64_t first,
               const Tensor& source, int threads) {
  const bool pairs = dtype == DType::bf16 && keeps_pairs(layout);
  std::vector<int64_t> columns = layout.columns;
  if (pairs) {
    columns.clear();
    for (size_t c = 0; c < layout.columns.size(); c += 2) columns.push_back(layout.columns[c] / 2);
  }
  dispatch_conversion(dtype, source.dtype, [&]<class To, class From>() {
    // Shares are whole groups of 64 rows of the matrix, so that threads do not write to one cache
    // line.
    const int64_t rows = source.shape[0], before = first % kTile,
                  groups = (before + rows + kTile - 1) / kTile;
    parallel_for(threads, groups, rows * layout.k, [&](int64_t begin, int64_t end, int) {
      const auto row = [&](int64_t group) {
        return std::clamp<int64_t>(group * kTile - before, 0, rows);
      };
      if constexpr (sizeof(To) == sizeof(bf16)) {
        if (pairs) {
          pack_range<To, From, Pair>(dst, layout, columns, first, source, row(begin), row(end));
          return;
        }
      }
      pack_range<To, From, To>(dst, layout, columns, first, source, row(begin), row(end));
    });
  });
}

namespace {

int64_t panels_of(int64_t n) { return (n + kGemmBlock - 1) / kGemmBlock; }

/// Columns of a row's numbers as one unit: 4 of 8 bits or 8 of 4, the first lowest.
template <int BITS>
uint32_t unit_of(const int8_t* numbers) {
  if constexpr (BITS == 8) {
    uint32_t unit = 0;
    std::memcpy(&unit, numbers, sizeof unit);
    return unit;
  } else {
    uint64_t x = 0;
    std::memcpy(&x, numbers, sizeof x);
    x = (x & 0x0f0f0f0f0f0f0f0f) ^ 0x0808080808080808;  // -8 to 7 becomes 0 to 15
    x = (x | x >> 4) & 0x00ff00ff00ff00ff;
    x = (x | x >> 8) & 0x0000ffff0000ffff;
    return static_cast<uint32_t>(x | x >> 16);
  }
}

/// The numbers of `rows` neighbouring rows of k columns: units [ceil(k / per unit), kGemmBlock].
template <int BITS>
void pack_units(std::byte* to, const int8_t* numbers, int64_t rows, int64_t k) {
  constexpr int64_t kColumns = 32 / BITS, kAtOnce = 16;  // units of a row: its cache line of int8
  const int64_t whole = k / kColumns;
  for (int64_t first = 0; first < whole; first += kAtOnce)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = first; i < std::min(first + kAtOnce, whole); ++i) {
        const uint32_t unit = unit_of<BITS>(numbers + r * k + i * kColumns);
        std::memcpy(to + (i * kGemmBlock + r) * 4, &unit, sizeof unit);
      }
  if (whole * kColumns == k) return;
  for (int64_t r = 0; r < rows; ++r) {
    int8_t last[kColumns];
    std::fill_n(last, kColumns, static_cast<int8_t>(BITS == 4 ? -8 : 0));  // whose bits are 0
    std::copy(numbers + r * k + whole * kColumns, numbers + (r + 1) * k, last);
    const uint32_t unit = unit_of<BITS>(last);
    std::memcpy(to + (whole * kGemmBlock + r) * 4, &unit, sizeof unit);
  }
}

/// One panel: rows [first, first + 16) of n, as far as there are any.
void pack_panel(std::byte* panel, const QuantisedPanels& w, WeightFormat format, int64_t first,
                int64_t n, const QuantizedRows& all) {
  const int64_t groups = format.groups(w.k), rows = std::min(kGemmBlock, n - first);
  std::memset(panel, 0, static_cast<size_t>(rows < kGemmBlock ? w.panel_bytes : w.units));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      const auto at = static_cast<size_t>((first + r) * groups + g);
      std::memcpy(panel + (g * kGemmBlock + r) * 4, &all.scales[at], sizeof(float));
      if (format.has_zeros())
        panel[w.zeros + g * kGemmBlock + r] =
            static_cast<std::byte>(all.zeros[at] + (format.bits() == 4 ? 8 : 0));
    }
  const auto pack = format.bits() == 4 ? pack_units<4> : pack_units<8>;
  pack(panel + w.units, all.numbers.data() + first * w.k, rows, w.k);
}

}  // namespace

QuantisedPanels quantised_panels(const std::byte* data, WeightFormat format, int64_t k) {
  constexpr int64_t kUnit = kGemmBlock * 4;
  const int64_t groups = format.groups(k), per_unit = 32 / format.bits(), zeros = groups * kUnit,
                bytes = format.has_zeros() ? groups * kGemmBlock : 0,
                units = zeros + (bytes + kUnit - 1) / kUnit * kUnit;
  return {.data = reinterpret_cast<const uint8_t*>(data),
          .k = k,
          .group = format.group,
          .zeros = zeros,
          .units = units,
          .panel_bytes = units + (k + per_unit - 1) / per_unit * kUnit};
}

namespace {
// input_scale lies behind the panels.
size_t all_panels_bytes(WeightFormat format, int64_t n, int64_t k) {
  return static_cast<size_t>(panels_of(n) * quantised_panels(nullptr, format, k).panel_bytes);
}
}  // namespace

size_t quantised_bytes(WeightFormat format, int64_t n, int64_t k) {
  return all_panels_bytes(format, n, k) +
         (format.rows == WeightFormat::Rows::tensor ? sizeof(float) : 0);
}

float input_scale(const std::byte* data, WeightFormat format, int64_t n, int64_t k) {
  float scale = 0;
  if (format.rows == WeightFormat::Rows::tensor)
    std::memcpy(&scale, data + all_panels_bytes(format, n, k), sizeof scale);
  return scale;
}

void pack_quantised(std::byte* data, WeightFormat format, int64_t n, int64_t k,
                    const QuantizedRows& rows, int threads) {
  const QuantisedPanels w = quantised_panels(data, format, k);
  if (format.rows == WeightFormat::Rows::tensor)
    std::memcpy(data + all_panels_bytes(format, n, k), &rows.input_scale, sizeof(float));
  parallel_for(threads, panels_of(n), n * k, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; ++p)
      pack_panel(data + p * w.panel_bytes, w, format, p * kGemmBlock, n, rows);
  });
}

void convert(std::byte* dst, DType dst_type, const std::byte* src, DType src_type, int64_t n) {
  dispatch_conversion(dst_type, src_type, [&]<class To, class From>() {
    convert_row<To, From>(reinterpret_cast<To*>(dst), src, n);
  });
}

}  // namespace nanovllm::cpu
