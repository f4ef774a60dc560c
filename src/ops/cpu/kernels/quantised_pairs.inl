// Products with quantised weights by dot products of pairs of bf16 numbers, in the order in which
// oneDNN adds them (CpuBackend::segment()): the columns of a segment from zero, pair by pair, and
// segments one after the other. So a weight that stays packed gives the bits of its plain numbers.

namespace {

struct PairSum {
  Vec all{}, part{};
  NANOVLLM_INLINE void add(uint32_t x, VecU w) {
    const VecU pair = x - VecU{};
    part = reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(part),
                                                  reinterpret_cast<__m512bh>(pair),
                                                  reinterpret_cast<__m512bh>(w)));
  }
  NANOVLLM_INLINE void end_segment(bool is_first) {
    all = is_first ? part : all + part;
    part = Vec{};
  }
  NANOVLLM_INLINE Vec get() const { return all; }
};

/// Columns i and i + 1 of row r of the task's x, from `row` on.
NANOVLLM_INLINE uint32_t pair_at(const GemmTask<bf16>& task, int64_t row, int64_t i) {
  uint32_t pair;
  __builtin_memcpy(&pair, task.x + row * task.x_stride + i, sizeof pair);
  return pair;
}

/// Calls add(i) for pairs of columns, or as many as STEP, of [begin, end), and ends segments.
template <int STEP, int ROWS, int BLOCKS, class Add>
NANOVLLM_INLINE void add_pairs(const GemmTask<bf16>& task, int64_t begin, int64_t end,
                               PairSum (&acc)[ROWS][BLOCKS], Add add) {
  for (int64_t i = begin; i < end;) {
    const int64_t next = (i / task.segment + 1) * task.segment, stop = next < end ? next : end;
    for (; i < stop; i += STEP) add(i);
    if (stop == next || stop == task.k)
      for (auto& row : acc)
        for (PairSum& sum : row) sum.end_segment(stop <= task.segment);
  }
}

// The intrinsics without masks begin with a register that is never set, which the compiler warns
// of.

/// Weights that int4's sixteen numbers stand for in a group of a panel: lane l of table i is of row
/// 4 i + l, a byte for each number, and two tables are one that a permutation of bytes looks up.
struct Int4Tables {
  static constexpr int kUnits = 2;  // that hold sixteen columns
  static constexpr VecU kWords = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  __m512i low[4], high[4];

  NANOVLLM_INLINE void open(const uint8_t* scales, const uint8_t* zeros) {
    const Vec numbers = __builtin_convertvector(kWords, Vec);
    const __m512 zero = reinterpret_cast<__m512>(__builtin_convertvector(load_zeros(zeros), Vec));
    const auto row = [&](int r) __attribute__((always_inline)) {
      float scale;
      __builtin_memcpy(&scale, scales + 4 * r, sizeof scale);
      const Vec of_row =
          reinterpret_cast<Vec>(_mm512_maskz_permutexvar_ps(0xffff, _mm512_set1_epi32(r), zero));
      return reinterpret_cast<__m512>((numbers - of_row) * scale);
    };
    const auto rows = [&](int r) __attribute__((always_inline)) {
      return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(row(r + 1), row(r)));
    };
    const VecU bytes = kWords * 0x08080808u + 0x06040200u;  // every other one of two registers
    const __m512i lows = reinterpret_cast<__m512i>(bytes),
                  highs = reinterpret_cast<__m512i>(bytes + 0x01010101u);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i first = rows(4 * i), second = rows(4 * i + 2);
      low[i] = _mm512_permutex2var_epi8(first, lows, second);
      high[i] = _mm512_permutex2var_epi8(first, highs, second);
    }
  }

  /// pairs[p]: columns 2 p and 2 p + 1 of the sixteen whose numbers are in two units.
  NANOVLLM_INLINE void look_up(VecU (&pairs)[8], const uint8_t* units) const {
    constexpr int kBothOrLast = 0xea;  // (a & b) | c
    // Of a lane's four rows: bytes of columns 0 and 1, 4 and 5, and behind them 2 and 3, 6 and 7.
    const __m512i in_twos = _mm512_maskz_broadcast_i32x4(
                      0xffff, _mm_set_epi32(0x0f0b0703, 0x0d090501, 0x0e0a0602, 0x0c080400)),
                  columns[2] = {_mm512_set1_epi64(0x1c1814100c080400),
                                _mm512_set1_epi64(0x3c3834302c282420)},
                  number = _mm512_set1_epi32(0x0f0f0f0f),
                  row = reinterpret_cast<__m512i>(
                      (kWords / 4 % 2 * 4 + kWords % 2 * 2) * 0x10101010u + 0x10100000u);
    const auto of_rows = [](const __m512i(&table)[4], __m512i at) __attribute__((always_inline)) {
      return _mm512_mask_blend_epi32(0xff00, _mm512_permutex2var_epi8(table[0], at, table[1]),
                                     _mm512_permutex2var_epi8(table[2], at, table[3]));
    };
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i unit = _mm512_maskz_shuffle_epi8(~0ull, _mm512_loadu_si512(units + i / 2 * 64),
                                                     in_twos),
                    bytes = _mm512_maskz_multishift_epi64_epi8(~0ull, columns[i % 2], unit),
                    at = _mm512_ternarylogic_epi32(bytes, number, row, kBothOrLast),
                    lows = of_rows(low, at), highs = of_rows(high, at);
      pairs[2 * i] = reinterpret_cast<VecU>(_mm512_maskz_unpacklo_epi8(~0ull, lows, highs));
      pairs[2 * i + 1] = reinterpret_cast<VecU>(_mm512_maskz_unpackhi_epi8(~0ull, lows, highs));
    }
  }
};

/// Numbers of a byte, which become bf16 in registers.
template <class Group>
struct BytePairs {
  static constexpr int kUnits = 4;
  Group group;

  NANOVLLM_INLINE void open(const uint8_t* scales, const uint8_t* zeros) {
    group.open(scales, zeros);
  }
  NANOVLLM_INLINE void look_up(VecU (&pairs)[8], const uint8_t* units) const {
#pragma GCC unroll 8
    for (int p = 0; p < 8; ++p) {
      const VecU unit = load_unit(units + p / 2 * 64);
      pairs[p] = reinterpret_cast<VecU>(group.column(unit, p % 2 * 2)) >> 16 |
                 reinterpret_cast<VecU>(group.column(unit, p % 2 * 2 + 1));
    }
  }
};

template <class Numbers, int ROWS, int BLOCKS>
void packed_pair_rows(const GemmTask<bf16>& task, const QuantisedPanels& w, int64_t block) {
  constexpr int kColumns = 16;
  PairSum acc[ROWS][BLOCKS];
  const uint8_t* panel = w.data + block * w.panel_bytes;
  // Panels that come next: a panel's three parts are too short for the processor to foresee.
  const int64_t ahead = BLOCKS * w.panel_bytes;
  for_groups(
      w, [&](int64_t first, int64_t count, int64_t g) __attribute__((always_inline)) {
        Numbers numbers[BLOCKS];
        for (int b = 0; b < BLOCKS; ++b) {
          const uint8_t* from = panel + b * w.panel_bytes;
          numbers[b].open(from + g * 64, from + w.zeros + g * 16);
          __builtin_prefetch(from + ahead + g * 64);
          __builtin_prefetch(from + ahead + w.zeros + g * 16);
        }
        add_pairs<kColumns>(
            task, first, first + count, acc, [&](int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 4
              for (int b = 0; b < BLOCKS; ++b) {
                const uint8_t* units =
                    panel + b * w.panel_bytes + w.units + i * 4 * Numbers::kUnits;
                for (int u = 0; u < Numbers::kUnits; ++u)
                  __builtin_prefetch(units + ahead + u * 64);
                VecU pairs[8];
                numbers[b].look_up(pairs, units);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
                  for (int p = 0; p < 8; ++p) acc[r][b].add(pair_at(task, r, i + 2 * p), pairs[p]);
              }
            });
      });
  put_tile<ROWS, BLOCKS>(task, acc, 0, block);
}

template <class Numbers>
void packed_pair_gemm(const GemmTask<bf16>& task, const QuantisedPanels& w) {
  for_some_rows<4>(task, [&]<int ROWS, int BLOCKS>(int64_t block) {
    packed_pair_rows<Numbers, ROWS, BLOCKS>(task, w, block);
  });
}

/// A panel of pairs of columns, [k / 2, 16 rows, 2].
template <class Numbers>
void dequantise_pairs(bf16* to, const QuantisedPanels& w, int64_t block, int64_t) {
  constexpr int64_t kAhead = 2048;
  const uint8_t* panel = w.data + block * w.panel_bytes;
  for_groups(
      w, [&](int64_t first, int64_t count, int64_t g) __attribute__((always_inline)) {
        Numbers numbers;
        numbers.open(panel + g * 64, panel + w.zeros + g * 16);
        for (int64_t i = first; i < first + count; i += 16) {
          const uint8_t* units = panel + w.units + i * 4 * Numbers::kUnits;
          for (int u = 0; u < Numbers::kUnits; ++u) __builtin_prefetch(units + kAhead + u * 64);
          VecU pairs[8];
          numbers.look_up(pairs, units);
          __builtin_memcpy(static_cast<void*>(to + i * kGemmBlock), pairs, sizeof pairs);
        }
      });
}

template <int ROWS, int BLOCKS>
void pair_rows(const GemmTask<bf16>& task, int64_t row, int64_t block) {
  PairSum acc[ROWS][BLOCKS];
  const bf16* w = task.w + block * task.k * kGemmBlock;
  add_pairs<2>(
      task, 0, task.k, acc, [&](int64_t i) __attribute__((always_inline)) {
        VecU pair[BLOCKS];
        for (int b = 0; b < BLOCKS; ++b)
          __builtin_memcpy(&pair[b], static_cast<const void*>(w + (b * task.k + i) * kGemmBlock),
                           sizeof pair[b]);
        for (int r = 0; r < ROWS; ++r)
          for (int b = 0; b < BLOCKS; ++b) acc[r][b].add(pair_at(task, row + r, i), pair[b]);
      });
  put_tile<ROWS, BLOCKS>(task, acc, row, block);
}

/// The product of any rows with such panels.
void pair_panels(const GemmTask<bf16>& task, const QuantisedPanels&) {
  constexpr int kRows = 6;
  const auto rows = [&]<int ROWS>(int64_t row) {
    int64_t block = task.first_block;
    for (; block + kPanelsAtOnce <= task.end_block; block += kPanelsAtOnce)
      pair_rows<ROWS, kPanelsAtOnce>(task, row, block);
    for (; block < task.end_block; ++block) pair_rows<ROWS, 1>(task, row, block);
  };
  int64_t row = 0;
  for (; row + kRows <= task.m; row += kRows) rows.template operator()<kRows>(row);
  for (; row + 2 <= task.m; row += 2) rows.template operator()<2>(row);
  if (row < task.m) rows.template operator()<1>(row);
}

template <class Numbers>
constexpr QuantisedKernels kPairs{packed_pair_gemm<Numbers>, dequantise_pairs<Numbers>, pair_panels,
                                  nullptr, nullptr};

}  // namespace
