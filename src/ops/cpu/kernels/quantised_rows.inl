// Products of rows that are quantised as an E4M3 weight is (docs/contract.md): numbers, exact in
// f32 as products of two are, are multiplied kSummedColumns of them at a time, and scales come to
// their sums.

namespace {

struct E4m3Numbers {
  static constexpr int kColumns = 4;
  static constexpr float kMost = 448;
  NANOVLLM_INLINE void open(const uint8_t*, const uint8_t*) {}
  NANOVLLM_INLINE Vec column(VecU unit, int j) const {
    return e4m3_numbers(reinterpret_cast<VecI>(unit << (24 - 8 * j)) >> 4);
  }
  /// Magnitudes beyond kMost become kMost. What is added and taken off again has 2^20 times the
  /// value of v's power of two, or of the least normal number's, so that f32's last place is
  /// E4M3's.
  static NANOVLLM_INLINE Vec nearest(Vec v) {
    const Vec most = splat(kMost);
    v = v > most ? most : v < -most ? -most : v;
    const VecI bits = reinterpret_cast<VecI>(v), least = reinterpret_cast<VecI>(splat(0x1p-6f));
    VecI power = bits & 0x7f800000;
    power = (power > least ? power : least) | (bits & static_cast<int32_t>(0x80000000u));
    const Vec large = reinterpret_cast<Vec>(power) * 0x1p+20f;
    return (v + large) - large;
  }
};

/// The scale of numbers that stand for x: `scale` or, where that is 0, by the largest magnitude.
/// NaN where x is not finite.
template <class Numbers, class T>
NANOVLLM_INLINE float scale_of(const T* x, int64_t n, float scale) {
  VecI most{};  // bits of magnitudes, in their order
  along_row(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const VecI bits = reinterpret_cast<VecI>(get(x + i, count)) & 0x7fffffff;
        most = bits > most ? bits : most;
      });
  int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = most[i] > largest ? most[i] : largest;
  if (largest >= 0x7f800000) return __builtin_nanf("");
  float magnitude;
  __builtin_memcpy(&magnitude, &largest, sizeof magnitude);
  const float least = kLeastRowMagnitude;
  return scale > 0 ? scale : (magnitude > least ? magnitude : least) / Numbers::kMost;
}

/// The numbers; zeros where the scale is NaN.
template <class Numbers, class Number, class T>
NANOVLLM_INLINE void put_numbers(Number* numbers, const T* x, int64_t n, float scale) {
  along_row(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec v = scale == scale ? get(x + i, count) / scale : Vec{};
        put(numbers + i, Numbers::nearest(v), count);
      });
}

void quantise_e4m3(QuantisedNumber* numbers, float* scales, const bf16* x, int64_t k, int64_t group,
                   float scale) {
  for (int64_t first = 0; first < k; first += group) {
    const int64_t columns = k - first < group ? k - first : group;
    *scales = scale_of<E4m3Numbers>(x + first, columns, scale);
    put_numbers<E4m3Numbers>(reinterpret_cast<bf16*>(numbers) + first, x + first, columns,
                             *scales++);
  }
}

template <class T>
void store_e4m3(E4m3* numbers, float* row_scale, const T* x, int64_t n, float scale) {
  *row_scale = scale_of<E4m3Numbers>(x, n, scale);
  put_numbers<E4m3Numbers>(numbers, x, n, *row_scale);
}

struct Result {
  Vec value;
  NANOVLLM_INLINE Vec get() const { return value; }
};

/// The scales of 16 rows of a weight, group g; panel: theirs.
NANOVLLM_INLINE Vec weight_scales(const uint8_t* panel, int64_t g) {
  Vec scales;
  __builtin_memcpy(&scales, panel + g * 64, sizeof scales);
  return scales;
}

/// ROWS x BLOCKS outputs of the task, from `row` and `block` on; panel: the first of BLOCKS.
/// multiply(first, count, acc) adds the products of numbers.
template <int ROWS, int BLOCKS, class Multiply>
NANOVLLM_INLINE void scaled_rows(const GemmTask<bf16>& task, const QuantisedPanels& w,
                                 const uint8_t* panel, int64_t row, int64_t block,
                                 Multiply multiply) {
  const bool in_groups = w.group < w.k;
  const int64_t groups = in_groups ? (w.k + w.group - 1) / w.group : 1;
  const auto scale = [&](int r, int b, int64_t g) __attribute__((always_inline)) {
    return task.row_scales[(row + r) * groups + g] * weight_scales(panel + b * w.panel_bytes, g);
  };
  Result total[ROWS][BLOCKS]{};
  for (int64_t first = 0, g = 0; first < w.k; first += kSummedColumns, ++g) {
    const int64_t left = w.k - first;
    Sum acc[ROWS][BLOCKS];
    multiply(first, left < kSummedColumns ? left : kSummedColumns, acc);
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < BLOCKS; ++b)
        if (in_groups)
          total[r][b].value += acc[r][b].get() * scale(r, b, g);
        else
          total[r][b].value += acc[r][b].get();
  }
  for (int r = 0; r < ROWS && !in_groups; ++r)
    for (int b = 0; b < BLOCKS; ++b) total[r][b].value *= scale(r, b, 0);
  put_tile<ROWS, BLOCKS>(task, total, row, block);
}

void e4m3_gemm(const GemmTask<bf16>& task, const QuantisedPanels& w) {
  for_few_rows(task, [&]<int ROWS, int BLOCKS>(int64_t block) {
    const uint8_t* panel = w.data + block * w.panel_bytes;
    scaled_rows<ROWS, BLOCKS>(
        task, w, panel, 0, block,
        [&](int64_t first, int64_t count, Sum(&acc)[ROWS][BLOCKS]) __attribute__((always_inline)) {
          quantised_tile<E4m3Numbers, ROWS, BLOCKS>(task.scratch, w, panel, first, count, 0, acc);
        });
  });
}

void e4m3_panels(const GemmTask<bf16>& task, const QuantisedPanels& w) {
  for_tiles(task, [&]<int ROWS, int BLOCKS>(const float* x, int64_t row, int64_t block) {
    const bf16* numbers = task.w + block * w.k * kGemmBlock;
    scaled_rows<ROWS, BLOCKS>(
        task, w, w.data + block * w.panel_bytes, row, block,
        [&](int64_t first, int64_t count, Sum(&acc)[ROWS][BLOCKS]) __attribute__((always_inline)) {
          gemm_tile<ROWS, BLOCKS>(x + first, numbers + first * kGemmBlock, w.k, count, acc);
        });
  });
}

constexpr QuantisedKernels e4m3_rows_kernels() {
  return {e4m3_gemm, dequantise<E4m3Numbers, false>, e4m3_panels, quantise_e4m3, nullptr};
}

}  // namespace
