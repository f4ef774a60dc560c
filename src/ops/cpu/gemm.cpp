// Weights and what reads them: gemm, embedding.
#include <algorithm>
#include <cstring>

#include "ops/cpu/cpu_backend.h"
#include "ops/cpu/shapes.h"
#include "ops/cpu/threads.h"

namespace nanovllm::cpu {
namespace {

/// Sums of so many products of integers are exact in 32 bits.
constexpr int64_t kMostQuantisedColumns = int64_t{1} << 17;

/// y = x w^T for the weight's panels [begin, end). A quantised weight is not read as the task's w.
template <class T>
GemmTask<T> panel_task(const Tensor& y, const Tensor& x, const Weight& w, int64_t begin,
                       int64_t end, float* scratch) {
  return {.x = x.ptr<T>(),
          .x_stride = x.stride[0],
          .w = reinterpret_cast<const T*>(w.data.data),
          .y = y.data,
          .y_is_f32 = y.dtype == DType::f32,
          .y_stride = y.stride[0],
          .m = x.shape[0],
          .n = w.n(),
          .k = w.k(),
          .first_block = begin,
          .end_block = end,
          .scratch = scratch};
}

/// Of each half of a weight in halves, which has a layout of its own.
WeightFormat format_of_half(WeightFormat format, int64_t k) {
  format.in_halves = false;
  format.group = std::min(format.group, k / 2);
  return format;
}

/// Its numbers, scales and zero points.
QuantizedRows half_of(const QuantizedRows& rows, WeightFormat format, int64_t n, int64_t k,
                      int64_t half) {
  const int64_t groups = format.groups(k), some = std::max<int64_t>(groups / 2, 1),
                first_group = groups > 1 ? half * some : 0;
  QuantizedRows out;
  const auto copy = [n](auto& to, const auto& from, int64_t stride, int64_t begin, int64_t count) {
    for (int64_t row = 0; !from.empty() && row < n; ++row)
      to.insert(to.end(), from.begin() + row * stride + begin,
                from.begin() + row * stride + begin + count);
  };
  copy(out.numbers, rows.numbers, k, half * (k / 2), k / 2);
  copy(out.scales, rows.scales, groups, first_group, some);
  copy(out.zeros, rows.zeros, groups, first_group, some);
  return out;
}

/// Of scratch memory in front of panels, for rows of x: products of pairs read them as they are.
int64_t rows_floats(const GemmTask<bf16>& task) {
  return task.segment > 0 ? 0 : gemm_scratch_floats(task.k);
}

}  // namespace

const WeightLayout& CpuBackend::layout(DType dtype, int64_t n, int64_t k) const {
  check(n > 0 && k > 0 && (dtype == DType::f32 || dtype == DType::bf16),
        "no weight layout for {}[{}, {}]", name_of(dtype), n, k);
  if (uses_onednn(dtype)) return onednn_->layout(dtype, n, k);
  const auto [it, is_new] = own_layouts_.try_emplace({dtype, n, k});
  if (is_new) it->second = uses_tiles(dtype) ? tile_layout(n, k) : panel_layout(dtype, n, k);
  return it->second;
}

// oneDNN takes no panels: they are kept where our products add in its order. Products with
// quantised rows have an order of their own.
bool CpuBackend::keeps(WeightFormat format, int64_t, int64_t k, bool) const {
  if (format.quantises_rows()) return k <= kMostQuantisedColumns;
  // Each half has its own scales.
  if (format.in_halves && format.group < k && k / 2 % format.group != 0) return false;
  return !uses_onednn(DType::bf16) || segment(format.in_halves ? k / 2 : k) > 0;
}

size_t CpuBackend::weight_bytes(WeightFormat format, int64_t n, int64_t k) const {
  if (format.in_halves) return 2 * weight_bytes(format_of_half(format, k), n, k / 2);
  if (format.is_quantised() && !format.quantises_rows() && uses_onednn(DType::bf16))
    most_paired_ = std::max(most_paired_, k);
  if (format.is_quantised()) return quantised_bytes(format, n, k);
  return layout(dtype_of(format), n, k).bytes;
}

Weight CpuBackend::weight_view(std::byte* data, WeightFormat format, int64_t n, int64_t k) const {
  Tensor view(data, dtype_of(format), {n, k}, device());
  view.packed = format.in_halves ? 2 : 1;
  return {view, format};
}

void CpuBackend::load(Tensor dst, std::span<const Tensor> parts) {
  int64_t rows = 0;
  for (const Tensor& part : parts) {
    check(part.rank == dst.rank && part.defined(), ErrorKind::model, "cannot load {} into {}", part,
          dst);
    int64_t step = 1;
    for (size_t axis = static_cast<size_t>(part.rank); axis-- > 1; step *= part.shape[axis])
      check(part.shape[axis] == dst.shape[axis] &&
                (part.stride[axis] == step || part.shape[axis] == 1),
            ErrorKind::model, "cannot load {} into {}", part, dst);
    rows += part.shape[0];
  }
  check(rows == dst.shape[0], ErrorKind::model, "cannot load {} rows into {}", rows, dst);

  if (dst.packed) {
    const int64_t columns = dst.shape[1] / dst.packed;
    const WeightLayout& where = layout(dst.dtype, dst.shape[0], columns);
    for (int64_t column = 0; column < dst.shape[1]; column += columns) {
      std::byte* const to = dst.data + static_cast<size_t>(column / columns) * where.bytes;
      if (where.padded) std::memset(to, 0, where.bytes);
      for (int64_t first = 0; const Tensor& part : parts) {
        pack_rows(to, dst.dtype, where, first, part.cols(column, column + columns), threads_);
        first += part.shape[0];
      }
    }
    return;
  }
  check(dst.contiguous(), "load() into a strided {}", dst);
  const int64_t row = dst.shape[0] > 0 ? dst.numel() / dst.shape[0] : 0;
  std::byte* to = dst.data;
  for (const Tensor& part : parts)
    for (int64_t r = 0; r < part.shape[0]; ++r, to += static_cast<size_t>(row) * size_of(dst.dtype))
      convert(to, dst.dtype,
              part.data + static_cast<size_t>(r * part.stride[0]) * size_of(part.dtype), part.dtype,
              row);
}

void CpuBackend::load_quantised(Weight dst, const QuantizedRows& rows) {
  const int64_t n = dst.n(), k = dst.k();
  const auto numbers = static_cast<size_t>(n * k),
             scales = static_cast<size_t>(n * dst.format.groups(k));
  check(dst.format.is_quantised() && rows.numbers.size() == numbers &&
            rows.scales.size() == scales &&
            rows.zeros.size() == (dst.format.has_zeros() ? scales : 0) &&
            (rows.input_scale > 0) == (dst.format.rows == WeightFormat::Rows::tensor),
        "cannot load {} quantised numbers into {}", rows.numbers.size(), dst.data);
  if (!dst.format.in_halves) return pack_quantised(dst.data.data, dst.format, n, k, rows, threads_);
  const WeightFormat format = format_of_half(dst.format, k);
  for (int64_t half = 0; half < 2; ++half)
    pack_quantised(dst.data.data + static_cast<size_t>(half) * weight_bytes(format, n, k / 2),
                   format, n, k / 2, half_of(rows, dst.format, n, k, half), threads_);
}

void CpuBackend::gemm(Tensor y, Tensor x, Weight w) {
  const int64_t m = x.shape[0], n = w.n(), k = w.k();
  expect_matrix("gemm x", x, m, k);
  expect_matrix("gemm y", y, m, n);
  check(w.data.packed && w.data.dtype == x.dtype && (y.dtype == x.dtype || y.dtype == DType::f32),
        "gemm {} = {} x {}", y, x, w.data);
  if (m == 0) return;
  if (w.format.in_halves) return gemm_in_halves(y, x, w);
  if (w.format.quantises_rows()) return quantise_rows_and_multiply(y, x, w);
  if (uses_tiles(x.dtype)) return tile_gemm(y, x, w);
  if (w.format.is_quantised()) return quantised_gemm(y, x, w);
  if (uses_onednn(x.dtype)) return onednn_->gemm(y, x, w.data);
  reserve_scratch(gemm_scratch_floats(k));
  dispatch_float(x.dtype, [&]<class T>() {
    const int64_t blocks = (n + kGemmBlock - 1) / kGemmBlock;
    parallel_for(threads_, blocks, m * n * k, [&](int64_t begin, int64_t end, int thread) {
      kernels_.of<T>().gemm(panel_task<T>(y, x, w, begin, end, scratch(thread)));
    });
  });
}

// Rows of a half of x, and of what the second half of the weight makes of them. Sums are f32.
size_t CpuBackend::half_bytes(int64_t m, int64_t n, int64_t k) {
  return static_cast<size_t>(std::min(m, kRowsAsTiles) * (n + k / 2)) * sizeof(float);
}

// The rows of x become dense, as those of a rank that has a half are.
void CpuBackend::gemm_in_halves(const Tensor& y, const Tensor& x, const Weight& w) {
  const int64_t m = x.shape[0], n = w.n(), k = w.k() / 2, most = std::min(m, kRowsAsTiles);
  halves_.reserve(half_bytes(m, n, w.k()));
  const Tensor second(halves_.get(), y.dtype, {most, n}, device()),
      columns(halves_.get() + static_cast<size_t>(most * n) * sizeof(float), x.dtype, {most, k},
              device());
  const WeightFormat format = format_of_half(w.format, w.k());
  const size_t row_bytes = static_cast<size_t>(k) * size_of(x.dtype),
               weight_half = weight_bytes(format, n, k);
  for (int64_t first = 0; first < m; first += most) {
    const int64_t rows = std::min(most, m - first);
    const Tensor to = y.rows(first, first + rows), more = second.rows(0, rows);
    for (int64_t half = 0; half < 2; ++half) {
      const Tensor from = x.rows(first, first + rows).cols(half * k, (half + 1) * k);
      for (int64_t i = 0; i < rows; ++i)
        std::memcpy(columns.data + static_cast<size_t>(i) * row_bytes,
                    from.data + static_cast<size_t>(i * from.stride[0]) * size_of(x.dtype),
                    row_bytes);
      gemm(half == 0 ? to : more, columns.rows(0, rows),
           weight_view(w.data.data + static_cast<size_t>(half) * weight_half, format, n, k));
    }
    add(to, more);
  }
}

void CpuBackend::quantised_gemm(const Tensor& y, const Tensor& x, const Weight& w) {
  GemmTask<bf16> task = panel_task<bf16>(y, x, w, 0, 0, nullptr);
  if (uses_onednn(DType::bf16)) task.segment = segment(w.k());
  reserve_scratch(rows_floats(task) + panel_scratch_floats(w.k()));
  multiply_panels(task, quantised(w.format), quantised_panels(w.data.data, w.format, w.k()));
}

void CpuBackend::multiply_panels(const GemmTask<bf16>& all, const QuantisedKernels& kernels,
                                 const QuantisedPanels& panels) {
  const int64_t m = all.m, n = all.n, k = all.k, blocks = (n + kGemmBlock - 1) / kGemmBlock;
  parallel_for(threads_, blocks, m * n * k, [&](int64_t begin, int64_t end, int thread) {
    GemmTask<bf16> task = all;
    task.scratch = scratch(thread);
    task.first_block = begin;
    task.end_block = end;
    if (m <= kQuantisedRows || !kernels.dequantise) return kernels.gemm(task, panels);
    auto* plain = reinterpret_cast<bf16*>(task.scratch + rows_floats(task));
    QuantisedPanels some = panels;
    for (int64_t block = begin; block < end; block += kPanelsAtOnce) {
      const int64_t count = std::min(kPanelsAtOnce, end - block), column = block * kGemmBlock;
      for (int64_t i = 0; i < count; ++i)
        kernels.dequantise(plain + i * k * kGemmBlock, panels, block + i, 0);
      task.w = plain;
      task.y = static_cast<std::byte*>(all.y) +
               static_cast<size_t>(column) * (all.y_is_f32 ? sizeof(float) : sizeof(bf16));
      task.n = n - column;
      task.first_block = 0;
      task.end_block = count;
      some.data = panels.data + block * panels.panel_bytes;
      kernels.gemm_panels(task, some);
    }
  });
}

size_t CpuBackend::arranged_bytes(int64_t m, int64_t k) const {
  if (!arranges_ || m < kFewestSumRows) return 0;
  return sum_tiles_bytes(std::min(m, kRowsAsTiles), k);
}

// The buffer has arranged tiles, the scales of all rows, then numbers. AMX reads its tiles whole,
// and two at a time.
size_t CpuBackend::quantised_row_bytes(int64_t m, int64_t k) const {
  const int64_t groups = (k + kRowGroup - 1) / kRowGroup, rows = std::min(m, kRowsAsTiles);
  return arranged_bytes(m, k) +
         static_cast<size_t>((rows + 2 * kTileRows - 1) / (2 * kTileRows) * 2 * kTileRows *
                             (quantised_row_stride(k) * 2 + groups * 4));
}

const std::byte* CpuBackend::arrange(const QuantisedNumber* numbers, int64_t m, int64_t k,
                                     const QuantisedKernels& kernels, int64_t group) {
  if (!arranges_ || !kernels.arrange || m < kFewestSumRows || group != kSumGroup ||
      k % kSumGroup != 0)
    return nullptr;
  parallel_for(threads_, m / kSumRows, m * k, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      kernels.arrange(quantised_rows_.get(), t, numbers + t * kSumRows * quantised_row_stride(k),
                      k);
  });
  return quantised_rows_.get();
}

void CpuBackend::quantise_rows_and_multiply(const Tensor& y, const Tensor& x, const Weight& w) {
  const int64_t m = x.shape[0], n = w.n(), k = w.k(),
                groups = w.format.rows == WeightFormat::Rows::group ? w.format.groups(k) : 1;
  static_assert(kSummedColumns == kRowGroup && kLeastRowMagnitude == kLeastMagnitude);
  const QuantisedKernels& kernels = quantised(w.format);
  reserve_scratch(gemm_scratch_floats(k) + panel_scratch_floats(k));
  quantised_rows_.reserve(quantised_row_bytes(m, k));
  float* const scales = reinterpret_cast<float*>(quantised_rows_.get() + arranged_bytes(m, k));
  auto* const numbers =
      reinterpret_cast<QuantisedNumber*>(scales + std::min(m, kRowsAsTiles) * groups);
  const float given = input_scale(w.data.data, w.format, n, k);
  GemmTask<bf16> task = panel_task<bf16>(y, x, w, 0, 0, nullptr);
  task.x = reinterpret_cast<const bf16*>(numbers);
  task.x_stride = quantised_row_stride(k);
  task.row_scales = scales;
  for (int64_t first = 0; first < m; first += kRowsAsTiles) {
    task.m = std::min(kRowsAsTiles, m - first);
    parallel_for(threads_, task.m, 4 * task.m * k, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r)
        kernels.quantise(numbers + r * task.x_stride, scales + r * groups,
                         x.ptr<bf16>() + (first + r) * x.stride[0], k, w.format.group, given);
    });
    task.row_tiles = arrange(numbers, task.m, k, kernels, w.format.group);
    task.y = y.data + static_cast<size_t>(first * y.stride[0]) * size_of(y.dtype);
    multiply_panels(task, kernels, quantised_panels(w.data.data, w.format, k));
  }
}

// A product's last tile of rows has only those that there are.
size_t CpuBackend::row_tiles_bytes(int64_t m, int64_t k) const {
  const int64_t padded_k = (k + kTileK - 1) / kTileK * kTileK, tile_rows = std::min(m, kTileRows),
                tiles = (std::min(m, kRowsAsTiles) + kTileRows - 1) / kTileRows;
  return static_cast<size_t>(tiles * tile_rows * padded_k) * sizeof(bf16);
}

void CpuBackend::tile_gemm(const Tensor& y, const Tensor& x, const Weight& w) {
  const int64_t n = w.n(), k = w.k(), m = x.shape[0];
  const int64_t padded_k = (k + kTileK - 1) / kTileK * kTileK;
  // Of the rows turned into tiles at once, those that stay in a core's cache while the weights
  // pass.
  constexpr int64_t kCachedElements = int64_t{512} << 10;
  const int64_t tile_rows = std::min(m, kTileRows);
  row_tiles_.reserve(row_tiles_bytes(m, k));
  const int64_t sums = tile_scratch_floats(std::min(m, kRowsAsTiles));
  reserve_scratch(sums + (w.format.is_quantised() ? tile_block_floats(k) : 0));
  bf16* tiles = reinterpret_cast<bf16*>(row_tiles_.get());
  for (int64_t first = 0; first < m; first += kRowsAsTiles) {
    const int64_t rows = std::min(kRowsAsTiles, m - first);
    const bf16* from = x.ptr<bf16>() + first * x.stride[0];
    parallel_for(threads_, (rows + kTileRows - 1) / kTileRows, rows * k,
                 [&](int64_t begin, int64_t end, int) {
                   for (int64_t i = begin; i < end; ++i)
                     kernels_.pack_tile(tiles + i * tile_rows * padded_k, tile_rows,
                                        from + i * kTileRows * x.stride[0], x.stride[0],
                                        std::min(kTileRows, rows - i * kTileRows), k);
                 });
    // Even chunks of row pairs; a thread walks the weights' blocks chunk by chunk.
    constexpr int64_t kPair = 2 * kTileRows;
    const int64_t pairs = (rows + kPair - 1) / kPair,
                  most = std::max<int64_t>(1, kCachedElements / (padded_k * kPair)),
                  chunks = (pairs + most - 1) / most,
                  blocks = (n + kTileColumns - 1) / kTileColumns;
    parallel_for(
        threads_, chunks * blocks, rows * n * k, [&](int64_t begin, int64_t end, int thread) {
          for (int64_t unit = begin; unit < end;) {
            const int64_t chunk = unit / blocks, stop = std::min(end, (chunk + 1) * blocks);
            const int64_t row = pairs * chunk / chunks * kPair,
                          last = std::min(rows, pairs * (chunk + 1) / chunks * kPair);
            multiply_blocks(
                {.x = tiles + row * padded_k,
                 .x_stride = tile_rows,
                 .w = reinterpret_cast<const bf16*>(w.data.data),
                 .y = y.data + static_cast<size_t>((first + row) * y.stride[0]) * size_of(y.dtype),
                 .y_is_f32 = y.dtype == DType::f32,
                 .y_stride = y.stride[0],
                 .m = last - row,
                 .n = n,
                 .k = k,
                 .first_block = unit - chunk * blocks,
                 .end_block = stop - chunk * blocks,
                 .scratch = scratch(thread)},
                w, reinterpret_cast<bf16*>(scratch(thread) + sums));
            unit = stop;
          }
        });
  }
}

void CpuBackend::multiply_blocks(GemmTask<bf16> task, const Weight& w, bf16* plain) const {
  if (!w.format.is_quantised()) return kernels_.tile_gemm(task);
  const QuantisedPanels panels = quantised_panels(w.data.data, w.format, task.k);
  const int64_t bytes = tile_block_floats(task.k) * static_cast<int64_t>(sizeof(float)),
                last = (task.n + kGemmBlock - 1) / kGemmBlock, end = task.end_block;
  task.w = plain;
  auto* const y = static_cast<std::byte*>(task.y);
  const int64_t n = task.n;
  for (int64_t block = task.first_block; block < end; ++block) {
    const int64_t panel = 2 * block, column = block * kTileColumns;
    if (task.k % kTileK != 0 || panel + 1 == last)
      std::memset(static_cast<void*>(plain), 0, static_cast<size_t>(bytes));
    for (int64_t i = 0; i < 2 && panel + i < last; ++i)
      quantised(w.format).dequantise_tiles(plain + i * kGemmBlock * kTileK, panels, panel + i,
                                           kTileColumns * kTileK);
    task.y = y + static_cast<size_t>(column) * (task.y_is_f32 ? sizeof(float) : sizeof(bf16));
    task.n = n - column;
    task.first_block = 0;
    task.end_block = 1;
    kernels_.tile_gemm(task);
  }
}

void CpuBackend::embedding(Tensor y, Tensor tokens, Weight table, int64_t first_row) {
  const int64_t t = tokens.shape[0], n = table.n(), k = table.k();
  expect_matrix("embedding y", y, t, k);
  expect_vector("embedding tokens", tokens, DType::i32, t);
  check(table.data.packed && table.format == plain_format(y.dtype), "embedding {} from {}", y,
        table.data);
  const WeightLayout& where = layout(y.dtype, n, k);
  dispatch_float(y.dtype, [&]<class T>() {
    const int32_t* ids = tokens.ptr<int32_t>();
    T* out = y.ptr<T>();
    parallel_for(threads_, t, t * k * 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = ids[i] - first_row;
        if (row >= 0 && row < n)
          unpack_row(out + i * y.stride[0], reinterpret_cast<const T*>(table.data.data), where,
                     row);
        else
          std::memset(static_cast<void*>(out + i * y.stride[0]), 0,
                      static_cast<size_t>(k) * sizeof(T));
      }
    });
  });
}

}  // namespace nanovllm::cpu
