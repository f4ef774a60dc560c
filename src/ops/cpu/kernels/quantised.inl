// Products with quantised weights: numbers become bf16 in registers, and from there on the
// arithmetic is the plain product's, in its order. QuantisedPanels says how they lie.

namespace {

/// v, normal or 0, rounded to nearest even to bf16: what is added and taken off again has 2^16
/// times the value of v's own power of two, so that f32's last place is bf16's.
NANOVLLM_INLINE Vec as_bf16(Vec v) {
  const Vec power = reinterpret_cast<Vec>(reinterpret_cast<VecU>(v) & 0xff800000u);
  const Vec large = power * 65536.0f;
  return (v + large) - large;
}

NANOVLLM_INLINE VecU load_unit(const uint8_t* p) {
  VecU v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

/// The rows' zero points of a group.
NANOVLLM_INLINE VecI load_zeros(const uint8_t* p) {
  VecB v;
  __builtin_memcpy(&v, p, sizeof v);
  return widen(v);
}

/// A group of one panel: what turns its numbers into weights. column() takes the unit's column j.
struct Int4Group {
  static constexpr int kColumns = 8, kMiddle = 8;
  Vec scale;
  VecI zero;
  NANOVLLM_INLINE void open(const uint8_t* scales, const uint8_t* zeros) {
    __builtin_memcpy(&scale, scales, sizeof scale);
    zero = load_zeros(zeros);
  }
  NANOVLLM_INLINE Vec column(VecU unit, int j) const {
    const VecI q = reinterpret_cast<VecI>(unit >> (4 * j) & 15u);
    return as_bf16(__builtin_convertvector(q - zero, Vec) * scale);
  }
};
struct Int8Group {
  static constexpr int kColumns = 4, kMiddle = 0;
  Vec scale;
  VecI zero;
  NANOVLLM_INLINE void open(const uint8_t* scales, const uint8_t* zeros) {
    __builtin_memcpy(&scale, scales, sizeof scale);
    zero = load_zeros(zeros);
  }
  NANOVLLM_INLINE Vec column(VecU unit, int j) const {
    const VecI q = reinterpret_cast<VecI>(unit << (24 - 8 * j)) >> 24;
    return as_bf16(__builtin_convertvector(q - zero, Vec) * scale);
  }
};

/// v, rounded to f32: not to become part of a fused operation.
NANOVLLM_INLINE Vec rounded(Vec v) {
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(v);
#else
  return v;  // Clang fuses within an expression alone
#endif
}

/// A group without zero points whose scales are bf16 numbers, so that v = scale * q has 15 bits at
/// most and is exact. (2^16 + 1) v lies below the next power of two then: its last place is bf16's
/// for v, and 2^16 v is even there where v lies halfway.
template <class Group>
struct ExactGroup {
  static constexpr int kColumns = Group::kColumns;
  Vec large, sum;
  NANOVLLM_INLINE void open(const uint8_t* scales, const uint8_t*) {
    Vec scale;
    __builtin_memcpy(&scale, scales, sizeof scale);
    large = scale * 65536.0f;
    sum = scale * 65537.0f;
  }
  NANOVLLM_INLINE Vec column(VecU unit, int j) const {
    constexpr int kBits = 32 / kColumns;
    // int4's from 0 to 15 become signed.
    if constexpr (kBits == 4) unit ^= 0x88888888u;
    const VecI number = reinterpret_cast<VecI>(unit << (32 - kBits * (j + 1))) >> (32 - kBits);
    const Vec q = __builtin_convertvector(number, Vec), with_large = rounded(q * sum);
    return with_large - q * large;
  }
  /// Whether a group is such a one.
  static NANOVLLM_INLINE bool fits(const uint8_t* scales, const uint8_t* zeros) {
    const VecI others =
        reinterpret_cast<VecI>(load_unit(scales) & 0xffffu) | (load_zeros(zeros) - Group::kMiddle);
    uint64_t words[8], any = 0;
    __builtin_memcpy(words, &others, sizeof words);
    for (const uint64_t word : words) any |= word;
    return any == 0;
  }
};

struct E4m3Group {
  static constexpr int kColumns = 4;
  Vec scale;
  NANOVLLM_INLINE void open(const uint8_t* scales, const uint8_t*) {
    __builtin_memcpy(&scale, scales, sizeof scale);
    scale *= 0x1p+120f;  // for the exponent's bias, 127 in place of 7
  }
  NANOVLLM_INLINE Vec column(VecU unit, int j) const {
    const VecI q = reinterpret_cast<VecI>(unit << (24 - 8 * j)) >> 4;
    return as_bf16(reinterpret_cast<Vec>(q & static_cast<int32_t>(0x87f00000u)) * scale);
  }
};

/// Calls body(first column, columns, group) for each group of the row, in order.
template <class Body>
NANOVLLM_INLINE void for_groups(const QuantisedPanels& w, Body&& body) {
  for (int64_t first = 0, g = 0; first < w.k; first += w.group, ++g)
    body(first, w.k - first < w.group ? w.k - first : w.group, g);
}

/// ROWS x BLOCKS tiles of 1 x 16 outputs, of `count` columns from `first` on, all of group g. x:
/// f32 rows k apart; panel: the first of BLOCKS.
template <class Group, int ROWS, int BLOCKS>
NANOVLLM_INLINE void quantised_tile(const float* x, const QuantisedPanels& w, const uint8_t* panel,
                                    int64_t first, int64_t count, int64_t g,
                                    Sum (&acc)[ROWS][BLOCKS]) {
  Group group[BLOCKS];
  const uint8_t* units[BLOCKS];
  for (int b = 0; b < BLOCKS; ++b) {
    const uint8_t* from = panel + b * w.panel_bytes;
    group[b].open(from + g * 64, from + w.zeros + g * 16);
    units[b] = from + w.units + first / Group::kColumns * 64;
  }
  const auto add = [&](int64_t i, int j) __attribute__((always_inline)) {
    Vec column[BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) column[b] = group[b].column(load_unit(units[b]), j);
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < BLOCKS; ++b) acc[r][b].add(x[r * w.k + i], column[b]);
  };
  int64_t i = first;
  for (; i + Group::kColumns <= first + count; i += Group::kColumns) {
#pragma GCC unroll 8
    for (int j = 0; j < Group::kColumns; ++j) add(i + j, j);
    for (int b = 0; b < BLOCKS; ++b) units[b] += 64;
  }
  for (int j = 0; i + j < first + count; ++j) add(i + j, j);
}

/// Calls body<Group>(first panel, first column, columns, group) for each group of BLOCKS panels, or
/// body<ExactGroup<Group>>() where all panels' are such.
template <class Group, int BLOCKS, class Body>
NANOVLLM_INLINE void with_groups(const QuantisedPanels& w, int64_t block, Body body) {
  const uint8_t* panel = w.data + block * w.panel_bytes;
  for_groups(
      w, [&](int64_t first, int64_t count, int64_t g) __attribute__((always_inline)) {
        if constexpr (requires { Group::kMiddle; }) {
          bool fits = true;
          for (int b = 0; b < BLOCKS; ++b) {
            const uint8_t* from = panel + b * w.panel_bytes;
            fits = fits && ExactGroup<Group>::fits(from + g * 64, from + w.zeros + g * 16);
          }
          if (fits) return body.template operator()<ExactGroup<Group>>(panel, first, count, g);
        }
        body.template operator()<Group>(panel, first, count, g);
      });
}

template <class Group, int ROWS, int BLOCKS>
void quantised_rows(const GemmTask<bf16>& task, const QuantisedPanels& w, int64_t block) {
  Sum acc[ROWS][BLOCKS];
  with_groups<Group, BLOCKS>(
      w, block,
      [&]<class Any>(const uint8_t* panel, int64_t first, int64_t count, int64_t g)
          __attribute__((always_inline)) {
            quantised_tile<Any, ROWS, BLOCKS>(task.scratch, w, panel, first, count, g, acc);
          });
  put_tile<ROWS, BLOCKS>(task, acc, 0, block);
}

/// Calls multiply<ROWS, BLOCKS>(block) for all the task's blocks, with up to SUMS sums at once.
template <int SUMS, int ROWS, class Multiply>
void for_blocks(const GemmTask<bf16>& task, Multiply multiply) {
  constexpr int kBlocks = ROWS < SUMS ? SUMS / ROWS : 1;
  int64_t block = task.first_block;
  for (; block + kBlocks <= task.end_block; block += kBlocks)
    multiply.template operator()<ROWS, kBlocks>(block);
  for (; block < task.end_block; ++block) multiply.template operator()<ROWS, 1>(block);
}

/// The same of the task's rows, kQuantisedRows at most.
template <int SUMS, class Multiply>
NANOVLLM_INLINE void for_some_rows(const GemmTask<bf16>& task, Multiply multiply) {
  if (task.m == 1)
    for_blocks<SUMS, 1>(task, multiply);
  else if (task.m == 2)
    for_blocks<SUMS, 2>(task, multiply);
  else if (task.m == 3)
    for_blocks<SUMS, 3>(task, multiply);
  else
    for_blocks<SUMS, 4>(task, multiply);
}

/// The same, and the rows are floats in the task's scratch memory then.
template <class Multiply>
NANOVLLM_INLINE void for_few_rows(const GemmTask<bf16>& task, Multiply multiply) {
  rows_as_floats(task, 0, task.m);
  for_some_rows<2>(task, multiply);
}

template <class Group>
void quantised_gemm(const GemmTask<bf16>& task, const QuantisedPanels& w) {
  for_few_rows(task, [&]<int ROWS, int BLOCKS>(int64_t block) {
    quantised_rows<Group, ROWS, BLOCKS>(task, w, block);
  });
}

/// Panels that are dequantised are plain ones.
void plain_gemm(const GemmTask<bf16>& task, const QuantisedPanels&) { gemm<bf16>(task); }

/// The panel's weights: columns of 16 rows or, for tile products, pairs of columns.
template <class Group, bool PAIRS>
void dequantise(bf16* to, const QuantisedPanels& w, int64_t block, int64_t pairs_stride) {
  const uint8_t* panel = w.data + block * w.panel_bytes;
  for_groups(
      w, [&](int64_t first, int64_t count, int64_t g) __attribute__((always_inline)) {
        Group group;
        group.open(panel + g * 64, panel + w.zeros + g * 16);
        const uint8_t* units = panel + w.units + first / Group::kColumns * 64;
        const auto bits = [&](int64_t i) __attribute__((always_inline)) {
          const VecU unit = load_unit(units + i / Group::kColumns * 64);
          return reinterpret_cast<VecU>(group.column(unit, static_cast<int>(i % Group::kColumns)));
        };
        if constexpr (PAIRS) {
          for (int64_t i = 0; i < count; i += 2) {
            VecU pair = bits(i) >> 16;
            if (i + 1 < count) pair |= bits(i + 1);
            const int64_t column = first + i;
            __builtin_memcpy(
                static_cast<void*>(to + column / kTileK * pairs_stride + column % kTileK * kLanes),
                &pair, sizeof pair);
          }
        } else {
          for (int64_t i = 0; i < count; ++i) {
            const VecH half = __builtin_convertvector(bits(i) >> 16, VecH);
            __builtin_memcpy(static_cast<void*>(to + (first + i) * kLanes), &half, sizeof half);
          }
        }
      });
}

template <class Group>
constexpr QuantisedKernels quantised_kernels() {
  return {quantised_gemm<Group>, dequantise<Group, false>, plain_gemm, nullptr,
          dequantise<Group, true>};
}

}  // namespace
