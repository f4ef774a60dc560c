// Attention by AMX tiles. Rows of q lie in the lanes of a vector, sixteen of them in a strip:
// scores are K q^T, straight from the rows of the cache, the softmax goes through 64 vectors
// without ever crossing lanes, and what a strip sums is V^T P^T. Probabilities go in as two bf16
// numbers each, whose sum has 16 bits of the f32. A piece turns a tile of values once for all its
// strips.
//
// A row's bits do not depend on the other rows of its piece: tiles work on each column by itself,
// keys that a row does not see have probability zero, and it is changed only by tiles of keys that
// it sees.

namespace {

/// 2^x within 2 ulp; 0 below -126 (no subnormals), 1 at 0; NaN stays NaN.
NANOVLLM_INLINE Vec exp2(Vec x) {
  const __m512 v = reinterpret_cast<__m512>(x);
  constexpr int kMinusFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const Vec r = reinterpret_cast<Vec>(_mm512_reduce_ps(v, kMinusFloor));  // [0, 1)
  Vec p = splat(2.081791504e-04f);  // interpolates 2^r between Chebyshev's points
  p = p * r + 1.269216607e-03f;
  p = p * r + 9.652195056e-03f;
  p = p * r + 5.549602356e-02f;
  p = p * r + 2.402272042e-01f;
  p = p * r + 6.931471709e-01f;
  p = p * r + 1.0f;
  const __mmask16 normal = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return reinterpret_cast<Vec>(_mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(p), v));
}

/// The scratch of a piece, as strips use it.
struct Strips {
  const Piece<bf16>& piece;
  float *max, *sum;    // [rows]: of the scores times log2(e), and of the probabilities
  int32_t* positions;  // [rows]; -1 behind the last
  float* scores;       // [2 strips, 64 keys, 16]
  bf16* p;             // [2 strips, 2 halves of the keys, 2 parts, 16 pairs of keys, 16, 2]
  bf16* values;        // pack_values()
  float* sums;         // [2, 2 strips, kSums, 16]

  explicit Strips(const Piece<bf16>& of)
      : piece(of),
        max(&of.state->max),
        sum(max + kTileAttentionRows),
        positions(reinterpret_cast<int32_t*>(sum + kTileAttentionRows)),
        scores(of.scores),
        p(reinterpret_cast<bf16*>(scores + 2 * kAttentionTile * kStrip)),
        values(reinterpret_cast<bf16*>(of.v_f32)),
        sums(scores + 4 * kAttentionTile * kStrip) {
    static_assert(4 * (kAttentionTile + kSums) * kStrip <= kTileAttentionRows * kAttentionTile);
  }
  float* sums_of(int64_t element) const { return sums + element / kSums % 2 * 2 * kSums * kStrip; }
};

/// The keys of a tile that the rows of a strip see.
struct Sight {
  VecI begin, end;
  bool all;  // every row sees every key; then the rest does not count

  Sight(const Strips& strips, int64_t strip, int64_t tile_key, bool sees_all) : all(sees_all) {
    __builtin_memcpy(&end, strips.positions + strip * kStrip, sizeof end);
    const int64_t window = strips.piece.task.window;
    const auto in_tile = [&](VecI key) __attribute__((always_inline)) {
      key -= static_cast<int32_t>(tile_key);
      key = key < 0 ? VecI{} : key;
      return key > static_cast<int32_t>(kAttentionTile)
                 ? VecI{} + static_cast<int32_t>(kAttentionTile)
                 : key;
    };
    end += 1;
    begin =
        window > 0 && window <= INT32_MAX ? in_tile(end - static_cast<int32_t>(window)) : VecI{};
    end = in_tile(end);
  }
  VecI sees(int32_t key) const { return (begin <= key) & (end > key); }
};

/// scores[key, row] of the keys [key, key + 32) and STRIPS strips.
template <int STRIPS>
NANOVLLM_INLINE void score_keys(float* scores, const bf16* k0, const bf16* k1, const bf16* q,
                                int64_t d) {
  const int64_t row_bytes = d * 2;
  zero_sums<STRIPS>();
  // The intrinsics do not tell the compiler that they read memory.
  __asm__ volatile("" ::: "memory");
  for (int64_t i = 0; i < d; i += kTileK) {
    const bf16* column = q + i * kStrip;
    _tile_loadd(6, column, 64);
    _tile_loadd(4, k0 + i, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, k1 + i, row_bytes);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (STRIPS == 2) {
      _tile_loadd(7, column + kStrip * d, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  store_sums<STRIPS>(scores, scores + kAttentionTile * kStrip, kTileRows * kStrip, 64);
}

/// sums[strip, element, row] of kSums elements of the head: probabilities times values of the
/// halves [first, last) of the keys.
template <int STRIPS>
NANOVLLM_INLINE void sum_values(float* sums, const bf16* values, const bf16* p, int64_t first,
                                int64_t last) {
  zero_sums<STRIPS>();
  __asm__ volatile("" ::: "memory");
  for (int64_t half = first; half < last; ++half) {
    _tile_loadd(4, values + half * kTileElements, 64);
    _tile_loadd(5, values + (2 + half) * kTileElements, 64);
    for (int64_t part = 0; part < 2; ++part) {
      const bf16* column = p + (half * 2 + part) * kTileElements;
      _tile_loadd(6, column, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (STRIPS == 2) {
        _tile_loadd(7, column + 4 * kTileElements, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  store_sums<STRIPS>(sums, sums + kSums * kStrip, kTileRows * kStrip, 64);
}

/// Four keys' probabilities as bf16 numbers in pairs of keys, and what is missing from them. Halves
/// are rounded up, whatever the sign.
NANOVLLM_INLINE void put_pairs(bf16* p, const Vec (&probability)[4]) {
  const auto rounded = [](Vec v) __attribute__((always_inline)) {
    return reinterpret_cast<VecU>(v) + 0x8000u;
  };
  const auto rest = [](Vec v, VecU high) __attribute__((always_inline)) {
    return v - reinterpret_cast<Vec>(high & 0xffff0000u);
  };
  for (int64_t pair = 0; pair < 2; ++pair, p += kTileK) {
    const Vec even = probability[2 * pair], odd = probability[2 * pair + 1];
    const VecU high_even = rounded(even), high_odd = rounded(odd),
               low_even = rounded(rest(even, high_even)), low_odd = rounded(rest(odd, high_odd));
    const VecU high = (high_even >> 16) | (high_odd & 0xffff0000u),
               low = (low_even >> 16) | (low_odd & 0xffff0000u);
    __builtin_memcpy(static_cast<void*>(p), &high, sizeof high);
    __builtin_memcpy(static_cast<void*>(p + kTileElements), &low, sizeof low);
  }
}

/// Turns a strip's scores of the keys [first, last), multiples of 32, into probabilities relative
/// to the new maximum. Returns by how much what was summed before shrinks.
NANOVLLM_INLINE Vec softmax_strip(float* scores, bf16* p, int64_t first, int64_t last,
                                  const Sight& sight, Vec scale, const TileScales* scales,
                                  float* old_max, float* old_sum) {
  const Vec lowest = splat(-__builtin_inff());
  if (scales)
    for (int64_t key = first; key < last; ++key)
      store(scores + key * kStrip, load(scores + key * kStrip) * scales->k[key]);
  if (!sight.all)
    for (int64_t key = first; key < last; ++key) {
      float* s = scores + key * kStrip;
      store(s, sight.sees(static_cast<int32_t>(key)) ? load(s) : lowest);
    }
  Vec top[4] = {lowest, lowest, lowest, lowest};
  for (int64_t key = first; key < last; key += 4)
    for (int64_t j = 0; j < 4; ++j) top[j] = max(load(scores + (key + j) * kStrip), top[j]);
  const Vec before = load(old_max);
  const Vec now = max(max(max(top[0], top[1]), max(top[2], top[3])) * scale, before);
  const Vec base = now == lowest ? Vec{} : now;  // rows that have seen no key yet
  Vec total[4] = {};
  for (int64_t key = first; key < last; key += 4) {
    Vec probability[4];
    for (int64_t j = 0; j < 4; ++j) {
      probability[j] = exp2(load(scores + (key + j) * kStrip) * scale - base);
      total[j] += probability[j];
      // Zero times a scale that is not finite is no zero.
      if (scales)
        probability[j] = probability[j] == 0.0f ? Vec{} : probability[j] * scales->v[key + j];
    }
    put_pairs(p + key / kTileK * 2 * kTileElements + key % kTileK / 2 * kTileK, probability);
  }
  const Vec decay = exp2(before - base);
  store(old_max, now);
  store(old_sum, load(old_sum) * decay + ((total[0] + total[1]) + (total[2] + total[3])));
  return decay;
}

/// acc = acc * decay + sums in the lanes that `changes` names; + 0: a sum of zeros has no sign.
NANOVLLM_INLINE void add_sums(float* acc, const float* sums, Vec decay, const VecI* changes) {
  for (int64_t i = 0; i < kSums; ++i, acc += kStrip, sums += kStrip) {
    const Vec old = load(acc), sum = old * decay + (load(sums) + 0.0f);
    store(acc, changes ? (*changes ? sum : old) : sum);
  }
}

/// One tile of keys for STRIPS strips that see some of them. `finite` is whether all values of the
/// tile that the piece sees are.
template <int STRIPS, class Finite>
NANOVLLM_INLINE void tile_strips(const Strips& strips, int64_t strip, int64_t tile_key,
                                 const Tile<bf16>& tile, const TileScales* scales,
                                 Finite&& finite) {
  const Piece<bf16>& piece = strips.piece;
  const int64_t d = piece.d, first_row = strip * kStrip,
                end_row = first_row + STRIPS * kStrip < piece.rows ? first_row + STRIPS * kStrip
                                                                   : piece.rows;
  const int64_t begin = piece.begin(first_row, tile_key), end = piece.end(end_row - 1, tile_key);
  if (begin >= end) return;
  const int64_t first = begin / kTileK, last = (end + kTileK - 1) / kTileK;
  for (int64_t key = first * kTileK; key < end; key += kTileK) {
    const bf16 *k0 = tile.k[key], *k1 = key + 16 < tile.count ? tile.k[key + 16] : k0;
    score_keys<STRIPS>(strips.scores + key * kStrip, k0, k1, piece.q + strip * kStrip * d, d);
  }
  const bool all =
      piece.begin(end_row - 1, tile_key) == 0 && piece.end(first_row, tile_key) == kAttentionTile;
  Vec decay[STRIPS];
  VecI sees[STRIPS];
  for (int s = 0; s < STRIPS; ++s) {
    const Sight sight(strips, strip + s, tile_key, all);
    sees[s] = sight.begin < sight.end;
    float *max = strips.max + (strip + s) * kStrip, *sum = strips.sum + (strip + s) * kStrip;
    decay[s] = softmax_strip(strips.scores + s * kAttentionTile * kStrip,
                             strips.p + s * 4 * kTileElements, first * kTileK, last * kTileK, sight,
                             splat(piece.task.scale * 1.44269504f), scales, max, sum);
  }
  const auto add = [&](const VecI* changes) __attribute__((always_inline)) {
    // Sums are added while the tiles make the next ones.
    for (int64_t i = 0; i <= d; i += kSums) {
      if (i < d)
        sum_values<STRIPS>(strips.sums_of(i), strips.values + i / 16 * 2 * kTileElements, strips.p,
                           first, last);
      if (i > 0)
        for (int s = 0; s < STRIPS; ++s)
          add_sums(piece.acc + ((strip + s) * d + i - kSums) * kStrip,
                   strips.sums_of(i - kSums) + s * kSums * kStrip, decay[s],
                   changes ? changes + s : nullptr);
    }
  };
  if (all) return add(nullptr);
  if (finite()) return add(sees);
  // Zero times infinity is no zero: every row by itself, without the keys that it does not see.
  const int64_t piece_begin = piece.begin(0, tile_key),
                piece_end = piece.end(piece.rows - 1, tile_key);
  for (int64_t row = first_row; row < end_row; ++row) {
    VecI only[STRIPS] = {};
    only[(row - first_row) / kStrip][row % kStrip] = sees[(row - first_row) / kStrip][row % kStrip];
    pack_values(strips.values, tile.v, piece.begin(row, tile_key), piece.end(row, tile_key), d);
    add(only);
  }
  pack_values(strips.values, tile.v, piece_begin, piece_end, d);
}

NANOVLLM_INLINE void put_strip(const Strips& strips, int64_t strip) {
  const Piece<bf16>& piece = strips.piece;
  const AttentionTask& task = piece.task;
  const Vec factor = 1.0f / load(strips.sum + strip * kStrip);
  for (int64_t i = 0; i < task.head_dim; i += kLanes) {
    const int64_t count = task.head_dim - i < kLanes ? task.head_dim - i : kLanes;
    VecU rows[16];
    for (int64_t j = 0; j < kLanes; ++j)
      rows[j] =
          reinterpret_cast<VecU>(load(piece.acc + (strip * piece.d + i + j) * kStrip) * factor);
    transpose(rows);
    for (int64_t j = 0; j < kStrip && strip * kStrip + j < piece.rows; ++j) {
      const int64_t row = piece.first_row + strip * kStrip + j, token = row / task.group,
                    head = row % task.group;
      put(static_cast<bf16*>(task.out) + token * task.out_token_stride +
              head * task.out_head_stride + i,
          reinterpret_cast<Vec>(rows[j]), count);
    }
  }
}

void attention_piece_by_tiles(const Piece<bf16>& piece) {
  const AttentionTask& task = piece.task;
  const Strips strips(piece);
  const int64_t count = (piece.rows + kStrip - 1) / kStrip;
  for (int64_t strip = 0; strip < count; ++strip) {
    pack_strip(piece, strip);
    store(strips.max + strip * kStrip, splat(-__builtin_inff()));
    store(strips.sum + strip * kStrip, Vec{});
    for (int64_t j = strip * kStrip; j < (strip + 1) * kStrip; ++j)
      strips.positions[j] = j < piece.rows ? static_cast<int32_t>(piece.position(j)) : -1;
  }
  __builtin_memset(piece.acc, 0, static_cast<size_t>(count * kStrip * piece.d) * sizeof(float));
  configure_tiles(kTileRows);
  const int64_t keys = piece.position(piece.rows - 1) + 1;
  for (int64_t tile_key = piece.first_key(0) / kAttentionTile * kAttentionTile; tile_key < keys;
       tile_key += kAttentionTile) {
    Tile<bf16> tile;
    TileScales scales;
    if (task.is_e4m3) {
      Tile<E4m3> numbers;
      gather_tile(piece, tile_key, keys, numbers, scales);
      tile.count = numbers.count;
      widen_rows(tile.k, piece.k_copy, numbers.k, tile.count, task.head_dim, piece.d);
      widen_rows(tile.v, piece.v_copy, numbers.v, tile.count, task.head_dim, piece.d);
    } else {
      gather_tile(piece, tile_key, keys, tile);
    }
    const TileScales* const used = task.is_e4m3 ? &scales : nullptr;
    if (!used && task.head_dim == piece.d && (int64_t{1} << task.block_shift) < kTileRows)
      for (int64_t j = 0; j < tile.count; ++j) {  // rows of a tile of keys lie one behind another
        __builtin_memcpy(static_cast<void*>(piece.k_copy + j * piece.d), tile.k[j],
                         static_cast<size_t>(piece.d) * sizeof(bf16));
        tile.k[j] = piece.k_copy + j * piece.d;
      }
    const int64_t begin = piece.begin(0, tile_key), end = piece.end(piece.rows - 1, tile_key);
    pack_values(strips.values, tile.v, begin, end, piece.d);
    int known = -1;
    const auto finite = [&] {
      if (known < 0) known = all_finite(tile.v, begin, end, piece.d);
      return known > 0;
    };
    for (int64_t strip = 0; strip < count; strip += 2) {
      if (strip + 1 < count)
        tile_strips<2>(strips, strip, tile_key, tile, used, finite);
      else
        tile_strips<1>(strips, strip, tile_key, tile, used, finite);
    }
  }
  _tile_release();
  for (int64_t strip = 0; strip < count; ++strip) put_strip(strips, strip);
}

}  // namespace
