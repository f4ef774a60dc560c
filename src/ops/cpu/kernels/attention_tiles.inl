// Attention's two products by AMX tiles, for one tile of keys and the rows of a piece. The
// probabilities go in as two bf16 numbers each, whose sum has 16 bits of the f32; the softmax
// between is that of attention.inl.
//
// A row's bits do not depend on the other rows of its piece: tiles work on each row by itself, keys
// that it does not see have probability zero, and it is changed only by tiles of keys that it sees.

namespace {

template <int... J>
struct Lanes {};
using Lanes16 = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
using Lanes32 = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                      22, 23, 24, 25, 26, 27, 28, 29, 30, 31>;
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

/// 64 keys as the right side of a product over head_dim: tile_layout(64, d). Places behind the last
/// key repeat it.
NANOVLLM_INLINE void pack_keys(bf16* to, const bf16* const* k, int64_t count, int64_t d) {
  for (int64_t first = 0; first < kAttentionTile; first += 16)
    for (int64_t i = 0; i < d; i += kTileK) {
      VecU rows[16];  // pairs of elements
      for (int64_t j = 0; j < 16; ++j)
        __builtin_memcpy(&rows[j], k[first + j < count ? first + j : count - 1] + i,
                         sizeof rows[j]);
      exchange_rows<8>(rows);
      exchange_rows<4>(rows);
      exchange_rows<2>(rows);
      exchange_rows<1>(rows);
      const int64_t tile = (first / 32 * (d / kTileK) + i / kTileK) * 2 + first / 16 % 2;
      __builtin_memcpy(static_cast<void*>(to + tile * 16 * kTileK), rows, sizeof rows);
    }
}

template <int... J>
NANOVLLM_INLINE void interleave(bf16* first, bf16* second, VecW a, VecW b, Lanes<J...>) {
  const VecW low = __builtin_shufflevector(a, b, (J / 2 + J % 2 * 32)...),
             high = __builtin_shufflevector(a, b, (16 + J / 2 + J % 2 * 32)...);
  __builtin_memcpy(static_cast<void*>(first), &low, sizeof low);
  __builtin_memcpy(static_cast<void*>(second), &high, sizeof high);
}

/// The values of the keys [begin, end), zeros for the others, as the right side of a product over
/// 64 keys: tile_layout(d, 64).
NANOVLLM_INLINE void pack_values(bf16* to, const bf16* const* v, int64_t begin, int64_t end,
                                 int64_t d) {
  for (int64_t key = 0; key < kAttentionTile; key += 2)
    for (int64_t i = 0; i < d; i += kTileColumns) {
      VecW pair[2] = {};
      for (int64_t j = 0; j < 2; ++j)
        if (begin <= key + j && key + j < end)
          __builtin_memcpy(&pair[j], v[key + j] + i, sizeof pair[j]);
      bf16* tile =
          to + (i / kTileColumns * 2 + key / kTileK) * 2 * 16 * kTileK + key % kTileK / 2 * kTileK;
      interleave(tile, tile + 16 * kTileK, pair[0], pair[1], Lanes32{});
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

/// In place: 64 probabilities become 64 bf16 numbers and the 64 that are missing from them.
NANOVLLM_INLINE void split_probabilities(float* p) {
  bf16 parts[2 * kAttentionTile];
  for (int64_t i = 0; i < kAttentionTile; i += kLanes) {
    const Vec all = load(p + i), rounded = rounded_to<bf16>(all);
    store(parts + i, rounded);
    store(parts + kAttentionTile + i, all - rounded);
  }
  __builtin_memcpy(p, parts, sizeof parts);
}

/// y[row, 32 columns from 32 * block on] of all rows of the piece.
NANOVLLM_INLINE void multiply_piece(const Piece<bf16>& piece, float* y, int64_t y_stride,
                                    const bf16* x, int64_t x_stride, const bf16* w, int64_t steps,
                                    int passes) {
  const TileSource source{x, x_stride, kTileK, kTileRows * x_stride};
  if (piece.rows > kTileRows)
    multiply_tiles<2>(y, y_stride, source, w, steps, passes);
  else
    multiply_tiles<1>(y, y_stride, source, w, steps, passes);
}

/// Before the first tile of keys: rows between the piece's last and the next 16 are zeros.
NANOVLLM_INLINE void configure_tiles_of(const Piece<bf16>& piece) {
  const int64_t rows = piece.rows < kTileRows ? piece.rows : kTileRows;
  configure_tiles(rows);
  if (piece.rows > rows)
    __builtin_memset(static_cast<void*>(piece.q + piece.rows * piece.d), 0,
                     static_cast<size_t>((2 * rows - piece.rows) * piece.d) * sizeof(bf16));
}

void multiply_by_tiles(const Piece<bf16>& piece, int64_t first_key, const Tile<bf16>& tile) {
  const int64_t d = piece.d;
  // The rows that see keys of this tile.
  int64_t first = 0, last = piece.rows;
  while (first < last && piece.end(first, first_key) == 0) ++first;
  while (first < last && piece.begin(last - 1, first_key) == kAttentionTile) --last;
  if (first == last) return;
  const int64_t begin = piece.begin(first, first_key), end = piece.end(last - 1, first_key);

  bf16* keys = reinterpret_cast<bf16*>(piece.v_f32);
  bf16* values = keys + kAttentionTile * d;
  pack_keys(keys, tile.k, tile.count, d);
  for (int64_t block = 0; block * 32 < end; ++block)
    multiply_piece(piece, piece.scores + block * 32, kAttentionTile, piece.q, d,
                   keys + block * 32 * d, d / kTileK, 1);
  float decay[kAttentionRows];
  for (int64_t r = first; r < last; ++r) {
    float* scores = piece.scores + r * kAttentionTile;
    decay[r] = softmax_step(scores, piece.begin(r, first_key), piece.end(r, first_key),
                            piece.task.scale, piece.state[r]);
    split_probabilities(scores);
  }

  const auto multiply = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
    pack_values(values, tile.v, from, to, d);
    for (int64_t block = 0; block * kTileColumns < d; ++block)
      multiply_piece(piece, piece.sums + block * kTileColumns, d,
                     reinterpret_cast<const bf16*>(piece.scores), 2 * kAttentionTile,
                     values + block * kTileColumns * kAttentionTile, kAttentionTile / kTileK, 2);
  };
  const auto add = [&](int64_t r) __attribute__((always_inline)) {
    float* acc = piece.acc + r * d;
    for (int64_t i = 0; i < d; i += kLanes)  // + 0: a sum of zeros has no sign
      store(acc + i, load(acc + i) * decay[r] + (load(piece.sums + r * d + i) + 0.0f));
  };
  const bool masked = piece.begin(last - 1, first_key) > begin || piece.end(first, first_key) < end;
  if (masked && !all_finite(tile.v, begin, end, d)) {
    // Zero times infinity is no zero: every row by itself, without the keys that it does not see.
    for (int64_t r = first; r < last; ++r) {
      multiply(piece.begin(r, first_key), piece.end(r, first_key));
      add(r);
    }
    return;
  }
  multiply(begin, end);
  for (int64_t r = first; r < last; ++r) add(r);
}

}  // namespace
