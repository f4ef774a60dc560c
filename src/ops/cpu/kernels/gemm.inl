// Matrix product for processors that oneDNN has no row-invariant packed kernel for. One accumulator
// per output, k in ascending order: a row's bits cannot depend on anything else.

namespace {

/// ROWS x BLOCKS tiles of 1 x 16 outputs, of `count` columns. x: f32 rows k apart; w: `BLOCKS`
/// panels of k x 16.
template <int ROWS, int BLOCKS, class T>
NANOVLLM_INLINE void gemm_tile(const float* x, const T* w, int64_t k, int64_t count,
                               Sum (&acc)[ROWS][BLOCKS]) {
  for (int64_t i = 0; i < count; ++i) {
    Vec column[BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) column[b] = load(w + (b * k + i) * kGemmBlock);
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < BLOCKS; ++b) acc[r][b].add(x[r * k + i], column[b]);
  }
}

template <int ROWS, int BLOCKS, class T, class Result>
NANOVLLM_INLINE void put_tile(const GemmTask<T>& task, const Result (&acc)[ROWS][BLOCKS],
                              int64_t row, int64_t block) {
  for (int r = 0; r < ROWS; ++r) {
    for (int b = 0; b < BLOCKS; ++b) {
      const int64_t column = (block + b) * kGemmBlock, at = (row + r) * task.y_stride + column;
      const int64_t count = task.n - column < kLanes ? task.n - column : kLanes;
      if (task.y_is_f32)
        put(static_cast<float*>(task.y) + at, acc[r][b].get(), count);
      else
        put(static_cast<T*>(task.y) + at, acc[r][b].get(), count);
    }
  }
}

template <int ROWS, int BLOCKS, class T>
void gemm_rows(const GemmTask<T>& task, const float* x, int64_t row, int64_t block) {
  Sum acc[ROWS][BLOCKS];
  gemm_tile<ROWS, BLOCKS>(x, task.w + block * task.k * kGemmBlock, task.k, task.k, acc);
  put_tile<ROWS, BLOCKS>(task, acc, row, block);
}

/// All the weight blocks for ROWS rows; few rows take more blocks at once, so that enough additions
/// are in flight.
template <int ROWS, class Multiply>
void gemm_panel(const float* x, int64_t row, int64_t begin, int64_t end, Multiply multiply) {
  constexpr int kBlocks = ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;
  int64_t block = begin;
  for (; block + kBlocks <= end; block += kBlocks)
    multiply.template operator()<ROWS, kBlocks>(x, row, block);
  for (; block < end; ++block) multiply.template operator()<ROWS, 1>(x, row, block);
}

/// Rows [first, first + rows) of x, in the task's scratch memory.
template <class T>
NANOVLLM_INLINE void rows_as_floats(const GemmTask<T>& task, int64_t first, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r)
    along_row(
        task.k, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          put(task.scratch + r * task.k + i, get(task.x + (first + r) * task.x_stride + i, count),
              count);
        });
}

/// Calls multiply<ROWS, BLOCKS>(x, row, block) for all tiles of the task's product; x: the rows as
/// floats, from `row` on.
template <class T, class Multiply>
NANOVLLM_INLINE void for_tiles(const GemmTask<T>& task, Multiply multiply) {
  for (int64_t first = 0; first < task.m; first += kGemmRows) {
    const int64_t rows = task.m - first < kGemmRows ? task.m - first : kGemmRows;
    rows_as_floats(task, first, rows);
    constexpr int64_t kPanel = 4;  // weight blocks that stay in cache while the rows pass
    for (int64_t begin = task.first_block; begin < task.end_block; begin += kPanel) {
      const int64_t end = task.end_block < begin + kPanel ? task.end_block : begin + kPanel;
      for (int64_t r = 0; r < rows;) {
        const float* x = task.scratch + r * task.k;
        const int64_t left = rows - r;
        if (left >= 6)
          gemm_panel<6>(x, first + r, begin, end, multiply), r += 6;
        else if (left >= 4)
          gemm_panel<4>(x, first + r, begin, end, multiply), r += 4;
        else if (left >= 2)
          gemm_panel<2>(x, first + r, begin, end, multiply), r += 2;
        else
          gemm_panel<1>(x, first + r, begin, end, multiply), r += 1;
      }
    }
  }
}

template <class T>
void gemm(const GemmTask<T>& task) {
  for_tiles(task, [&]<int ROWS, int BLOCKS>(const float* x, int64_t row, int64_t block) {
    gemm_rows<ROWS, BLOCKS>(task, x, row, block);
  });
}

}  // namespace
