// The choice of the kernel that computes a product, and of its tiles: one table (choose.cpp), read
// on the host, without a GPU. Launchers do as it says. Whatever is chosen, the bits are the same.
#pragma once

#include <string>
#include <vector>

#include "core/weight.h"

namespace nanovllm {

enum class GemmKernel : uint8_t {
  none,      ///< no kernel has this end: separate operations
  wide,      ///< gemm_wide.cuh: the weight's rows are wgmma's first operand
  mid,       ///< gemm_mid.cuh: up to 256 rows, a tile for each SM
  skinny,    ///< gemm_skinny.cuh: few rows
  large,     ///< gemm_large.cuh: many rows
  sample,    ///< gemm_sample.cuh: the head and its scan for sampling
  blas,      ///< cuBLASLt; where it has no algorithm that adds in order, in_order
  in_order,  ///< gemm_in_order.cu: the definition, for any shape
  packed,    ///< gemm_packed.cuh: few rows of a quantised weight, which registers unpack
  mma,       ///< gemm_mma.cuh: few rows, on GPUs without wgmma
  unpacked,  ///< a quantised weight becomes bf16 first; then what serves that
  fp8,       ///< gemm_fp8.cuh: E4M3 weights, and rows that are quantised first
  int8,      ///< the same of int8 weights
  w8a8,      ///< gemm_w8a8.cuh: both on other GPUs
};

/// Whether it quantises rows first.
constexpr bool quantises_rows(GemmKernel kernel) { return kernel >= GemmKernel::fp8; }

/// The use of a product's sums.
enum class GemmEnd : uint8_t {
  store,  ///< y is them
  gate,   ///< silu(x g^T) * (x u^T) of the two halves g and u of w's rows
  heads,  ///< queries, keys and values: normalised, rotated and stored (gemm_heads.cuh)
  send,   ///< parts of a sum over ranks: they go to where it is made (sent_parts.cuh)
  scan,   ///< logits: what sampling finds in each row (gemm_sample.cuh)
};

/// x[rows, k] w[n, k]^T.
struct GemmProblem {
  GemmEnd end = GemmEnd::store;
  WeightFormat weight = WeightFormat::bf16;
  DType y = DType::bf16;
  int64_t rows = 0, n = 0, k = 0;
  bool is_aligned = true;  ///< every row of every operand begins on 16 bytes
  /// A quantised weight that registers unpack (packed.h), or whose blocks have whole groups.
  bool is_even = true;

  /// Of k, that a chain of tensor core steps has.
  int64_t chain() const { return weight.in_halves ? k / 2 : k; }
  int64_t outputs() const { return end == GemmEnd::gate ? n / 2 : n; }
  int64_t weight_bytes() const { return n * k * static_cast<int64_t>(size_of(dtype_of(weight))); }
};

/// A GPU and the step under way, as far as the choice depends on them.
struct GemmGpu {
  bool has_wgmma = false;  ///< code for sm_90a runs
  bool has_tma = false;    ///< code for sm_90 or newer
  bool has_e4m3 = false;   ///< code for sm_89 or newer: mma.sync of E4M3 numbers
  int num_sms = 0;
  size_t shared_bytes = 0;  ///< of one block, at most
  int own_sms = 0;          ///< the micro-batch's alone, while it has some; else 0
  bool divides_sms() const { return own_sms > 0; }
};

// How a product is cut. `kernel`: an index into kWideKernels or kMidKernels (gemm_kernels.h);
// `tile`: into kFp8Tiles or kInt8Tiles (fp8_kernels.h), or into kW8a8Tiles (w8a8_kernels.h).
struct WidePlan {
  int kernel = -1, row_blocks = 0;
};
struct MidPlan {
  int kernel = -1, row_blocks = 0, tile_rows = 0;
};
struct SkinnyPlan {
  int columns = 0, block_rows = 0;
};
struct LargePlan {
  int64_t pairs = 0, row_pairs = 0;  ///< tiles of a cluster: all, those above each other
};
struct PackedPlan {
  int warps = 0, units = 0;  ///< of a block; eights of the weight's rows for each
  int row_blocks = 0;
  int groups() const { return (warps + 3) / 4; }
};
struct MmaPlan {
  int warps = 0, units = 0;        ///< of a block; eights of the weight's rows for each
  int eights = 0, row_blocks = 0;  ///< of rows of a tile; tiles that cover all rows
};
struct Fp8Plan {
  int tile = -1, height = 0,
      row_blocks = 0;  ///< of kFp8Tiles or kInt8Tiles; rows of w of a group; blocks of rows
  int items = 0;       ///< tiles, or those of a cluster
};
struct W8a8Plan {
  int tile = -1, row_tiles = 0, column_tiles = 0;  ///< of kW8a8Tiles; that cover y
};
struct SamplePlan {
  int groups = 0, row_blocks = 0, tile_rows = 0;
};

struct GemmChoice {
  GemmKernel kernel = GemmKernel::none;
  GemmEnd end = GemmEnd::store;
  // The kernel's own is made, the others are not.
  WidePlan wide{};
  MidPlan mid{};
  SkinnyPlan skinny{};
  LargePlan large{};
  SamplePlan sample{};
  PackedPlan packed{};
  MmaPlan mma{};
  Fp8Plan fp8{};
  W8a8Plan w8a8{};
};

/// A kernel that could have this end and weight, and why it does not serve.
struct GemmDecline {
  GemmKernel kernel;
  const char* why;
};

/// `declined`: gets those that come before the chosen one.
GemmChoice choose_gemm(const GemmProblem& problem, const GemmGpu& gpu,
                       std::vector<GemmDecline>* declined = nullptr);

/// Whether the kernel takes such a product at all, chosen or not.
bool can_serve(GemmKernel kernel, const GemmProblem& problem, const GemmGpu& gpu);

const char* name_of(GemmKernel kernel);
const char* name_of(GemmEnd end);

/// The choice and its reasons in one line: "skinny, 16 columns by 8 rows; not wide (few rows), mid
/// (few rows for so small a weight)".
std::string explain_gemm(const GemmProblem& problem, const GemmGpu& gpu);

/// How the products of a mixture's experts are computed, both of them.
enum class ExpertKernel : uint8_t {
  plain,        ///< f32, and rows that do not begin on 16 bytes: one thread an output
  pairs,        ///< moe_stream.cuh, each token with each of its experts by itself
  stream,       ///< moe_stream.cuh: few tokens of an expert
  blocks,       ///< moe_gemm.cuh: any number, on any GPU
  many,         ///< moe_many.cuh: many tokens of an expert
  packed,       ///< moe_packed.cuh: quantised weights, which registers unpack
  packed_many,  ///< moe_packed_many.cuh: the same, many tokens of an expert
  fp8,          ///< gemm_fp8.cuh: E4M3 or int8 weights, and rows that are quantised first
  w8a8,         ///< gemm_w8a8.cuh: the same on other GPUs
};
/// `weight`: of weights that differ, one that quantises rows, else a quantised one.
struct ExpertProblem {
  WeightFormat weight = WeightFormat::bf16;
  int64_t tokens = 0, per_token = 0, experts = 0, hidden = 0, inner = 0;
  bool is_even = true;         ///< as GemmProblem's
  bool unpacks_simply = true;  ///< packed weights: even ones with one scale for a record or more
};
struct ExpertChoice {
  ExpertKernel kernel = ExpertKernel::plain;
  int tile_tokens = 1;     ///< of an expert, that a block takes at once
  bool is_sorted = false;  ///< of blocks, packed kinds, fp8 and w8a8: a plan sorts pairs by expert
};
ExpertChoice choose_experts(const ExpertProblem& problem, const GemmGpu& gpu);

}  // namespace nanovllm
