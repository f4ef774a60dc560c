// Products of rows of int8 numbers with weights of int8 or int4 numbers (docs/contract.md). Sums of
// integers are exact in every order, so each instruction set has its own way to them.

namespace {

/// Computes the product by AMX tiles, of any number of rows; false: not here, or not of so few.
template <bool IS_INT4>
bool integer_tiles(const GemmTask<bf16>& task, const QuantisedPanels& w);

/// Computes the rows that are in the task's tiles, and returns how many (integer_sums.inl).
int64_t multiply_by_sums(const GemmTask<bf16>& task, const QuantisedPanels& w);

struct Int8Numbers {
  static constexpr float kMost = 127;
  /// Of magnitudes up to kMost.
  static NANOVLLM_INLINE Vec nearest(Vec v) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: its last place is 1
    return (v + magic) - magic;
  }
};

#if defined(__AVX512BW__)
constexpr int kIntBytes = 64;
#elif defined(__AVX2__)
constexpr int kIntBytes = 32;
#else
constexpr int kIntBytes = 16;
#endif
using Ints = int32_t __attribute__((vector_size(kIntBytes)));
using Shorts = int16_t __attribute__((vector_size(kIntBytes)));
using Floats = float __attribute__((vector_size(kIntBytes)));
constexpr int kIntParts = 64 / kIntBytes;  // registers of a panel's unit

/// The sums of the products of neighbours.
NANOVLLM_INLINE Ints add_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Ints>(
      _mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<Ints>(
      _mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  const Ints x = reinterpret_cast<Ints>(a), y = reinterpret_cast<Ints>(b);
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

/// The same of bytes: a's from 0 to 15, b's from -127 to 127.
NANOVLLM_INLINE Shorts add_byte_pairs(Ints a, Ints b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Shorts>(
      _mm512_maddubs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Shorts>(
      _mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  const Shorts x = reinterpret_cast<Shorts>(a), y = reinterpret_cast<Shorts>(b);
  return (x & int16_t{0xff}) * (y << 8 >> 8) + (x >> 8) * (y >> 8);
#endif
}

/// sums + the sums of four products of bytes, a's from 0 to 255; beyond 32 bits they wrap around.
#if defined(__AVX512VNNI__)
constexpr bool kAddsFours = true;
NANOVLLM_INLINE Ints add_fours(Ints sums, Ints a, Ints b) {
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
#else
constexpr bool kAddsFours = false;
NANOVLLM_INLINE Ints add_fours(Ints sums, Ints, Ints) { return sums; }
#endif

/// 32 bits of a row of x, for all rows of a weight.
NANOVLLM_INLINE Ints same_at(const void* x) {
  int32_t value;
  __builtin_memcpy(&value, x, sizeof value);
  return value - Ints{};
}
NANOVLLM_INLINE Ints load_ints(const uint8_t* p) {
  Ints v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

/// A row of x as bytes: its numbers, in the order of the weight's; zeros up to a multiple of
/// kByteColumns; and for each group `middle` times the numbers' sum, which products with weights
/// that are larger by `middle` have too much. int8's with add_pairs() are 16 bits each instead.
NANOVLLM_INLINE int64_t byte_columns(int64_t k) {
  return (k + kByteColumns - 1) / kByteColumns * kByteColumns;
}
NANOVLLM_INLINE const int8_t* byte_row(const GemmTask<bf16>& task, int64_t row) {
  return reinterpret_cast<const int8_t*>(reinterpret_cast<const QuantisedNumber*>(task.x) +
                                         row * task.x_stride);
}
NANOVLLM_INLINE Ints excess(const int8_t* row, int64_t k, int64_t group) {
  return same_at(row + byte_columns(k) + group * 4);
}

/// Calls put(i, numbers) for each 16 of a row's numbers. Returns their scale.
template <class Put>
NANOVLLM_INLINE float integers_of(const bf16* x, int64_t k, Put put) {
  const float scale = scale_of<Int8Numbers>(x, k, 0);
  along_row(
      k, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec v = scale == scale ? get(x + i, count) / scale : Vec{};
        put(i, __builtin_convertvector(Int8Numbers::nearest(v), VecI));
      });
  return scale;
}

template <bool EVEN_FIRST>
NANOVLLM_INLINE void quantise_bytes(QuantisedNumber* numbers, float* scale, const bf16* x,
                                    int64_t k, int64_t group, int middle) {
  auto* const bytes = reinterpret_cast<int8_t*>(numbers);
  __builtin_memset(bytes + k / kByteColumns * kByteColumns, 0, kByteColumns);
  *scale = integers_of(
      x, k, [&](int64_t i, VecI q) __attribute__((always_inline)) {
        if constexpr (EVEN_FIRST)
          q = __builtin_shufflevector(q, q, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        const VecB all = narrow(q);
        __builtin_memcpy(bytes + i, &all, sizeof all);
      });
  uint8_t* sums = reinterpret_cast<uint8_t*>(bytes) + byte_columns(k);
  for (int64_t first = 0; first < k; first += group, sums += 4) {
    // To the unit's end: int4's columns of the last unit are not in order.
    const int64_t end = first + group < k ? first + group : byte_columns(k);
    int32_t sum = 0;
    int64_t i = first;
    if constexpr (kAddsFours) {
      Ints lanes{};
      for (; i + kIntBytes <= end; i += kIntBytes)
        lanes = add_fours(lanes, Ints{} + 0x01010101,
                          load_ints(reinterpret_cast<const uint8_t*>(bytes) + i));
      for (int lane = 0; lane < kIntBytes / 4; ++lane) sum += lanes[lane];
    }
    for (; i < end; ++i) sum += bytes[i];
    sum *= middle;
    __builtin_memcpy(sums, &sum, sizeof sum);
  }
}

/// put_tile(), a line at a time where the outputs of two panels are one.
template <int ROWS, int PANELS>
NANOVLLM_INLINE void put_whole_tile(const GemmTask<bf16>& task,
                                    const Result (&results)[ROWS][PANELS], int64_t row,
                                    int64_t block) {
  if constexpr (PANELS == 2)
    if (!task.y_is_f32 && (block + 2) * kGemmBlock <= task.n) {
      bf16* to = static_cast<bf16*>(task.y) + row * task.y_stride + block * kGemmBlock;
      for (int r = 0; r < ROWS; ++r, to += task.y_stride)
        store(to, results[r][0].value, results[r][1].value);
      return;
    }
  put_tile<ROWS, PANELS>(task, results, row, block);
}

// Sums and operands of a tile fit 16 registers, or the 32 of instructions that add fours.
constexpr int64_t kTileRowsOfInts = kAddsFours ? 8 : 4;
constexpr int kTilePanels = kAddsFours ? 2 : 1;
constexpr int64_t kCachedRowBytes = 384 << 10;

/// Asks for what lies at `p` of the panels that come next, while rows pass these.
NANOVLLM_INLINE void prefetch_next(const uint8_t* p, int64_t panel) {
  __builtin_prefetch(p + kPanelsAtOnce * panel, 0, 2);
}

/// Calls tile<ROWS, PANELS>(row, block) for all outputs of the rows from `begin_row` on, 16 columns
/// of ROWS rows each for every panel. Some panels at a time stay in the cache while rows pass, as
/// many as do as well.
template <class Tile>
NANOVLLM_INLINE void for_integer_tiles(const GemmTask<bf16>& task, int64_t begin_row, Tile tile) {
  const int64_t chunk =
      kAddsFours ? (kCachedRowBytes / task.k + kTileRowsOfInts) / kTileRowsOfInts * kTileRowsOfInts
                 : kGemmRows;
  for (int64_t first = begin_row; first < task.m; first += chunk)
    for (int64_t begin = task.first_block; begin < task.end_block; begin += kPanelsAtOnce)
      for (int64_t row = first, rows; row < first + chunk && row < task.m; row += rows) {
        const int64_t left = task.m - row;
        rows = left >= kTileRowsOfInts ? kTileRowsOfInts : left >= 4 ? 4 : left;
        for (int64_t block = begin; block < begin + kPanelsAtOnce && block < task.end_block;
             block += rows >= 4 ? kTilePanels : 1) {
          const bool all = block + kTilePanels <= task.end_block;
          if (rows == kTileRowsOfInts)
            all ? tile.template operator()<kTileRowsOfInts, kTilePanels>(row, block)
                : tile.template operator()<kTileRowsOfInts, 1>(row, block);
          else if (rows == 4)
            all ? tile.template operator()<4, kTilePanels>(row, block)
                : tile.template operator()<4, 1>(row, block);
          else if (rows == 3)
            tile.template operator()<3, 1>(row, block);
          else if (rows == 2)
            tile.template operator()<2, 1>(row, block);
          else
            tile.template operator()<1, 1>(row, block);
        }
      }
}

// int8. A register of 32-bit units has four columns of each row of a weight: operands of
// add_fours(), where the sign's bit makes them larger by 128; or, their even bytes and their odd
// ones as 16 bits, of add_pairs(), for which rows of x have their columns in fours, 0, 2, 1, 3.

/// sums += the products of a unit of each panel, `panel` bytes apart, and of the rows of x from `x`
/// on, `stride` bytes apart.
template <int ROWS, int PANELS>
NANOVLLM_INLINE void add_int8_unit(const uint8_t* unit, int64_t panel, const int8_t* x,
                                   int64_t stride, Ints (&sums)[ROWS][PANELS][kIntParts]) {
  Ints q[PANELS][kIntParts];
  for (int n = 0; n < PANELS; ++n)
    for (int p = 0; p < kIntParts; ++p) q[n][p] = load_ints(unit + n * panel + p * kIntBytes);
  for (int n = 0; n < PANELS && ROWS >= 4 && PANELS == kTilePanels && kAddsFours; ++n)
    prefetch_next(unit + n * panel, panel);
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < PANELS; ++n)
      if constexpr (kAddsFours) {
        const Ints four = same_at(x + r * stride);
        for (int p = 0; p < kIntParts; ++p)
          sums[r][n][p] =
              add_fours(sums[r][n][p], q[n][p] ^ static_cast<int32_t>(0x80808080u), four);
      } else {
        const auto first = reinterpret_cast<Shorts>(same_at(x + r * stride)),
                   second = reinterpret_cast<Shorts>(same_at(x + r * stride + 4));
        for (int p = 0; p < kIntParts; ++p) {
          const auto bytes = reinterpret_cast<Shorts>(q[n][p]);
          sums[r][n][p] += add_pairs(bytes << 8 >> 8, first) + add_pairs(bytes >> 8, second);
        }
      }
}

template <int ROWS, int PANELS>
void int8_tile(const GemmTask<bf16>& task, const QuantisedPanels& w, int64_t row, int64_t block) {
  constexpr int64_t kBytes = kAddsFours ? 1 : 2;  // of a number of x
  const int8_t* x = byte_row(task, row);
  const int64_t stride = task.x_stride * 2;
  const uint8_t* const panel = w.data + block * w.panel_bytes;
  const uint8_t* unit = panel + w.units;
  Ints sums[ROWS][PANELS][kIntParts]{}, others[ROWS][PANELS][kIntParts]{};
  for (int r = 0; r < ROWS && kAddsFours; ++r)
    for (auto& of_panel : sums[r])
      for (Ints& sum : of_panel) sum -= excess(x + r * stride, w.k, 0);
  int64_t i = 0;
  constexpr bool kAlternates = kAddsFours && PANELS == 1;  // the instruction takes long
  for (; kAlternates && i + 8 <= w.k; i += 8, unit += 128) {
    add_int8_unit<ROWS, PANELS>(unit, w.panel_bytes, x + i * kBytes, stride, sums);
    add_int8_unit<ROWS, PANELS>(unit + 64, w.panel_bytes, x + (i + 4) * kBytes, stride, others);
  }
  for (; i < w.k; i += 4, unit += 64)
    add_int8_unit<ROWS, PANELS>(unit, w.panel_bytes, x + i * kBytes, stride, sums);
  Result results[ROWS][PANELS];
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < PANELS; ++n) {
      for (int p = 0; p < kIntParts && kAlternates; ++p) sums[r][n][p] += others[r][n][p];
      VecI sum;
      __builtin_memcpy(&sum, sums[r][n], sizeof sum);
      results[r][n].value =
          __builtin_convertvector(sum, Vec) *
          (task.row_scales[row + r] * weight_scales(panel + n * w.panel_bytes, 0));
    }
  put_whole_tile<ROWS, PANELS>(task, results, row, block);
}

void int8_gemm(const GemmTask<bf16>& task, const QuantisedPanels& w) {
  if (integer_tiles<false>(task, w)) return;
  for_integer_tiles(task, 0, [&]<int ROWS, int PANELS>(int64_t row, int64_t block) {
    int8_tile<ROWS, PANELS>(task, w, row, block);
  });
}

void quantise_int8(QuantisedNumber* numbers, float* scale, const bf16* x, int64_t k, int64_t,
                   float) {
  if constexpr (kAddsFours) return quantise_bytes<false>(numbers, scale, x, k, k, 128);
  *scale = integers_of(
      x, k, [&](int64_t i, VecI q) __attribute__((always_inline)) {
        const VecH all = __builtin_convertvector(
            __builtin_shufflevector(q, q, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15),
            VecH);
        __builtin_memcpy(numbers + i, &all, sizeof all);
      });
}

constexpr QuantisedKernels int8_rows_kernels() {
  return {int8_gemm, nullptr, nullptr, quantise_int8, nullptr};
}

// int4. Of a unit's eight columns of each row the even ones and the odd ones are bytes from 0 to
// 15, larger by 8: operands of add_fours() or of add_byte_pairs(), whose sums of kUnits units,
// 8 * 15 * 127 at most, fit 16 bits. Rows of x have their columns in eights, the even ones first.

constexpr int kUnits = 4;

/// sums += the products of UNITS units, of which a register each has `PARTS` parts, `apart` bytes
/// from each other.
template <int ROWS, int PARTS, int UNITS, int SETS>
NANOVLLM_INLINE void add_int4_units(const uint8_t* units, int64_t apart, const int8_t* x,
                                    int64_t stride, Ints (&sums)[SETS][ROWS][PARTS]) {
  Shorts pairs[ROWS][PARTS]{};
#pragma GCC unroll 4
  for (int u = 0; u < UNITS; ++u) {
    // In the order of lines, which the compiler's loads are not in: the prefetcher follows it.
    if constexpr (ROWS == 1) __builtin_prefetch(units + (UNITS + u) * 64);
    if constexpr (ROWS >= 4 && PARTS == kTilePanels && kAddsFours)
      for (int p = 0; p < PARTS; ++p) prefetch_next(units + u * 64 + p * apart, apart);
    Ints even[PARTS], odd[PARTS];
    for (int p = 0; p < PARTS; ++p) {
      const Ints q = load_ints(units + u * 64 + p * apart);
      even[p] = q & 0x0f0f0f0f;
      odd[p] = q >> 4 & 0x0f0f0f0f;
    }
    for (int r = 0; r < ROWS; ++r) {
      const Ints first = same_at(x + r * stride + u * 8),
                 second = same_at(x + r * stride + u * 8 + 4);
      for (int p = 0; p < PARTS; ++p)
        if constexpr (kAddsFours) {  // the instruction takes long
          sums[0][r][p] = add_fours(sums[0][r][p], even[p], first);
          sums[SETS - 1][r][p] = add_fours(sums[SETS - 1][r][p], odd[p], second);
        } else {
          pairs[r][p] += add_byte_pairs(even[p], first) + add_byte_pairs(odd[p], second);
#if defined(__AVX2__)
          // Or GCC makes all products first, more than the registers hold.
          __asm__("" : "+x"(pairs[r][p]));
#endif
        }
    }
  }
  for (int r = 0; r < ROWS && !kAddsFours; ++r)
    for (int p = 0; p < PARTS; ++p) sums[0][r][p] += add_pairs(pairs[r][p], Shorts{} + int16_t{1});
}

/// Of the panel's rows those of PARTS registers, from the part `part` on; or, where a register has
/// them all, those of PARTS panels.
template <int ROWS, int PARTS, int PANELS>
NANOVLLM_INLINE void int4_parts(const GemmTask<bf16>& task, const QuantisedPanels& w, int64_t row,
                                const uint8_t* panel, int part, Result (&results)[ROWS][PANELS]) {
  constexpr int kSets = ROWS * PARTS < 16 ? 2 : 1;
  const int64_t apart = PANELS > 1 ? w.panel_bytes : kIntBytes;
  const int8_t* x = byte_row(task, row);
  const int64_t stride = task.x_stride * 2;
  const uint8_t *units = panel + w.units + part * kIntBytes, *scales = panel + part * kIntBytes;
  Floats total[ROWS][PARTS]{};
  for (int64_t first = 0, g = 0; first < w.k; first += w.group, ++g, scales += 64) {
    int64_t left = ((w.k - first < w.group ? w.k - first : w.group) + 7) / 8;
    const int8_t* from = x + first;
    Ints sums[kSets][ROWS][PARTS]{};
    for (; left >= kUnits; left -= kUnits, units += kUnits * 64, from += kUnits * 8)
      add_int4_units<ROWS, PARTS, kUnits>(units, apart, from, stride, sums);
    for (; left > 0; --left, units += 64, from += 8)
      add_int4_units<ROWS, PARTS, 1>(units, apart, from, stride, sums);
    Floats scale[PARTS];
    for (int p = 0; p < PARTS; ++p)
      __builtin_memcpy(&scale[p], scales + p * apart, sizeof scale[p]);
    for (int r = 0; r < ROWS; ++r) {
      const Ints less = excess(x + r * stride, w.k, g);
      for (int p = 0; p < PARTS; ++p) {
        Ints sum = sums[0][r][p] - less;
        if constexpr (kSets == 2) sum += sums[1][r][p];
        total[r][p] += __builtin_convertvector(sum, Floats) * scale[p];
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PARTS; ++p) {
      const Floats scaled = total[r][p] * task.row_scales[row + r];
      const int n = PANELS > 1 ? p : 0, place = PANELS > 1 ? 0 : part + p;
      __builtin_memcpy(reinterpret_cast<char*>(&results[r][n].value) + place * kIntBytes, &scaled,
                       sizeof scaled);
    }
}

template <int ROWS, int PANELS>
void int4_tile(const GemmTask<bf16>& task, const QuantisedPanels& w, int64_t row, int64_t block) {
  static_assert(PANELS == 1 || kIntParts == 1);
  constexpr int kParts = PANELS > 1 ? PANELS : ROWS == 1 ? kIntParts : 1;
  Result results[ROWS][PANELS];
  for (int part = 0; part < kIntParts; part += kParts)
    int4_parts<ROWS, kParts>(task, w, row, w.data + block * w.panel_bytes, part, results);
  put_whole_tile<ROWS, PANELS>(task, results, row, block);
}

void int4_gemm(const GemmTask<bf16>& task, const QuantisedPanels& w) {
  if (integer_tiles<true>(task, w)) return;
  const int64_t done = multiply_by_sums(task, w);
  for_integer_tiles(task, done, [&]<int ROWS, int PANELS>(int64_t row, int64_t block) {
    int4_tile<ROWS, PANELS>(task, w, row, block);
  });
}

void quantise_int4_rows(QuantisedNumber* numbers, float* scale, const bf16* x, int64_t k,
                        int64_t group, float) {
  quantise_bytes<true>(numbers, scale, x, k, group, 8);
}

/// arrange: QuantisedKernels'.
constexpr QuantisedKernels int4_rows_kernels(decltype(QuantisedKernels::arrange) arrange) {
  return {int4_gemm, nullptr, nullptr, quantise_int4_rows, nullptr, arrange};
}

}  // namespace
