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

/// Of COUNT pairs of tiles with sums, 0 and 1 and then 2 and 3.
template <int COUNT>
NANOVLLM_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (COUNT == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}
/// The same go to `first` and `second`, the tiles of a pair `step` elements apart.
template <int COUNT>
NANOVLLM_INLINE void store_sums(float* first, float* second, int64_t step, int64_t row_bytes) {
  _tile_stored(0, first, row_bytes);
  _tile_stored(1, first + step, row_bytes);
  if constexpr (COUNT == 2) {
    _tile_stored(2, second, row_bytes);
    _tile_stored(3, second + step, row_bytes);
  }
}

/// sums[TILES * 16, 32], which begin as zeros if `fresh`, += x w^T over `steps` times 32 elements
/// of k. x: TILES tiles `tile` elements apart, of `row` rows of 32 elements a step. Asks for
/// `ahead_lines` cache lines a step from `ahead` on, which are wanted later.
template <int TILES>
NANOVLLM_INLINE void multiply_tiles(float* sums, bool fresh, const bf16* x, int64_t rows,
                                    int64_t tile, const bf16* w, int64_t steps, const bf16* ahead,
                                    int64_t ahead_lines) {
  constexpr int64_t kBytes = kTileColumns * sizeof(float);
  float* second = sums + kTileRows * kTileColumns;
  // The intrinsics do not tell the compiler that they read memory.
  __asm__ volatile("" ::: "memory");
  if (fresh) {
    zero_sums<TILES>();
  } else {
    _tile_loadd(0, sums, kBytes);
    _tile_loadd(1, sums + 16, kBytes);
    if constexpr (TILES == 2) {
      _tile_loadd(2, second, kBytes);
      _tile_loadd(3, second + 16, kBytes);
    }
  }
  for (int64_t i = 0; i < steps; ++i) {
    _tile_loadd(6, w, 64);
    _tile_loadd(4, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 16 * kTileK, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TILES == 2) {
      _tile_loadd(5, x + tile, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    x += rows * kTileK;
    w += 2 * 16 * kTileK;
    for (int64_t line = 0; line < ahead_lines; ++line, ahead += kTileK)
      __builtin_prefetch(ahead, 0, 2);
  }
  store_sums<TILES>(sums, second, 16, kBytes);
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
  const int64_t steps = (task.k + kTileK - 1) / kTileK, pair = 2 * kTileRows,
                pairs = (task.m + pair - 1) / pair;
  // So many steps of a block of weights stay in the first cache while the rows pass.
  constexpr int64_t kSteps = 8;
  const int64_t part_steps = pairs > 1 ? kSteps : steps;
  // While a block is worked on, the next one comes from memory, a share with each pair of rows.
  const int64_t lines = (2 * kTileRows + pairs - 1) / pairs;
  configure_tiles(task.x_stride);
  for (int64_t block = task.first_block; block < task.end_block; ++block) {
    const bf16* w = task.w + block * kTileColumns * steps * kTileK;
    const bool more = block + 1 < task.end_block;
    for (int64_t step = 0; step < steps; step += part_steps) {
      const int64_t count = steps - step < part_steps ? steps - step : part_steps;
      const bf16* part = w + step * kTileColumns * kTileK;
      for (int64_t first = 0; first < task.m; first += pair) {
        const bf16* x = task.x + first * steps * kTileK + step * task.x_stride * kTileK;
        float* sums = task.scratch + first * kTileColumns;
        const bf16* ahead =
            part + steps * kTileColumns * kTileK + first / pair * count * lines * kTileK;
        const int64_t left = task.m - first, ahead_lines = more ? lines : 0;
        const int64_t tile = steps * task.x_stride * kTileK;
        if (left > kTileRows)
          multiply_tiles<2>(sums, step == 0, x, task.x_stride, tile, part, count, ahead,
                            ahead_lines);
        else
          multiply_tiles<1>(sums, step == 0, x, task.x_stride, tile, part, count, ahead,
                            ahead_lines);
        if (step + count == steps) put_sums(task, sums, first, left < pair ? left : pair, block);
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
