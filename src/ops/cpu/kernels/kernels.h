// The inner loops of the CPU backend: single-threaded, on raw pointers, compiled once per
// instruction set (kernels.inl) and chosen when a backend is made. Threads, shapes and checks live
// one level up, in the files of the operations.
//
// Nothing in these loops looks at more than one row of an output at a time in a way that would
// change its bits: how rows are grouped decides which registers are used, never the order of the
// arithmetic inside a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/dtype.h"

namespace nanovllm::cpu {

/// A number of a KV cache of DType::e4m3.
struct E4m3 {
  uint8_t bits;
};

/// Query rows of one sequence that share a KV head: `num_tokens` tokens times `group` heads, the
/// first token at `first_position`. Keys and values are of the type of q and out, or E4m3 with the
/// f32 scales of a block's rows behind them. Strides are in elements.
struct AttentionTask {
  const void* q = nullptr;  // first token, first head of the group
  void* out = nullptr;      // likewise; may be q
  int64_t q_token_stride = 0, q_head_stride = 0, out_token_stride = 0, out_head_stride = 0;
  const std::byte *k = nullptr, *v = nullptr;      // this KV head of block 0
  int64_t k_block_stride = 0, v_block_stride = 0;  // in bytes
  bool is_e4m3 = false;
  const int32_t* block_table = nullptr;  // of the sequence
  int block_shift = 0;                   // log2 of the block size
  int64_t head_dim = 0, group = 0, num_tokens = 0, first_position = 0;
  int64_t window = 0;  // keys that a row sees, its own included; 0: all up to its own
  float scale = 0;
  float* scratch = nullptr;  // attention_scratch_floats(head_dim, rows), 64-byte aligned
};

/// Rows of a task worked on together, without AMX tiles and with; a task with more is worked off in
/// such pieces.
constexpr int64_t kAttentionRows = 32, kTileAttentionRows = 256;
/// Keys that one step of the online softmax covers, at fixed absolute positions of the sequence.
constexpr int64_t kAttentionTile = 64;

/// `rows`: FloatKernels::attention_rows.
constexpr int64_t attention_scratch_floats(int64_t head_dim, int64_t rows) {
  const int64_t d = (head_dim + 31) / 32 * 32;
  // q rows and accumulators of a piece, its scores, and one tile of keys and of values.
  return 2 * rows * d + rows * (kAttentionTile + 4) + 2 * kAttentionTile * d + 64;
}

/// y[m, n] = x[m, k] w^T for the weight blocks [first_block, end_block) of kGemmBlock columns each;
/// w: [blocks, k, kGemmBlock].
template <class T>
struct GemmTask {
  const T* x = nullptr;
  int64_t x_stride = 0;
  const T* w = nullptr;
  void* y = nullptr;  // T, or float if y_is_f32
  bool y_is_f32 = false;
  int64_t y_stride = 0, m = 0, n = 0, k = 0, first_block = 0, end_block = 0;
  int64_t segment = 0;       // columns that are summed from zero, of products of pairs
  float* scratch = nullptr;  // gemm_scratch_floats(k); tile products: tile_scratch_floats(m)
  const float* row_scales = nullptr;     // of quantised rows: one, or for each group of the weight
  const std::byte* row_tiles = nullptr;  // QuantisedKernels::arrange's, or null
};
constexpr int64_t kGemmBlock = 16, kGemmRows = 48;
constexpr int64_t gemm_scratch_floats(int64_t k) { return kGemmRows * k; }

/// A quantised weight [n, k] in panels of kGemmBlock rows. A panel is, in units of 64 bytes: of
/// each group the rows' f32 scales; zero points, a byte for each row of a group; columns of the
/// rows' numbers, as many as 32 bits hold, the first lowest: int4 from 0 to 15 (as are its zero
/// points), int8, or E4M3.
struct QuantisedPanels {
  const uint8_t* data = nullptr;
  int64_t k = 0, group = 0;
  int64_t zeros = 0, units = 0,
          panel_bytes = 0;  // where zero points and numbers begin, and its end
};
/// Products of pairs take as many columns at a time, in groups of multiples of them.
constexpr int64_t kPairColumns = 32;
/// Rows for which a product dequantises in registers; with more, panels are dequantised first.
constexpr int64_t kQuantisedRows = 4;
/// So many at a time, beside gemm_scratch_floats().
constexpr int64_t kPanelsAtOnce = 4;
constexpr int64_t panel_scratch_floats(int64_t k) { return kPanelsAtOnce * kGemmBlock / 2 * k; }

/// Columns of quantised rows whose products are summed before they are scaled, and the magnitude
/// from which a scale is computed, at least: core/weight.h's, which has more than kernels may see.
constexpr int64_t kSummedColumns = 128;
constexpr float kLeastRowMagnitude = 0x1p-100f;

/// A number of a quantised row: the bits of a bf16, or an integer, or two of a byte each.
using QuantisedNumber = int16_t;
/// From row to row. Integers end with zeros; those of a byte each, up to a multiple of
/// kByteColumns, with four bytes more for each group of the weight.
constexpr int64_t kByteColumns = 64;
constexpr int64_t quantised_row_stride(int64_t k) {
  return (k + kByteColumns - 1) / kByteColumns * kByteColumns;
}

/// Rows of a tile that products by sums read (integer_sums.inl), tiles that lie together, and the
/// fewest rows and the group of a weight that have such products.
constexpr int64_t kSumRows = 8, kSumTiles = 16, kFewestSumRows = 64, kSumGroup = 128;
constexpr int64_t kMostFoursBeyond = 24;
constexpr size_t sum_tiles_bytes(int64_t rows, int64_t k) {
  constexpr int64_t kRows = kSumRows * kSumTiles;
  return static_cast<size_t>((rows + kRows - 1) / kRows * kSumTiles *
                             (k * (kSumRows + 2) + kMostFoursBeyond * 64));
}

/// Of one kind of numbers beside plain rows or, with quantise(), beside rows of such numbers.
struct QuantisedKernels {
  /// As FloatKernels::gemm, of at most kQuantisedRows rows or, without dequantise(), of any; the
  /// task's w is not read.
  void (*gemm)(const GemmTask<bf16>& task, const QuantisedPanels& w);
  /// A panel as gemm_panels() reads it, [k, kGemmBlock] or pairs of columns: weights or, beside
  /// quantised rows, numbers. Both are null where gemm() takes any rows.
  void (*dequantise)(bf16* to, const QuantisedPanels& w, int64_t panel, int64_t);
  /// The same product of any rows with such panels, which are the task's w.
  void (*gemm_panels)(const GemmTask<bf16>& task, const QuantisedPanels& w);
  /// The numbers that stand for a row of x, and the scale of each `group` of them, or of all where
  /// they are integers: `scale` or, where that is 0, by their largest magnitude. Null beside plain
  /// rows.
  void (*quantise)(QuantisedNumber* numbers, float* scales, const bf16* x, int64_t k, int64_t group,
                   float scale);
  /// A panel as tile_gemm() reads it: pairs of columns, each kTileK columns `stride` elements
  /// behind those before. Null beside quantised rows.
  void (*dequantise_tiles)(bf16* to, const QuantisedPanels& w, int64_t panel, int64_t stride);
  /// One of the tiles that gemm() reads besides quantised rows, with groups of kSumGroup: of
  /// kSumRows rows from `rows` on. Null where it reads none.
  void (*arrange)(std::byte* tiles, int64_t tile, const QuantisedNumber* rows, int64_t k) = nullptr;
};

/// A tile of x: up to kTileRows rows of kTileK elements. Tile products take two tiles of rows by
/// kTileColumns columns at a time.
constexpr int64_t kTileRows = 16, kTileColumns = 32, kTileK = 32;
constexpr int64_t tile_scratch_floats(int64_t m) {
  return (m + 2 * kTileRows - 1) / (2 * kTileRows) * 2 * kTileRows * kTileColumns;
}
/// A dequantised block of kTileColumns rows of a weight, beside them.
constexpr int64_t tile_block_floats(int64_t k) {
  return (k + kTileK - 1) / kTileK * kTileK * kTileColumns / 2;
}

template <class T>
struct FloatKernels {
  void (*add)(T* x, const T* y, int64_t n);                                 // x += y
  void (*rms_norm)(T* y, const T* x, const T* w, int64_t n, float eps);     // y may be x
  void (*rope)(T* head, const float* cos, const float* sin, int64_t half);  // in place
  void (*silu_and_mul)(T* y, const T* gate, const T* up, int64_t n);
  void (*attention)(const AttentionTask& task);
  int64_t attention_rows;  // of a task that are worked on together
  /// A row of a KV cache: its numbers, and their scale, which is `scale` or, where that is 0, by
  /// its largest magnitude.
  void (*store_e4m3)(E4m3* numbers, float* row_scale, const T* x, int64_t n, float scale);
  void (*gemm)(const GemmTask<T>& task);
};

/// Facts of a row of logits, from one pass over it.
struct RowStats {
  float max = 0;
  int32_t argmax = -1;  // the lowest id among equals; -1: the row has a NaN or +inf, or is all -inf
};

struct Kernels {
  std::string_view name;
  FloatKernels<float> f32;
  FloatKernels<bf16> half;
  QuantisedKernels int4, int8, e4m3, int4_rows, int8_rows, e4m3_rows;
  /// Beside plain rows in the order of oneDNN's dot products of bf16 pairs (quantised_pairs.inl);
  /// null where the instruction set has none, or tile products.
  QuantisedKernels int4_pairs, int8_pairs, e4m3_pairs;
  RowStats (*row_stats)(const float* logits, int64_t n);
  /// Sum of exp(logits[i] / temperature - shift), in double from fixed pieces.
  double (*sum_exp)(const float* logits, int64_t n, float temperature, float shift);
  /// argmax of logits[i] / temperature + noise(seed, position, i); `stats` are the row's.
  int32_t (*gumbel_argmax)(const float* logits, int64_t n, float temperature, uint64_t seed,
                           uint32_t position, RowStats stats);
  /// Products of bf16 matrices by tiles; null where the instruction set has none. The task's x is
  /// what pack_tile() made of the rows, x_stride the rows of a tile; w lies in tile_layout(), whose
  /// blocks are kTileColumns wide.
  void (*tile_gemm)(const GemmTask<bf16>& task);
  /// One tile of rows of x, all its k elements: [k / kTileK, tile_rows, kTileK], zeros where x has
  /// no more rows or elements. tile_rows: 1 to kTileRows.
  void (*pack_tile)(bf16* tile, int64_t tile_rows, const bf16* x, int64_t x_stride, int64_t rows,
                    int64_t k);

  template <class T>
  const FloatKernels<T>& of() const {
    if constexpr (std::is_same_v<T, float>)
      return f32;
    else
      return half;
  }
};

/// The best instruction set that this processor can run; "amx" only where `amx` allows it.
const Kernels& best_kernels(bool amx);
/// The set named "amx", "avx512_bf16", "avx512", "avx2" or "base", or null where this processor,
/// system or build lacks it.
const Kernels* find_kernels(std::string_view name);
/// Whether this processor adds on pipes that do not multiply, so that arrange() is worth its time.
bool adds_beside_products();

}  // namespace nanovllm::cpu
