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

// -- Scores: dot products along head_dim, sixteen partial sums each, reduced by one fixed tree.

#if defined(__AVX512BF16__)
struct DotBf16 {
  static constexpr int64_t kStep = 32;
  static NANOVLLM_INLINE Vec step(Vec acc, const bf16* a, const bf16* b) {
    __m512i x, y;
    __builtin_memcpy(&x, a, sizeof x);
    __builtin_memcpy(&y, b, sizeof y);
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc),
                                                  reinterpret_cast<__m512bh>(x),
                                                  reinterpret_cast<__m512bh>(y)));
  }
};
#else
struct DotBf16 {
  static constexpr int64_t kStep = 16;
  static NANOVLLM_INLINE Vec step(Vec acc, const bf16* a, const bf16* b) {
    return acc + load(a) * load(b);
  }
};
#endif
struct DotF32 {
  static constexpr int64_t kStep = 16;
  static NANOVLLM_INLINE Vec step(Vec acc, const float* a, const float* b) {
    return acc + load(a) * load(b);
  }
};

/// scores[r * kAttentionTile + key] of ROWS rows (q rows `d` apart) and 16 / ROWS keys from `key`
/// on.
template <int ROWS, class T>
NANOVLLM_INLINE void score_block(float* scores, const T* q, const T* const* k, int64_t key,
                                 int64_t d) {
  using Dot = std::conditional_t<sizeof(T) == 2, DotBf16, DotF32>;
  constexpr int kKeys = 16 / ROWS;
  Vec acc[16] = {};
  for (int64_t i = 0; i < d; i += Dot::kStep)
    for (int j = 0; j < kKeys; ++j)
      for (int r = 0; r < ROWS; ++r)
        acc[r * kKeys + j] = Dot::step(acc[r * kKeys + j], q + r * d + i, k[key + j] + i);
  float out[16];
  store(out, reduce16(acc));
  for (int r = 0; r < ROWS; ++r)
    __builtin_memcpy(scores + r * kAttentionTile + key, out + r * kKeys, kKeys * sizeof(float));
}

/// Scores of ROWS rows with the keys [begin, end) of the tile; the places around them, from the
/// last to the next multiple of 16, hold nonsense.
template <int ROWS, class T>
NANOVLLM_INLINE void score_rows(float* scores, const T* q, const Tile<T>& tile, int64_t begin,
                                int64_t end, int64_t d) {
  const T* k[kAttentionTile];
  const int64_t first = begin / 16 * 16, last = (end + 15) / 16 * 16;
  for (int64_t j = first; j < last; ++j) k[j] = tile.k[j < end ? j : end - 1];
  for (int64_t key = first; key < last; key += 16 / ROWS) score_block<ROWS>(scores, q, k, key, d);
}

// -- Values.

/// acc[r] = acc[r] * decay[r] + sum over keys [begin, end) of p[r][key] * v[key], 64 elements of
/// the head at a time.
template <int ROWS, class V>
NANOVLLM_INLINE void add_values(float* acc, const float* p, const float* decay, const V* const* v,
                                int64_t begin, int64_t end, int64_t d) {
  for (int64_t i = 0; i < d; i += 64) {
    const int vectors = d - i >= 64 ? 4 : 2;  // d is a multiple of 32
    Vec sums[ROWS][4];
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < 4; ++c)
        sums[r][c] = c < vectors ? load(acc + r * d + i + c * kLanes) * decay[r] : Vec{};
    if (vectors == 4) {
      for (int64_t key = begin; key < end; ++key)
        for (int c = 0; c < 4; ++c) {
          const Vec value = load(v[key] + i + c * kLanes);
          for (int r = 0; r < ROWS; ++r) sums[r][c] += p[r * kAttentionTile + key] * value;
        }
    } else {
      for (int64_t key = begin; key < end; ++key)
        for (int c = 0; c < 2; ++c) {
          const Vec value = load(v[key] + i + c * kLanes);
          for (int r = 0; r < ROWS; ++r) sums[r][c] += p[r * kAttentionTile + key] * value;
        }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < vectors; ++c) store(acc + r * d + i + c * kLanes, sums[r][c]);
  }
}

// -- One row's softmax.

struct RowState {
  float max, sum;
};

/// Turns the scores [begin, end) into exponentials relative to the new maximum; the rest of the
/// tile becomes 0. Returns by how much what was summed before shrinks.
NANOVLLM_INLINE float softmax_step(float* s, int64_t begin, int64_t end, float scale,
                                   RowState& state) {
  const float infinity = __builtin_inff();
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
    store(s + i * kLanes, v[i]);
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
  const AttentionTask<T>& task;
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

template <class T>
NANOVLLM_INLINE void gather_tile(const Piece<T>& piece, int64_t first_key, int64_t keys,
                                 Tile<T>& tile) {
  const AttentionTask<T>& task = piece.task;
  tile.count = keys - first_key < kAttentionTile ? keys - first_key : kAttentionTile;
  const int64_t mask = (int64_t{1} << task.block_shift) - 1;
  for (int64_t j = 0; j < tile.count; ++j) {
    const int64_t position = first_key + j, block = task.block_table[position >> task.block_shift];
    const int64_t inside = (position & mask) * task.head_dim;
    tile.k[j] = padded_row(task.k + block * task.k_block_stride + inside,
                           piece.k_copy + j * piece.d, task.head_dim, piece.d);
    tile.v[j] = padded_row(task.v + block * task.v_block_stride + inside,
                           piece.v_copy + j * piece.d, task.head_dim, piece.d);
  }
}

/// One tile for rows [row, row + ROWS): scores, softmax, values.
template <int ROWS, class T, class V>
NANOVLLM_INLINE void tile_rows(const Piece<T>& piece, int64_t row, int64_t first_key,
                               const Tile<T>& tile, const V* const* v) {
  const auto begin = [&](int64_t r) { return piece.begin(row + r, first_key); };
  const auto end = [&](int64_t r) { return piece.end(row + r, first_key); };
  if (begin(0) >= end(ROWS - 1)) return;
  float* scores = piece.scores + row * kAttentionTile;
  float* acc = piece.acc + row * piece.d;
  score_rows<ROWS>(scores, piece.q + row * piece.d, tile, begin(0), end(ROWS - 1), piece.d);
  float decay[ROWS];
  for (int r = 0; r < ROWS; ++r)
    decay[r] = begin(r) < end(r) ? softmax_step(scores + r * kAttentionTile, begin(r), end(r),
                                                piece.task.scale, piece.state[row + r])
                                 : 1.0f;
  const auto add_row = [&](int r, int64_t from, int64_t to) {
    if (from >= to) return;
    add_values<1>(acc + r * piece.d, scores + r * kAttentionTile, decay + r, v, from, to, piece.d);
    decay[r] = 1.0f;  // what was summed before has shrunk by now
  };
  const int64_t common = begin(ROWS - 1), common_end = end(0);
  if (common >= common_end) {
    for (int r = 0; r < ROWS; ++r) add_row(r, begin(r), end(r));
    return;
  }
  for (int r = 0; r < ROWS; ++r) add_row(r, begin(r), common);
  add_values<ROWS>(acc, scores, decay, v, common, common_end, piece.d);
  for (int r = 0; r < ROWS; ++r) {
    decay[r] = 1.0f;
    add_row(r, common_end, end(r));
  }
}

template <class T, class V>
NANOVLLM_INLINE void tile_piece(const Piece<T>& piece, int64_t first_key, const Tile<T>& tile,
                                const V* const* v) {
  int64_t row = 0;
  for (; row + 4 <= piece.rows; row += 4) tile_rows<4>(piece, row, first_key, tile, v);
  for (; row + 2 <= piece.rows; row += 2) tile_rows<2>(piece, row, first_key, tile, v);
  for (; row < piece.rows; ++row) tile_rows<1>(piece, row, first_key, tile, v);
}

template <class T>
void attention_piece(const Piece<T>& piece) {
  const AttentionTask<T>& task = piece.task;
  for (int64_t r = 0; r < piece.rows; ++r) {
    const int64_t token = (piece.first_row + r) / task.group,
                  head = (piece.first_row + r) % task.group;
    const T* q = task.q + token * task.q_token_stride + head * task.q_head_stride;
    T* copy = piece.q + r * piece.d;
    __builtin_memset(static_cast<void*>(copy), 0, static_cast<size_t>(piece.d) * sizeof(T));
    __builtin_memcpy(static_cast<void*>(copy), q, static_cast<size_t>(task.head_dim) * sizeof(T));
    __builtin_memset(piece.acc + r * piece.d, 0, static_cast<size_t>(piece.d) * sizeof(float));
    piece.state[r] = {-__builtin_inff(), 0.0f};
  }
  const int64_t keys = piece.position(piece.rows - 1) + 1;
  for (int64_t first_key = piece.first_key(0) / kAttentionTile * kAttentionTile; first_key < keys;
       first_key += kAttentionTile) {
    Tile<T> tile;
    gather_tile(piece, first_key, keys, tile);
    if (sizeof(T) == sizeof(float) || piece.rows < 8) {
      tile_piece(piece, first_key, tile, tile.v);
      continue;
    }
    const float* wide[kAttentionTile];
    for (int64_t j = 0; j < tile.count; ++j) {
      float* copy = piece.v_f32 + j * piece.d;
      for (int64_t i = 0; i < piece.d; i += kLanes) store(copy + i, load(tile.v[j] + i));
      wide[j] = copy;
    }
    tile_piece(piece, first_key, tile, wide);
  }
  for (int64_t r = 0; r < piece.rows; ++r) {
    const int64_t token = (piece.first_row + r) / task.group,
                  head = (piece.first_row + r) % task.group;
    T* out = task.out + token * task.out_token_stride + head * task.out_head_stride;
    const float* acc = piece.acc + r * piece.d;
    const float sum = piece.state[r].sum;
    along_row(
        task.head_dim, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
          put(out + i, get(acc + i, count) / sum, count);
        });
  }
}

template <class T>
void attention(const AttentionTask<T>& task) {
  constexpr int64_t kRows = kAttentionRowsOf<T>;
  const int64_t d = (task.head_dim + 31) / 32 * 32, rows = task.num_tokens * task.group;
  float* p = task.scratch;
  const auto take = [&](int64_t floats) { return (p += floats) - floats; };
  float* acc = take(kRows * d);
  float* scores = take(kRows * kAttentionTile);
  RowState* state = reinterpret_cast<RowState*>(take(kRows * 4));
  T* q = reinterpret_cast<T*>(take(kRows * d));
  float *keys = take(kAttentionTile * d), *values = take(kAttentionTile * d);
  // bf16: the copies of keys and values fit into the first region, the widened values have the
  // second. f32 widens nothing.
  T* k_copy = reinterpret_cast<T*>(keys);
  T* v_copy =
      sizeof(T) == sizeof(float) ? reinterpret_cast<T*>(values) : k_copy + kAttentionTile * d;
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t count = rows - first < kRows ? rows - first : kRows;
    const Piece<T> piece{task, first, count, d, q, acc, scores, k_copy, v_copy, values, state};
    if constexpr (kHasTiles<T>)
      attention_piece_by_tiles(piece);  // attention_tiles.inl
    else
      attention_piece(piece);
  }
}

}  // namespace
