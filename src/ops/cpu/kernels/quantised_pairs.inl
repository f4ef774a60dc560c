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

/// Of four registers of four lanes of four words: word i of a lane of the result's register j is
/// word j of that lane of register i.
NANOVLLM_INLINE void transpose_lanes(__m512i (&v)[4]) {
  const auto low_words = [](__m512i a, __m512i b) __attribute__((always_inline)) {
    return _mm512_mask_blend_epi32(0xaaaa, a, _mm512_maskz_slli_epi64(0xff, b, 32));
  };
  const auto high_words = [](__m512i a, __m512i b) __attribute__((always_inline)) {
    return _mm512_mask_blend_epi32(0xaaaa, _mm512_maskz_srli_epi64(0xff, a, 32), b);
  };
  // Shifts and blends in the first step: shuffles have fewer units.
  const __m512i a = low_words(v[0], v[1]), b = high_words(v[0], v[1]), c = low_words(v[2], v[3]),
                d = high_words(v[2], v[3]);
  v[0] = _mm512_maskz_unpacklo_epi64(0xff, a, c);
  v[1] = _mm512_maskz_unpacklo_epi64(0xff, b, d);
  v[2] = _mm512_maskz_unpackhi_epi64(0xff, a, c);
  v[3] = _mm512_maskz_unpackhi_epi64(0xff, b, d);
}

/// Weights that int4's sixteen numbers stand for in a group of a panel: lane l of table i is of row
/// 4 l + i, a byte for each number, so that a shuffle of bytes looks up four rows.
struct Int4Tables {
  static constexpr int kUnits = 2;  // that hold sixteen columns
  __m512i low[4], high[4];

  NANOVLLM_INLINE void open(const uint8_t* scales, const uint8_t* zeros) {
    Int4Group group;
    group.open(scales, zeros);
    const __m512i halves = _mm512_set1_epi32(0x03010200);  // of two bf16: low bytes, then high ones
    const __m512i order = _mm512_add_epi32(
        halves, _mm512_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808,
                                 0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c,
                                 0x08080808, 0x04040404, 0));
    const auto pair = [&](uint32_t q) __attribute__((always_inline)) {
      const VecU first = reinterpret_cast<VecU>(group.column(q - VecU{}, 0)),
                 second = reinterpret_cast<VecU>(group.column((q + 1) - VecU{}, 0));
      return _mm512_maskz_shuffle_epi8(~0ull, reinterpret_cast<__m512i>(first >> 16 | second),
                                       order);
    };
#pragma GCC unroll 4
    for (uint32_t t = 0; t < 4; ++t) {
      const __m512i a = pair(4 * t), b = pair(4 * t + 2);
      low[t] = _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_maskz_slli_epi32(0xffff, b, 16));
      high[t] = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_maskz_srli_epi32(0xffff, a, 16), b);
    }
    transpose_lanes(low);
    transpose_lanes(high);
  }

  /// pairs[p]: columns 2 p and 2 p + 1 of the sixteen whose numbers are in two units.
  NANOVLLM_INLINE void look_up(VecU (&pairs)[8], const uint8_t* units) const {
    const __m512i first = _mm512_loadu_si512(units), second = _mm512_loadu_si512(units + 64),
                  of_two[2] = {_mm512_maskz_unpacklo_epi32(0xffff, first, second),
                               _mm512_maskz_unpackhi_epi32(0xffff, first, second)};
    // Words of a lane, whose bytes are of columns 2 p, 2 p + 8, 2 p + 1 and 2 p + 9.
    const __m512i words = _mm512_set_epi32(0x07030703, 0x06020602, 0x05010501, 0x04000400,  //
                                           0x07030703, 0x06020602, 0x05010501, 0x04000400,  //
                                           0x07030703, 0x06020602, 0x05010501, 0x04000400,  //
                                           0x07030703, 0x06020602, 0x05010501, 0x04000400);
    const __m512i spread[2] = {words, _mm512_add_epi32(words, _mm512_set1_epi32(0x08080808))},
                  even = _mm512_set1_epi32(0x00000f0f), odd = _mm512_set1_epi32(0x0f0f0000),
                  bytes_of_even = _mm512_set1_epi16(0x00ff);
    const auto select = [&](__m512i a, __m512i b) __attribute__((always_inline)) {
      return _mm512_maskz_ternarylogic_epi32(0xffff, bytes_of_even, a, b, 0xca);
    };
    __m512i columns[2][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i bytes = _mm512_maskz_shuffle_epi8(~0ull, of_two[i / 2], spread[i % 2]),
                    numbers = _mm512_or_si512(
                        _mm512_and_si512(bytes, even),
                        _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bytes, 4), odd)),
                    lows = _mm512_maskz_shuffle_epi8(~0ull, low[i], numbers),
                    highs = _mm512_maskz_shuffle_epi8(~0ull, high[i], numbers);
      columns[0][i] = select(lows, _mm512_maskz_slli_epi16(~0u, highs, 8));
      columns[1][i] = select(_mm512_maskz_srli_epi16(~0u, lows, 8), highs);
    }
    transpose_lanes(columns[0]);
    transpose_lanes(columns[1]);
#pragma GCC unroll 8
    for (int p = 0; p < 8; ++p) pairs[p] = reinterpret_cast<VecU>(columns[p / 4][p % 4]);
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
              for (int b = 0; b < BLOCKS; ++b) {
                const uint8_t* units =
                    panel + b * w.panel_bytes + w.units + i * 4 * Numbers::kUnits;
                for (int u = 0; u < Numbers::kUnits; ++u)
                  __builtin_prefetch(units + ahead + u * 64);
                VecU pairs[8];
                numbers[b].look_up(pairs, units);
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
  for_some_rows(task, [&]<int ROWS, int BLOCKS>(int64_t block) {
    packed_pair_rows<Numbers, ROWS, BLOCKS>(task, w, block);
  });
}

/// A panel of pairs of columns, [k / 2, 16 rows, 2].
template <class Numbers>
void dequantise_pairs(bf16* to, const QuantisedPanels& w, int64_t block, int64_t) {
  const uint8_t* panel = w.data + block * w.panel_bytes;
  for_groups(
      w, [&](int64_t first, int64_t count, int64_t g) __attribute__((always_inline)) {
        Numbers numbers;
        numbers.open(panel + g * 64, panel + w.zeros + g * 16);
        for (int64_t i = first; i < first + count; i += 16) {
          VecU pairs[8];
          numbers.look_up(pairs, panel + w.units + i * 4 * Numbers::kUnits);
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
