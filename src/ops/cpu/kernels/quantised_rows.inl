// Products of rows that are quantised as the weight is (docs/contract.md): numbers are multiplied,
// kSummedColumns of them at a time, and scales come to their sums. Numbers and products of two are
// exact in f32, and so are int8's sums of so many.

namespace {

struct Int8Numbers {
  static constexpr int kColumns = 4;
  static constexpr float kMost = 127;
  static constexpr bool kInGroups = false;  // a row has one scale
  NANOVLLM_INLINE void open(const uint8_t*, const uint8_t*) {}
  NANOVLLM_INLINE Vec column(VecU unit, int j) const {
    return __builtin_convertvector(reinterpret_cast<VecI>(unit << (24 - 8 * j)) >> 24, Vec);
  }
  /// Of magnitudes up to kMost.
  static NANOVLLM_INLINE Vec nearest(Vec v) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: its last place is 1
    return (v + magic) - magic;
  }
  struct Total {
    VecI sum{};
    NANOVLLM_INLINE void add(Vec v) { sum += __builtin_convertvector(v, VecI); }
    NANOVLLM_INLINE Vec get() const { return __builtin_convertvector(sum, Vec); }
  };
};

struct E4m3Numbers {
  static constexpr int kColumns = 4;
  static constexpr float kMost = 448;
  static constexpr bool kInGroups = true;
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
  struct Total {
    Vec sum{};
    NANOVLLM_INLINE void add(Vec v) { sum += v; }
    NANOVLLM_INLINE Vec get() const { return sum; }
  };
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

template <class Numbers>
void quantise(bf16* numbers, float* scales, const bf16* x, int64_t k, int64_t group, float scale) {
  for (int64_t first = 0; first < k; first += group) {
    const int64_t columns = k - first < group ? k - first : group;
    *scales = scale_of<Numbers>(x + first, columns, scale);
    put_numbers<Numbers>(numbers + first, x + first, columns, *scales++);
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

/// ROWS x BLOCKS outputs of the task, from `row` and `block` on; panel: the first of BLOCKS.
/// multiply(first, count, acc) adds the products of numbers.
template <class Numbers, int ROWS, int BLOCKS, class Multiply>
NANOVLLM_INLINE void scaled_rows(const GemmTask<bf16>& task, const QuantisedPanels& w,
                                 const uint8_t* panel, int64_t row, int64_t block,
                                 Multiply multiply) {
  const bool in_groups = Numbers::kInGroups && w.group < w.k;
  const int64_t groups = in_groups ? (w.k + w.group - 1) / w.group : 1;
  const auto scale = [&](int r, int b, int64_t g) __attribute__((always_inline)) {
    Vec of_weight;
    __builtin_memcpy(&of_weight, panel + b * w.panel_bytes + g * 64, sizeof of_weight);
    return task.row_scales[(row + r) * groups + g] * of_weight;
  };
  typename Numbers::Total total[ROWS][BLOCKS];
  for (int64_t first = 0, g = 0; first < w.k; first += kSummedColumns, ++g) {
    const int64_t left = w.k - first;
    Sum acc[ROWS][BLOCKS];
    multiply(first, left < kSummedColumns ? left : kSummedColumns, acc);
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < BLOCKS; ++b) {
        if constexpr (Numbers::kInGroups)
          if (in_groups) {
            total[r][b].sum += acc[r][b].get() * scale(r, b, g);
            continue;
          }
        total[r][b].add(acc[r][b].get());
      }
  }
  Result results[ROWS][BLOCKS];
  for (int r = 0; r < ROWS; ++r)
    for (int b = 0; b < BLOCKS; ++b)
      results[r][b].value = in_groups ? total[r][b].get() : total[r][b].get() * scale(r, b, 0);
  put_tile<ROWS, BLOCKS>(task, results, row, block);
}

template <class Numbers, int ROWS, int BLOCKS>
void few_scaled_rows(const GemmTask<bf16>& task, const QuantisedPanels& w, int64_t block) {
  const uint8_t* panel = w.data + block * w.panel_bytes;
  scaled_rows<Numbers, ROWS, BLOCKS>(
      task, w, panel, 0, block,
      [&](int64_t first, int64_t count, Sum(&acc)[ROWS][BLOCKS]) __attribute__((always_inline)) {
        quantised_tile<Numbers, ROWS, BLOCKS>(task.scratch, w, panel, first, count, 0, acc);
      });
}

template <class Numbers, int ROWS, int BLOCKS>
void many_scaled_rows(const GemmTask<bf16>& task, const QuantisedPanels& w, const float* x,
                      int64_t row, int64_t block) {
  const bf16* numbers = task.w + block * w.k * kGemmBlock;
  scaled_rows<Numbers, ROWS, BLOCKS>(
      task, w, w.data + block * w.panel_bytes, row, block,
      [&](int64_t first, int64_t count, Sum(&acc)[ROWS][BLOCKS]) __attribute__((always_inline)) {
        gemm_tile<ROWS, BLOCKS>(x + first, numbers + first * kGemmBlock, w.k, count, acc);
      });
}

template <class Numbers>
void scaled_gemm(const GemmTask<bf16>& task, const QuantisedPanels& w) {
  for_few_rows(task, [&]<int ROWS, int BLOCKS>(int64_t block) {
    few_scaled_rows<Numbers, ROWS, BLOCKS>(task, w, block);
  });
}

template <class Numbers>
void scaled_panels(const GemmTask<bf16>& task, const QuantisedPanels& w) {
  for_tiles(task, [&]<int ROWS, int BLOCKS>(const float* x, int64_t row, int64_t block) {
    many_scaled_rows<Numbers, ROWS, BLOCKS>(task, w, x, row, block);
  });
}

template <class Numbers>
constexpr QuantisedKernels row_quantising_kernels() {
  return {scaled_gemm<Numbers>, dequantise<Numbers, false>, scaled_panels<Numbers>,
          quantise<Numbers>, nullptr};
}

}  // namespace
