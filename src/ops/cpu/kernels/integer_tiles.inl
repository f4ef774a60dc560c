// Products of many rows of int8 numbers by AMX tiles: a tile of rows has 16 of 64 columns, and one
// of a weight, whose panels lie so, fours of columns of 16 rows. The sums are those of
// integer_rows.inl.

namespace {

/// Bytes of a tile.
constexpr int64_t kIntTile = kTileRows * kByteColumns;

/// sums[TILES * 16, 32], of which PANELS times 16 are made, = x w^T over `steps` times kByteColumns
/// columns. w: PANELS times `steps` tiles, `panel` bytes apart.
template <int TILES, int PANELS>
NANOVLLM_INLINE void multiply_integer_tiles(int32_t* sums, const int8_t* x, int64_t stride,
                                            const uint8_t* w, int64_t panel, int64_t steps) {
  // The intrinsics do not tell the compiler that they read memory.
  __asm__ volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < steps; ++i, x += kByteColumns, w += kIntTile) {
    _tile_loadd(6, w, 64);
    _tile_loadd(4, x, stride);
    _tile_dpbssd(0, 4, 6);
    if constexpr (PANELS == 2) {
      _tile_loadd(7, w + panel, 64);
      _tile_dpbssd(1, 4, 7);
    }
    if constexpr (TILES == 2) {
      _tile_loadd(5, x + kTileRows * stride, stride);
      _tile_dpbssd(2, 5, 6);
      if constexpr (PANELS == 2) _tile_dpbssd(3, 5, 7);
    }
  }
  constexpr int64_t kBytes = kTileColumns * sizeof(int32_t);
  _tile_stored(0, sums, kBytes);
  if constexpr (PANELS == 2) _tile_stored(1, sums + 16, kBytes);
  if constexpr (TILES == 2) {
    _tile_stored(2, sums + kTileRows * kTileColumns, kBytes);
    if constexpr (PANELS == 2) _tile_stored(3, sums + kTileRows * kTileColumns + 16, kBytes);
  }
  __asm__ volatile("" ::: "memory");
}

/// The columns of one panel, group by group, as tiles want them: each group's last step ends with
/// zeros. int4's become int8, of each eight columns the even ones first, as rows of x have them.
template <bool IS_INT4>
NANOVLLM_INLINE void unpack_panel(uint8_t* to, const uint8_t* units, int64_t k, int64_t group,
                                  int64_t steps) {
  for (int64_t first = 0; first < k; first += group, to += steps * kIntTile) {
    const int64_t columns = k - first < group ? k - first : group;
    int64_t fours = 0;
    for (int64_t i = 0; i < columns; i += IS_INT4 ? 8 : 4, units += 64) {
      const VecU q = load_unit(units);
      if constexpr (IS_INT4) {  // a byte with its highest bit set borrows from no other
        const VecU high = VecU{} + 0x80808080u, less = VecU{} + 0x08080808u,
                   both[2] = {(((q & 0x0f0f0f0fu) | high) - less) ^ high,
                              (((q >> 4 & 0x0f0f0f0fu) | high) - less) ^ high};
        __builtin_memcpy(to + fours * 64, both, sizeof both);
        fours += 2;
      } else {
        __builtin_memcpy(to + fours++ * 64, &q, sizeof q);
      }
    }
    __builtin_memset(to + fours * 64, 0, static_cast<size_t>(steps * kIntTile - fours * 64));
  }
}

/// The outputs of TILES tiles of rows, of which the task has `rows`, and PANELS panels. tiles: the
/// panels' numbers, `panel` bytes apart, `steps` tiles a group.
template <bool IS_INT4, int TILES, int PANELS>
void integer_tile(const GemmTask<bf16>& task, const QuantisedPanels& w, int64_t row, int64_t rows,
                  int64_t block, const uint8_t* tiles, int64_t panel, int64_t steps) {
  const int8_t* x = byte_row(task, row);
  const uint8_t* scales = w.data + block * w.panel_bytes;
  alignas(64) int32_t sums[TILES * kTileRows * kTileColumns];
  Vec total[IS_INT4 ? TILES * kTileRows : 1][PANELS]{};
  const auto sum = [&](int64_t r, int p) __attribute__((always_inline)) {
    return __builtin_convertvector(
        reinterpret_cast<VecI>(
            load_unit(reinterpret_cast<const uint8_t*>(sums + r * kTileColumns + p * kGemmBlock))),
        Vec);
  };
  const int64_t group = IS_INT4 ? w.group : w.k;
  for (int64_t first = 0, g = 0; first < w.k; first += group, ++g, tiles += steps * kIntTile) {
    multiply_integer_tiles<TILES, PANELS>(sums, x + first, task.x_stride * 2, tiles, panel, steps);
    for (int p = 0; p < PANELS && IS_INT4; ++p) {
      const Vec scale = weight_scales(scales + p * w.panel_bytes, g);
      for (int64_t r = 0; r < rows; ++r) total[r][p] += sum(r, p) * scale;
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int p = 0; p < PANELS; ++p) {
      const float row_scale = task.row_scales[row + r];
      Result result[1][1];
      if constexpr (IS_INT4)
        result[0][0].value = total[r][p] * row_scale;
      else
        result[0][0].value = sum(r, p) * (row_scale * weight_scales(scales + p * w.panel_bytes, 0));
      put_tile<1, 1>(task, result, row + r, block + p);
    }
}

template <bool IS_INT4>
bool integer_tiles(const GemmTask<bf16>& task, const QuantisedPanels& w) {
  if (task.m <= kQuantisedRows || w.k < kByteColumns) return false;
  const int64_t group = IS_INT4 ? w.group : w.k, groups = (w.k + group - 1) / group,
                steps = ((group < w.k ? group : w.k) + kByteColumns - 1) / kByteColumns;
  const bool unpacks = IS_INT4 || w.k % kByteColumns != 0;
  const int64_t panel = unpacks ? groups * steps * kIntTile : w.panel_bytes;
  configure_tiles(kTileRows);
  for (int64_t block = task.first_block; block < task.end_block; block += 2) {
    const int panels = block + 1 < task.end_block ? 2 : 1;
    const uint8_t* tiles = w.data + block * w.panel_bytes + w.units;
    if (unpacks) {
      auto* const to = reinterpret_cast<uint8_t*>(task.scratch);
      for (int p = 0; p < panels; ++p)
        unpack_panel<IS_INT4>(to + p * panel, tiles + p * w.panel_bytes, w.k, group, steps);
      tiles = to;
    }
    for (int64_t row = 0; row < task.m; row += 2 * kTileRows) {
      const int64_t left = task.m - row, rows = left < 2 * kTileRows ? left : 2 * kTileRows;
      const auto tile =
          left > kTileRows
              ? (panels == 2 ? integer_tile<IS_INT4, 2, 2> : integer_tile<IS_INT4, 2, 1>)
              : (panels == 2 ? integer_tile<IS_INT4, 1, 2> : integer_tile<IS_INT4, 1, 1>);
      tile(task, w, row, rows, block, tiles, panel, steps);
    }
  }
  _tile_release();
  return true;
}

}  // namespace
