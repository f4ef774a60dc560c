// Products of many rows of int8 numbers with int4 weights by fewer multiplications (Winograd, "A
// New Algorithm for Inner Product", 1968). Of two columns,
//
//   x w + x' w' = (x + w') (x' + w) - x x' - w w'
//
// where the last two terms belong to a row and to a weight alone. A core of AMD's adds on four
// pipes and multiplies on two: three of four units are multiplied so and one as it is, which keeps
// all pipes busy. Integers are exact, so the results are int4_gemm()'s.
//
// Weights are from 0 to 15 here, larger by 8 than they are, and numbers of x larger by 120 in even
// columns and less by 8 in odd ones: sums are bytes, of even columns without a sign, where a number
// is kMostSummed at most. What it has beyond that is multiplied for itself, four columns of each
// row of a tile at a time: few do in most rows. Rows with many are int4_tile()'s.

namespace {

constexpr int kMostSummed = 120, kSummedUnits = 3;     // of four
constexpr int64_t kRowsOfSums = kSumTiles * kSumRows;  // that pass a group of two panels

using Bytes = uint8_t __attribute__((vector_size(kIntBytes)));
NANOVLLM_INLINE Ints add_bytes(Ints a, Ints b) {
  return reinterpret_cast<Ints>(reinterpret_cast<Bytes>(a) + reinterpret_cast<Bytes>(b));
}

/// A unit of two panels, and a group.
struct SumUnit {
  Ints even[2], odd[2];
};
struct SumGroup {
  SumUnit units[kSumGroup / 8];
  Ints less[2];  // what sums of products have too much, with its sign
  Floats scales[2];
};

/// What four columns of a row have beyond kMostSummed; where their weights are in a SumGroup.
struct Beyond {
  int32_t numbers, at;
};

/// A group of kSumRows rows. kSumTiles tiles are [groups][tiles] of these and [tiles] of slots,
/// each of which is a Beyond for each row.
struct alignas(64) RowGroup {
  int32_t less[kSumRows];  // what the rows' sums of products have too much
  int32_t slots;           // of the first group, below zero: the tile has too many
  int32_t beyond;          // where they are, in bytes from here
  alignas(64) int8_t numbers[kSumGroup / 8][kSumRows][8];
};
static_assert(sizeof(RowGroup) <= kSumGroup * (kSumRows + 1));
NANOVLLM_INLINE RowGroup* row_groups(const std::byte* tiles, int64_t tile, int64_t k) {
  const auto size = static_cast<int64_t>(sum_tiles_bytes(kRowsOfSums, k));
  return reinterpret_cast<RowGroup*>(const_cast<std::byte*>(tiles) + tile / kSumTiles * size) +
         tile % kSumTiles;
}

/// Puts a row's part of a group into a tile; numbers, less and beyond are its own there. Returns
/// its slots.
int arrange_row(int8_t* numbers, int32_t& less, Beyond* beyond, const int8_t* row) {
  constexpr __mmask64 kSummed = 0x00ffffff00ffffff;  // bytes of units that are multiplied by sums
  const auto most = reinterpret_cast<__m512i>(Bytes{} + uint8_t{kMostSummed}),
             least = reinterpret_cast<__m512i>(Bytes{} - uint8_t{kMostSummed});
  const Ints added{0x78787878, -0x07070708, 0x78787878, -0x07070708, 0x78787878, -0x07070708, 0, 0,
                   0x78787878, -0x07070708, 0x78787878, -0x07070708, 0x78787878, -0x07070708, 0, 0};
  const Ints pairs{-1, 0, -1, 0, -1, 0, 0, 0, -1, 0, -1, 0, -1, 0, 0, 0};
  Ints sums{};
  int slots = 0;
  for (int first = 0; first < kSumGroup; first += kIntBytes) {
    const __m512i all = _mm512_loadu_si512(row + first),
                  some = _mm512_mask_max_epi8(all, kSummed, _mm512_min_epi8(all, most), least);
    const Ints put = add_bytes(reinterpret_cast<Ints>(some), added);
    sums = add_fours(
        sums, put & pairs,
        __builtin_shufflevector(put, put, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    const auto rest =
        reinterpret_cast<Ints>(reinterpret_cast<Bytes>(all) - reinterpret_cast<Bytes>(some));
    alignas(64) int8_t bytes[kIntBytes];
    __builtin_memcpy(bytes, &put, sizeof put);
    for (int unit = 0; unit < kIntBytes / 8; ++unit, numbers += 8 * kSumRows)
      __builtin_memcpy(numbers, bytes + unit * 8, 8);
    for (uint32_t larger = _mm512_cmpneq_epi32_mask(all, some); larger; larger &= larger - 1) {
      const int four = __builtin_ctz(larger);
      beyond[slots++ * kSumRows] = {rest[four],
                                    (first / 4 + four) * int32_t{sizeof(SumUnit::even)}};
    }
  }
  for (int lane = 0; lane < kIntBytes / 4; ++lane) less += sums[lane];
  return slots;
}

void arrange_rows(std::byte* tiles, int64_t tile, const QuantisedNumber* rows, int64_t k) {
  const auto* const bytes = reinterpret_cast<const int8_t*>(rows);
  const int64_t stride = quantised_row_stride(k) * 2, most_slots = k / 64;
  RowGroup *const first_group = row_groups(tiles, tile, k), *group = first_group;
  auto* const slots =
      reinterpret_cast<Beyond*>(group - tile % kSumTiles + k / kSumGroup * kSumTiles) +
      tile % kSumTiles * (most_slots + kMostFoursBeyond) * kSumRows;
  Beyond* beyond = slots;
  for (int64_t first = 0; first < k; first += kSumGroup, group += kSumTiles) {
    int used[kSumRows], most = 0;
    for (int64_t r = 0; r < kSumRows; ++r) {
      const int8_t* const row = bytes + r * stride;
      __builtin_memcpy(&group->less[r], row + byte_columns(k) + first / kSumGroup * 4, 4);
      used[r] = arrange_row(group->numbers[0][r], group->less[r], beyond + r, row + first);
      most = used[r] > most ? used[r] : most;
    }
    for (int64_t r = 0; r < kSumRows; ++r)
      for (int s = used[r]; s < most; ++s) beyond[s * kSumRows + r] = {};
    group->slots = most;
    group->beyond = static_cast<int32_t>(reinterpret_cast<std::byte*>(beyond) -
                                         reinterpret_cast<std::byte*>(group));
    beyond += most * kSumRows;
    // Each takes a twentieth of a group's time.
    if (beyond - slots > most_slots * kSumRows) {
      first_group->slots = -1;
      return;
    }
  }
}

NANOVLLM_INLINE void unpack_group(SumGroup& to, const uint8_t* units, int64_t panel) {
  Ints less[2][3]{};
  for (int64_t first = 0; first < kSumGroup / 8; first += 4)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u)
      for (int p = 0; p < 2; ++p) {
        const uint8_t* const at = units + (first + u) * 64 + p * panel;
        const Ints q = load_ints(at), even = q & 0x0f0f0f0f, odd = q >> 4 & 0x0f0f0f0f;
        to.units[first + u].even[p] = even;
        to.units[first + u].odd[p] = odd;
        if (u == kSummedUnits) continue;
        less[p][0] = add_fours(less[p][0], odd, even);
        less[p][1] = add_fours(less[p][1], even, Ints{} + 0x78787878);
        less[p][2] = add_fours(less[p][2], odd, Ints{} + static_cast<int32_t>(0xf8f8f8f8u));
      }
  for (int p = 0; p < 2; ++p) to.less[p] = -less[p][0] - less[p][1] - less[p][2];
}

/// totals += a group's products with kSumRows rows, times the scales: a function of its own, or GCC
/// has no registers for all sums. The next tile's rows are asked for.
__attribute__((noinline)) void add_group(Floats (*totals)[2], const SumGroup& w,
                                         const RowGroup& rows) {
  Ints sums[kSumRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kSumRows; ++r)
    for (int p = 0; p < 2; ++p) sums[r][p] = w.less[p] - same_at(rows.less + r);
  const auto* beyond =
      reinterpret_cast<const Beyond*>(reinterpret_cast<const std::byte*>(&rows) + rows.beyond);
#pragma GCC unroll 1
  for (int slots = rows.slots; slots > 0; --slots, beyond += kSumRows)
#pragma GCC unroll 8
    for (int r = 0; r < kSumRows; ++r) {
      const auto* const at = reinterpret_cast<const uint8_t*>(w.units) + beyond[r].at;
      for (int p = 0; p < 2; ++p)
        sums[r][p] = add_fours(sums[r][p], load_ints(at + p * 64), same_at(&beyond[r].numbers));
    }
  __builtin_prefetch(&rows + 1);
#pragma GCC unroll 1
  for (int first = 0; first < kSumGroup / 8; first += 4)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      const SumUnit q = w.units[first + u];
      const auto& x = rows.numbers[first + u];
      __builtin_prefetch(reinterpret_cast<const std::byte*>(x) + sizeof rows);
#pragma GCC unroll 8
      for (int r = 0; r < kSumRows; ++r) {
        const Ints even = same_at(x[r]), odd = same_at(x[r] + 4);
        for (int p = 0; p < 2; ++p)
          if (u < kSummedUnits)
            sums[r][p] =
                add_fours(sums[r][p], add_bytes(even, q.odd[p]), add_bytes(odd, q.even[p]));
          else
            sums[r][p] = add_fours(add_fours(sums[r][p], q.even[p], even), q.odd[p], odd);
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < kSumRows; ++r)
    for (int p = 0; p < 2; ++p)
      totals[r][p] += __builtin_convertvector(sums[r][p], Floats) * w.scales[p];
}

/// The outputs of `rows` rows from `row` on and two panels.
void sum_panels(const GemmTask<bf16>& task, const QuantisedPanels& w, int64_t row, int64_t rows,
                int64_t block) {
  const uint8_t* const panel = w.data + block * w.panel_bytes;
  const RowGroup* x = row_groups(task.row_tiles, row / kSumRows, w.k);
  const int64_t tiles = rows / kSumRows;
  uint32_t many = 0;  // a bit for each tile that has too many slots
  for (int64_t t = 0; t < tiles; ++t) many |= uint32_t{x[t].slots < 0} << t;
  for (uint32_t left = many; left; left &= left - 1)
    int4_tile<kSumRows, 2>(task, w, row + __builtin_ctz(left) * kSumRows, block);
  Floats totals[kRowsOfSums][2]{};
  SumGroup group;
  for (int64_t first = 0, g = 0; first < w.k; first += kSumGroup, ++g, x += kSumTiles) {
    unpack_group(group, panel + w.units + first * 8, w.panel_bytes);
    for (int p = 0; p < 2; ++p)
      __builtin_memcpy(&group.scales[p], panel + p * w.panel_bytes + g * 64, 64);
    for (int64_t t = 0; t < tiles; ++t) {
      // The next panels' group, a few lines beside each tile: memory brings no more at once.
      for (int64_t u = t; u < kSumGroup / 8; u += tiles)
        for (int p = 2; p < 4; ++p)
          __builtin_prefetch(panel + p * w.panel_bytes + w.units + first * 8 + u * 64, 0, 2);
      if (many >> t & 1) continue;
      Floats(*const of_tile)[2] = totals + t * kSumRows;
      add_group(of_tile, group, x[t]);
      if (first + kSumGroup < w.k) continue;
      const int64_t first_row = row + t * kSumRows;
      Result results[kSumRows][2];
      for (int r = 0; r < kSumRows; ++r)
        for (int p = 0; p < 2; ++p)
          results[r][p].value = of_tile[r][p] * task.row_scales[first_row + r];
      put_whole_tile<kSumRows, 2>(task, results, first_row, block);
    }
  }
}

int64_t multiply_by_sums(const GemmTask<bf16>& task, const QuantisedPanels& w) {
  if (!task.row_tiles) return 0;
  const int64_t rows = task.m / kSumRows * kSumRows;
  int64_t many = 0;
  for (int64_t row = 0; row < rows; row += kSumRows)
    many += row_groups(task.row_tiles, row / kSumRows, w.k)->slots < 0 ? kSumRows : 0;
  if (4 * many > rows) return 0;
  for (int64_t row = 0; row < rows; row += kRowsOfSums) {
    const int64_t some = rows - row < kRowsOfSums ? rows - row : kRowsOfSums;
    int64_t block = task.first_block;
    for (; block + 2 <= task.end_block; block += 2) sum_panels(task, w, row, some, block);
    for (int64_t r = 0; r < some && block < task.end_block; r += kSumRows)
      int4_tile<kSumRows, 1>(task, w, row + r, block);
  }
  return rows;
}

}  // namespace
