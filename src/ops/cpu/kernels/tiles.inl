// bf16 matrix product by AMX tiles. One accumulator per output; tdpbf16ps adds 32 elements of k at
// a time, in ascending order, and works on each row by itself: a row's bits cannot depend on
// anything else.

namespace {

template <class T>
constexpr bool kHasTiles = sizeof(T) == sizeof(bf16);

/// The operand of ldtilecfg.
struct TileShape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t columns[16] = {};  // bytes
  uint8_t rows[16] = {};
};

/// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 columns of w.
NANOVLLM_INLINE void configure_tiles(int64_t rows) {
  TileShape shape;
  for (int i = 0; i < 8; ++i) {
    shape.columns[i] = 64;
    shape.rows[i] = static_cast<uint8_t>(i < 6 ? rows : 16);
  }
  // The intrinsics do not tell the compiler how much memory they read.
  __asm__ volatile("" ::"r"(&shape) : "memory");
  _tile_loadconfig(&shape);
}

/// Where tiles of rows lie, in elements from one to the next.
struct TileSource {
  const bf16* x;
  int64_t row, step, tile;
};

/// y[TILES * 16, 32] = x w^T over `steps` times 32 elements of k. With more passes x goes on where
/// w begins anew.
template <int TILES>
NANOVLLM_INLINE void multiply_tiles(float* y, int64_t y_stride, TileSource source, const bf16* w,
                                    int64_t steps, int passes = 1) {
  const bf16 *x = source.x, *x1 = x + source.tile;
  const int64_t row_bytes = source.row * 2;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TILES == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  // The intrinsics do not tell the compiler that they read memory.
  __asm__ volatile("" ::: "memory");
  for (int pass = 0; pass < passes; ++pass) {
    const bf16* column = w;
    for (int64_t i = 0; i < steps; ++i) {
      _tile_loadd(6, column, 64);
      _tile_loadd(4, x, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, column + 16 * kTileK, 64);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (TILES == 2) {
        _tile_loadd(5, x1, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      x += source.step;
      x1 += source.step;
      column += 2 * 16 * kTileK;
    }
  }
  const int64_t y_bytes = y_stride * 4;
  _tile_stored(0, y, y_bytes);
  _tile_stored(1, y + 16, y_bytes);
  if constexpr (TILES == 2) {
    _tile_stored(2, y + kTileRows * y_stride, y_bytes);
    _tile_stored(3, y + kTileRows * y_stride + 16, y_bytes);
  }
}

NANOVLLM_INLINE void put_sums(const GemmTask<bf16>& task, const float* sums, int64_t first,
                              int64_t rows, int64_t block) {
  for (int64_t column = block * kTileColumns, part = 0; part < 2 && column < task.n;
       ++part, column += kLanes) {
    const int64_t count = task.n - column < kLanes ? task.n - column : kLanes;
    for (int64_t r = 0; r < rows; ++r) {
      const Vec v = load(sums + r * kTileColumns + part * kLanes);
      const int64_t at = (first + r) * task.y_stride + column;
      if (task.y_is_f32)
        put(static_cast<float*>(task.y) + at, v, count);
      else
        put(static_cast<bf16*>(task.y) + at, v, count);
    }
  }
}

void tile_gemm(const GemmTask<bf16>& task) {
  const int64_t steps = (task.k + kTileK - 1) / kTileK;
  alignas(64) float sums[2 * kTileRows * kTileColumns];
  configure_tiles(task.x_stride);
  for (int64_t block = task.first_block; block < task.end_block; ++block) {
    const bf16* w = task.w + block * kTileColumns * steps * kTileK;
    for (int64_t first = 0; first < task.m; first += 2 * kTileRows) {
      const int64_t step = task.x_stride * kTileK;
      const TileSource source{task.x + first * steps * kTileK, kTileK, step, steps * step};
      const int64_t left = task.m - first;
      if (left > kTileRows) {
        multiply_tiles<2>(sums, kTileColumns, source, w, steps);
        put_sums(task, sums, first, left < 2 * kTileRows ? left : 2 * kTileRows, block);
      } else {
        multiply_tiles<1>(sums, kTileColumns, source, w, steps);
        put_sums(task, sums, first, left, block);
      }
    }
  }
  _tile_release();
}

void pack_tile(bf16* tile, int64_t tile_rows, const bf16* x, int64_t x_stride, int64_t rows,
               int64_t k) {
  for (int64_t i = 0; i < k; i += kTileK)
    for (int64_t r = 0; r < tile_rows; ++r, tile += kTileK) {
      const int64_t count = r >= rows ? 0 : k - i < kTileK ? k - i : kTileK;
      if (count < kTileK) __builtin_memset(static_cast<void*>(tile), 0, kTileK * sizeof(bf16));
      __builtin_memcpy(static_cast<void*>(tile), x + r * x_stride + i,
                       static_cast<size_t>(count) * sizeof(bf16));
    }
}

}  // namespace
