// Strips of q and tiles of values, laid out as the sides of tile products (attention_tiles.inl).

namespace {

constexpr int64_t kStrip = kLanes, kTileElements = kTileRows * kTileK, kSums = 2 * kTileRows;
static_assert(kStrip == kTileRows);

template <int... J>
struct Lanes {};
using Lanes16 = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
using VecW = uint16_t __attribute__((vector_size(64)));

/// Of a square of 2 WIDTH x 2 WIDTH, exchanges the quarters off the diagonal.
template <int WIDTH, int... J>
NANOVLLM_INLINE void exchange(VecU& a, VecU& b, Lanes<J...>) {
  const VecU upper = __builtin_shufflevector(a, b, ((J & WIDTH) ? 16 + J - WIDTH : J)...);
  b = __builtin_shufflevector(a, b, ((J & WIDTH) ? 16 + J : J + WIDTH)...);
  a = upper;
}
template <int WIDTH>
NANOVLLM_INLINE void exchange_rows(VecU (&rows)[16]) {
  for (int i = 0; i < 16; ++i)
    if (!(i & WIDTH)) exchange<WIDTH>(rows[i], rows[i + WIDTH], Lanes16{});
}
NANOVLLM_INLINE void transpose(VecU (&rows)[16]) {
  exchange_rows<8>(rows);
  exchange_rows<4>(rows);
  exchange_rows<2>(rows);
  exchange_rows<1>(rows);
}

/// A strip of q as the right side of a product over head_dim; rows behind the piece's last are
/// zeros.
NANOVLLM_INLINE void pack_strip(const Piece<bf16>& piece, int64_t strip) {
  const AttentionTask& task = piece.task;
  bf16* to = piece.q + strip * kStrip * piece.d;
  for (int64_t i = 0; i < piece.d; i += kTileK, to += kTileElements) {
    const int64_t count = task.head_dim - i < kTileK ? task.head_dim - i : kTileK;
    VecU rows[16] = {};  // pairs of elements
    for (int64_t j = 0; j < kStrip && strip * kStrip + j < piece.rows; ++j) {
      const int64_t row = piece.first_row + strip * kStrip + j, token = row / task.group,
                    head = row % task.group;
      __builtin_memcpy(&rows[j],
                       static_cast<const bf16*>(task.q) + token * task.q_token_stride +
                           head * task.q_head_stride + i,
                       static_cast<size_t>(count) * sizeof(bf16));
    }
    transpose(rows);
    __builtin_memcpy(static_cast<void*>(to), rows, sizeof rows);
  }
}

/// The transposed values of the keys [begin, end), zeros for the others, as the left side of a
/// product over 64 keys: [d / 16, 2, 16 elements of the head, 32 keys].
NANOVLLM_INLINE void pack_values(bf16* to, const bf16* const* v, int64_t begin, int64_t end,
                                 int64_t d) {
  for (int64_t i = 0; i < d; i += 32)
    for (int64_t key = 0; key < kAttentionTile; key += kTileK) {
      VecW low[16], high[16];  // of every four of 8 elements of the head: pairs of keys
      for (int64_t j = 0; j < 16; ++j) {
        VecW pair[2] = {};
        for (int64_t half = 0; half < 2; ++half) {
          const int64_t at = key + 2 * j + half;
          if (begin <= at && at < end) __builtin_memcpy(&pair[half], v[at] + i, sizeof pair[half]);
        }
        low[j] = reinterpret_cast<VecW>(_mm512_unpacklo_epi16(reinterpret_cast<__m512i>(pair[0]),
                                                              reinterpret_cast<__m512i>(pair[1])));
        high[j] = reinterpret_cast<VecW>(_mm512_unpackhi_epi16(reinterpret_cast<__m512i>(pair[0]),
                                                               reinterpret_cast<__m512i>(pair[1])));
      }
      const auto put_half = [&](const VecW(&half)[16], int64_t first)
          __attribute__((always_inline)) {
        VecU rows[16];
        __builtin_memcpy(rows, half, sizeof rows);
        transpose(rows);
        for (int64_t j = 0; j < 16; ++j) {
          const int64_t element = i + j / 4 * 8 + first + j % 4;
          __builtin_memcpy(
              static_cast<void*>(to + (element / 16 * 2 + key / kTileK) * kTileElements +
                                 element % 16 * kTileK),
              &rows[j], sizeof rows[j]);
        }
      };
      put_half(low, 0);
      put_half(high, 4);
    }
}

NANOVLLM_INLINE bool all_finite(const bf16* const* v, int64_t begin, int64_t end, int64_t d) {
  VecW found{};
  for (int64_t key = begin; key < end; ++key)
    for (int64_t i = 0; i < d; i += kTileK) {
      VecW value;
      __builtin_memcpy(&value, v[key] + i, sizeof value);
      found |= reinterpret_cast<VecW>((value & 0x7f80u) == 0x7f80u);
    }
  uint64_t words[8], any = 0;
  __builtin_memcpy(words, &found, sizeof words);
  for (const uint64_t word : words) any |= word;
  return any == 0;
}

}  // namespace
