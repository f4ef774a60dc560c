// Flash attention for some query rows of one sequence that share a KV head.
//
// Keys come in tiles of 64 at fixed absolute positions. Per row and tile: scores, their maximum,
// exponentials, and the old sum and accumulator scaled down to the new maximum (the online softmax
// of Milakov and Gimelshein; Dao et al., "FlashAttention"). A row takes the same steps in the same
// order whether it is the only one (decode) or one of hundreds (prefill): its bits depend on its
// sequence and position alone. Keys beyond a row's position, or before its window, are never mixed
// in, not even with weight zero; tiles that lie before the window are not visited.

namespace {

/// One tile's rows, where the inner loops want them.
template <class T>
struct Tile {
  const T* k[kAttentionTile];  // rows of Piece::d elements
  const T* v[kAttentionTile];
  int64_t count;  // keys of the tile that some row of the piece sees
};

/// Of a tile's keys and values that are E4M3: the scales of their rows. Scores and probabilities
/// are multiplied with them, and numbers need not be.
struct TileScales {
  float k[kAttentionTile] = {}, v[kAttentionTile] = {};
};

// -- Scores: dot products along head_dim, sixteen partial sums each, reduced by one fixed tree.

template <class T, class K>
struct Dot {
  static constexpr int64_t kStep = 16;
  static NANOVLLM_INLINE void step(Sum& sum, const T* a, const K* b) {
    sum.add(sixteen(a), sixteen(b));
  }
};
#if defined(__AVX512BF16__)
template <>
struct Dot<bf16, bf16> {
  static constexpr int64_t kStep = 32;
  static NANOVLLM_INLINE void step(Sum& sum, const bf16* a, const bf16* b) {
    __m512i x, y;
    __builtin_memcpy(&x, a, sizeof x);
    __builtin_memcpy(&y, b, sizeof y);
    sum.all = reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum.all),
                                                     reinterpret_cast<__m512bh>(x),
                                                     reinterpret_cast<__m512bh>(y)));
  }
};
/// The type that attention beside a bf16 cache computes in: numbers are widened once where no
/// instruction multiplies them as they are.
using Bf16AsComputed = bf16;
#else
using Bf16AsComputed = float;
#endif

/// scores[r * kAttentionTile + key] of ROWS rows (q rows `d` apart) and 16 / ROWS keys from `key`
/// on.
template <int ROWS, class T, class K>
NANOVLLM_INLINE void score_block(float* scores, const T* q, const K* const* k, int64_t key,
                                 int64_t d) {
  constexpr int kKeys = 16 / ROWS, kRowsAtOnce = kSumsAtOnce == 16 || ROWS < 2 ? ROWS : 2,
                kKeysAtOnce = kSumsAtOnce / kRowsAtOnce;
  for (int row = 0; row < ROWS; row += kRowsAtOnce)
    for (int first = 0; first < kKeys; first += kKeysAtOnce) {
      Sum sums[kSumsAtOnce];
      for (int64_t i = 0; i < d; i += Dot<T, K>::kStep)
        for (int j = 0; j < kKeysAtOnce; ++j)
          for (int r = 0; r < kRowsAtOnce; ++r)
            Dot<T, K>::step(sums[r * kKeysAtOnce + j], q + (row + r) * d + i,
                            k[key + first + j] + i);
      float out[kSumsAtOnce];
      reduce(sums, out);
      for (int r = 0; r < kRowsAtOnce; ++r)
        __builtin_memcpy(scores + (row + r) * kAttentionTile + key + first, out + r * kKeysAtOnce,
                         kKeysAtOnce * sizeof(float));
    }
}

/// Scores of ROWS rows with the keys [begin, end) of the tile; the places around them, from the
/// last to the next multiple of 16, hold nonsense.
template <int ROWS, class T, class K>
NANOVLLM_INLINE void score_rows(float* scores, const T* q, const K* const* keys, int64_t begin,
                                int64_t end, int64_t d) {
  const K* k[kAttentionTile];
  const int64_t first = begin / 16 * 16, last = (end + 15) / 16 * 16;
  for (int64_t j = first; j < last; ++j) k[j] = keys[j < end ? j : end - 1];
  for (int64_t key = first; key < last; key += 16 / ROWS) score_block<ROWS>(scores, q, k, key, d);
}

// -- Values.

/// add_values() of some elements of the head.
template <int ROWS, int VECTORS, class V>
NANOVLLM_INLINE void add_elements(float* acc, const float* p, const float* decay, const V* const* v,
                                  int64_t begin, int64_t end, int64_t d, int64_t first) {
  Sum sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < VECTORS; ++c)
      sums[r][c].all = sixteen(acc + r * d + first + c * kLanes), sums[r][c].scale(decay[r]);
  for (int64_t key = begin; key < end; ++key)
    for (int c = 0; c < VECTORS; ++c) {
      const Sixteen value = sixteen(v[key] + first + c * kLanes);
      for (int r = 0; r < ROWS; ++r) sums[r][c].add(p[r * kAttentionTile + key], value);
    }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < VECTORS; ++c) sums[r][c].store(acc + r * d + first + c * kLanes);
}

/// acc[r] = acc[r] * decay[r] + sum over keys [begin, end) of p[r][key] * v[key].
template <int ROWS, class V>
NANOVLLM_INLINE void add_values(float* acc, const float* p, const float* decay, const V* const* v,
                                int64_t begin, int64_t end, int64_t d) {
  constexpr int kVectors = kSumsAtOnce / ROWS < 4 ? kSumsAtOnce / ROWS : 4;
  int64_t i = 0;
  for (; i + kVectors * kLanes <= d; i += kVectors * kLanes)
    add_elements<ROWS, kVectors>(acc, p, decay, v, begin, end, d, i);
  // d is a multiple of 32.
  if (i < d) add_elements<ROWS, 2>(acc, p, decay, v, begin, end, d, i);
}

// -- One row's softmax.

struct RowState {
  float max, sum;
};

/// Turns the scores [begin, end) into exponentials relative to the new maximum, times the scales of
/// values; the rest of the tile becomes 0 or nonsense. Returns by how much what was summed before
/// shrinks.
NANOVLLM_INLINE float softmax_step(float* s, int64_t begin, int64_t end, float scale,
                                   const TileScales* scales, RowState& state) {
  const float infinity = __builtin_inff();
  if (scales)
    for (int64_t j = begin; j < end; ++j) s[j] *= scales->k[j];
  for (int64_t j = 0; j < begin; ++j) s[j] = -infinity;
  for (int64_t j = end; j < kAttentionTile; ++j) s[j] = -infinity;
  Vec v[4], top = splat(-infinity);
  for (int i = 0; i < 4; ++i) {
    v[i] = load(s + i * kLanes) * scale;
    top = max(top, v[i]);
  }
  const float tile_max = max(top);
  const float new_max = tile_max > state.max ? tile_max : state.max;
  const float decay = exp(splat(state.max - new_max))[0];
  Vec total{};
  for (int i = 0; i < 4; ++i) {
    v[i] = exp(v[i] - new_max);
    total += v[i];
    store(s + i * kLanes, scales ? v[i] * load(scales->v + i * kLanes) : v[i]);
  }
  state.sum = state.sum * decay + sum(total);
  state.max = new_max;
  return decay;
}

// -- A piece of up to kAttentionRowsOf<T> rows.

template <class T>
constexpr int64_t kAttentionRowsOf = kHasTiles<T> ? kTileAttentionRows : kAttentionRows;

template <class T>
struct Piece {
  const AttentionTask& task;
  int64_t first_row, rows;  // they count (token, head of the group) pairs, tokens outermost
  int64_t d;                // head_dim padded to 32
  T* q;                     // [rows, d]
  float *acc, *scores;      // [rows, d], [rows, kAttentionTile]
  T *k_copy, *v_copy;       // [kAttentionTile, d]: used where head_dim is no multiple of 32
  float* v_f32;             // [kAttentionTile, d]: values widened once for many rows
  RowState* state;

  int64_t position(int64_t row) const {
    return task.first_position + (first_row + row) / task.group;
  }
  /// The first key that the row sees.
  int64_t first_key(int64_t row) const {
    const int64_t key = task.window > 0 ? position(row) + 1 - task.window : 0;
    return key > 0 ? key : 0;
  }
  /// The row sees the keys [begin, end) of the tile at `tile_key`; both rise with the row.
  int64_t begin(int64_t row, int64_t tile_key) const { return in_tile(first_key(row) - tile_key); }
  int64_t end(int64_t row, int64_t tile_key) const { return in_tile(position(row) + 1 - tile_key); }
  static int64_t in_tile(int64_t key) {
    return key < 0 ? int64_t{0} : key < kAttentionTile ? key : kAttentionTile;
  }
};

template <class T>
NANOVLLM_INLINE const T* padded_row(const T* row, T* copy, int64_t head_dim, int64_t d) {
  if (head_dim == d) return row;
  __builtin_memcpy(static_cast<void*>(copy), row, static_cast<size_t>(head_dim) * sizeof(T));
  __builtin_memset(static_cast<void*>(copy + head_dim), 0,
                   static_cast<size_t>(d - head_dim) * sizeof(T));
  return copy;
}

/// Calls body(j, key, value, place): rows of C of each key of a tile, and the place in its block.
template <class C, class T, class Body>
NANOVLLM_INLINE void for_keys(const Piece<T>& piece, int64_t first_key, int64_t count, Body body) {
  const AttentionTask& task = piece.task;
  const int64_t mask = (int64_t{1} << task.block_shift) - 1;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t position = first_key + j, block = task.block_table[position >> task.block_shift];
    const int64_t inside = position & mask, at = inside * task.head_dim;
    body(j, reinterpret_cast<const C*>(task.k + block * task.k_block_stride) + at,
         reinterpret_cast<const C*>(task.v + block * task.v_block_stride) + at, inside);
  }
}

template <class T>
NANOVLLM_INLINE void gather_tile(const Piece<T>& piece, int64_t first_key, int64_t keys,
                                 Tile<T>& tile) {
  const int64_t head_dim = piece.task.head_dim, d = piece.d;
  tile.count = keys - first_key < kAttentionTile ? keys - first_key : kAttentionTile;
  for_keys<T>(piece, first_key, tile.count, [&](int64_t j, const T* k, const T* v, int64_t) {
    tile.k[j] = padded_row(k, piece.k_copy + j * d, head_dim, d);
    tile.v[j] = padded_row(v, piece.v_copy + j * d, head_dim, d);
  });
}

/// The same of rows of head_dim numbers where the cache has them, and of the scales of E4M3.
template <class T, class K>
NANOVLLM_INLINE void gather_tile(const Piece<T>& piece, int64_t first_key, int64_t keys,
                                 Tile<K>& tile, TileScales& scales) {
  const int64_t head_dim = piece.task.head_dim, size = int64_t{1} << piece.task.block_shift;
  tile.count = keys - first_key < kAttentionTile ? keys - first_key : kAttentionTile;
  for_keys<K>(piece, first_key, tile.count, [&](int64_t j, const K* k, const K* v, int64_t inside) {
    tile.k[j] = k;
    tile.v[j] = v;
    if constexpr (std::is_same_v<K, E4m3>) {
      // The block's rows end, and its scales begin, so far behind this row.
      const int64_t to_scale = (size - inside) * head_dim + inside * 4;
      __builtin_memcpy(&scales.k[j], k + to_scale, sizeof(float));
      __builtin_memcpy(&scales.v[j], v + to_scale, sizeof(float));
    }
  });
}

/// Copies of rows of n elements with zeros behind them, `d` apart.
template <class W, class C>
NANOVLLM_INLINE void widen_rows(const W** wide, W* copies, const C* const* rows, int64_t count,
                                int64_t n, int64_t d) {
  for (int64_t j = 0; j < count; ++j) {
    W* copy = copies + j * d;
    for (int64_t i = 0; i < d; i += kLanes)
      store(copy + i, i < n ? get(rows[j] + i, n - i < kLanes ? n - i : kLanes) : Vec{});
    wide[j] = copy;
  }
}

/// One tile for rows [row, row + ROWS): scores, softmax, values.
template <int ROWS, class T, class K, class V>
NANOVLLM_INLINE void tile_rows(const Piece<T>& piece, int64_t row, int64_t first_key,
                               const K* const* k, const V* const* v, const TileScales* scales) {
  const auto begin = [&](int64_t r) { return piece.begin(row + r, first_key); };
  const auto end = [&](int64_t r) { return piece.end(row + r, first_key); };
  if (begin(0) >= end(ROWS - 1)) return;
  float* acc = piece.acc + row * piece.d;
  float* p = piece.scores + row * kAttentionTile;  // scores, then probabilities
  score_rows<ROWS>(p, piece.q + row * piece.d, k, begin(0), end(ROWS - 1), piece.d);
  float decay[ROWS];
  for (int r = 0; r < ROWS; ++r)
    decay[r] = begin(r) < end(r) ? softmax_step(p + r * kAttentionTile, begin(r), end(r),
                                                piece.task.scale, scales, piece.state[row + r])
                                 : 1.0f;
  const auto add_row = [&](int r, int64_t from, int64_t to) {
    if (from >= to) return;
    add_values<1>(acc + r * piece.d, p + r * kAttentionTile, decay + r, v, from, to, piece.d);
    decay[r] = 1.0f;  // what was summed before has shrunk by now
  };
  const int64_t common = begin(ROWS - 1), common_end = end(0);
  if (common >= common_end) {
    for (int r = 0; r < ROWS; ++r) add_row(r, begin(r), end(r));
    return;
  }
  for (int r = 0; r < ROWS; ++r) add_row(r, begin(r), common);
  add_values<ROWS>(acc, p, decay, v, common, common_end, piece.d);
  for (int r = 0; r < ROWS; ++r) {
    decay[r] = 1.0f;
    add_row(r, common_end, end(r));
  }
}

template <class T, class K, class V>
void tile_piece(const Piece<T>& piece, int64_t first_key, const K* const* k, const V* const* v,
                const TileScales* scales) {
  int64_t row = 0;
  for (; row + 4 <= piece.rows; row += 4) tile_rows<4>(piece, row, first_key, k, v, scales);
  for (; row + 2 <= piece.rows; row += 2) tile_rows<2>(piece, row, first_key, k, v, scales);
  for (; row < piece.rows; ++row) tile_rows<1>(piece, row, first_key, k, v, scales);
}

/// Rows from which a tile is widened once for all of them; its numbers are the same.
constexpr int64_t kWideningRows = 8;

template <class T>
void tile_of_cache(const Piece<T>& piece, int64_t first_key, int64_t keys) {
  Tile<T> tile;
  gather_tile(piece, first_key, keys, tile);
  if (sizeof(T) == sizeof(float) || piece.rows < kWideningRows)
    return tile_piece(piece, first_key, tile.k, tile.v, nullptr);
  const float* wide[kAttentionTile];
  widen_rows(wide, piece.v_f32, tile.v, tile.count, piece.d, piece.d);
  tile_piece(piece, first_key, tile.k, wide, nullptr);
}

/// The same of a cache whose numbers, K, are not those that the piece is computed in.
template <class K>
void tile_of_other(const Piece<float>& piece, int64_t first_key, int64_t keys) {
  Tile<K> tile;
  TileScales scales_of;
  const TileScales* scales = std::is_same_v<K, E4m3> ? &scales_of : nullptr;
  gather_tile(piece, first_key, keys, tile, scales_of);
  const int64_t head_dim = piece.task.head_dim;
  if (piece.rows < kWideningRows && head_dim == piece.d)
    return tile_piece(piece, first_key, tile.k, tile.v, scales);
  Tile<float> wide;
  widen_rows(wide.k, piece.k_copy, tile.k, tile.count, head_dim, piece.d);
  widen_rows(wide.v, piece.v_f32, tile.v, tile.count, head_dim, piece.d);
  tile_piece(piece, first_key, wide.k, wide.v, scales);
}

/// T: of q and out. The piece has the type that it is computed in.
template <class T, class C>
void attention_piece(const Piece<C>& piece) {
  const AttentionTask& task = piece.task;
  for (int64_t r = 0; r < piece.rows; ++r) {
    const int64_t token = (piece.first_row + r) / task.group,
                  head = (piece.first_row + r) % task.group;
    const T* q =
        static_cast<const T*>(task.q) + token * task.q_token_stride + head * task.q_head_stride;
    C* copy = piece.q + r * piece.d;
    __builtin_memset(static_cast<void*>(copy), 0, static_cast<size_t>(piece.d) * sizeof(C));
    along_row(
        task.head_dim, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          put(copy + i, get(q + i, count), count);
        });
    __builtin_memset(piece.acc + r * piece.d, 0, static_cast<size_t>(piece.d) * sizeof(float));
    piece.state[r] = {-__builtin_inff(), 0.0f};
  }
  const int64_t keys = piece.position(piece.rows - 1) + 1;
  for (int64_t first_key = piece.first_key(0) / kAttentionTile * kAttentionTile; first_key < keys;
       first_key += kAttentionTile) {
    if constexpr (std::is_same_v<C, float>)
      if (task.is_e4m3) {
        tile_of_other<E4m3>(piece, first_key, keys);
        continue;
      }
    if constexpr (std::is_same_v<C, T>)
      tile_of_cache(piece, first_key, keys);
    else
      tile_of_other<T>(piece, first_key, keys);
  }
  for (int64_t r = 0; r < piece.rows; ++r) {
    const int64_t token = (piece.first_row + r) / task.group,
                  head = (piece.first_row + r) % task.group;
    T* out =
        static_cast<T*>(task.out) + token * task.out_token_stride + head * task.out_head_stride;
    const float* acc = piece.acc + r * piece.d;
    const float sum = piece.state[r].sum;
    along_row(
        task.head_dim, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          put(out + i, get(acc + i, count) / sum, count);
        });
  }
}

/// T: of q and out, and of keys and values that are not E4M3; C: of what it is computed in.
template <class T, class C>
void attention_pieces(const AttentionTask& task) {
  constexpr int64_t kRows = kAttentionRowsOf<C>;
  const int64_t d = (task.head_dim + 31) / 32 * 32, rows = task.num_tokens * task.group;
  float* p = task.scratch;
  const auto take = [&](int64_t floats) { return (p += floats) - floats; };
  float* acc = take(kRows * d);
  float* scores = take(kRows * kAttentionTile);
  RowState* state = reinterpret_cast<RowState*>(take(kRows * 4));
  C* q = reinterpret_cast<C*>(take(kRows * d));
  float *keys = take(kAttentionTile * d), *values = take(kAttentionTile * d);
  // bf16: the copies of keys and values fit into the first region, the widened values have the
  // second. f32 widens E4M3 and bf16.
  C* k_copy = reinterpret_cast<C*>(keys);
  C* v_copy =
      sizeof(C) == sizeof(float) ? reinterpret_cast<C*>(values) : k_copy + kAttentionTile * d;
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t count = rows - first < kRows ? rows - first : kRows;
    const Piece<C> piece{task, first, count, d, q, acc, scores, k_copy, v_copy, values, state};
    if constexpr (kHasTiles<C>)
      attention_piece_by_tiles(piece);  // attention_tiles.inl
    else
      attention_piece<T>(piece);
  }
}

template <class T>
void attention(const AttentionTask& task) {
  if constexpr (!kHasTiles<T>)
    if (task.is_e4m3) return attention_pieces<T, float>(task);
  attention_pieces<T, std::conditional_t<sizeof(T) == sizeof(bf16), Bf16AsComputed, T>>(task);
}

}  // namespace
