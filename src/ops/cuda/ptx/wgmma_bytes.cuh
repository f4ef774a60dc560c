// wgmma of 8-bit numbers (sm_90a): 64 rows of A by n columns of B, k in steps of 32 bytes; E4M3
// with f32 sums, integers with 32 bits. Both operands lie in shared memory as tile_of()
// (gemm_wgmma.cuh) names them, rows of 128 numbers; the next 32 of k are 2 further on.
#pragma once

#include "ops/cuda/ptx/gemm_wgmma.cuh"

namespace nanovllm {

// An instruction for n columns, whose `count` registers of D are places 0 .. count - 1; A, B and
// whether D is added to are the three behind them. `types`, `ends`: of the instruction.
#define NANOVLLM_PRODUCT(D, types, ends, n, count, a_place, b_place, adds_place, ...)       \
  template <bool adds>                                                                      \
  __device__ __forceinline__ void byte_product_n##n(D* d, uint64_t a, uint64_t b) {         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " adds_place                             \
                 ", 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32." types " {" NANOVLLM_D##count \
                 "}, " a_place ", " b_place ", p" ends ";\n}"                               \
                 : __VA_ARGS__                                                              \
                 : "l"(a), "l"(b), "n"(int{adds}));                                         \
  }
#define NANOVLLM_E4M3(...) NANOVLLM_PRODUCT(float, "f32.e4m3.e4m3", ", 1, 1", __VA_ARGS__)
NANOVLLM_E4M3(8, 4, "%4", "%5", "%6", NANOVLLM_4("+f", d, 0))
NANOVLLM_E4M3(16, 8, "%8", "%9", "%10", NANOVLLM_8("+f", d, 0))
NANOVLLM_E4M3(32, 16, "%16", "%17", "%18", NANOVLLM_16("+f", d, 0))
NANOVLLM_E4M3(64, 32, "%32", "%33", "%34", NANOVLLM_32("+f", d, 0))
NANOVLLM_E4M3(96, 48, "%48", "%49", "%50", NANOVLLM_32("+f", d, 0), NANOVLLM_16("+f", d, 32))
NANOVLLM_E4M3(128, 64, "%64", "%65", "%66", NANOVLLM_64("+f", d, 0))
NANOVLLM_E4M3(192, 96, "%96", "%97", "%98", NANOVLLM_64("+f", d, 0), NANOVLLM_32("+f", d, 64))
#undef NANOVLLM_E4M3
#define NANOVLLM_INT8(...) NANOVLLM_PRODUCT(int, "s32.s8.s8", "", __VA_ARGS__)
NANOVLLM_INT8(8, 4, "%4", "%5", "%6", NANOVLLM_4("+r", d, 0))
NANOVLLM_INT8(16, 8, "%8", "%9", "%10", NANOVLLM_8("+r", d, 0))
NANOVLLM_INT8(32, 16, "%16", "%17", "%18", NANOVLLM_16("+r", d, 0))
NANOVLLM_INT8(64, 32, "%32", "%33", "%34", NANOVLLM_32("+r", d, 0))
NANOVLLM_INT8(128, 64, "%64", "%65", "%66", NANOVLLM_64("+r", d, 0))
NANOVLLM_INT8(256, 128, "%128", "%129", "%130", NANOVLLM_64("+r", d, 0), NANOVLLM_64("+r", d, 64))
#undef NANOVLLM_INT8
#undef NANOVLLM_PRODUCT

/// d (+)= A B, of E4M3 numbers into floats, or of integers; the layout of d is that of product(). d
/// is replaced if not `adds`.
template <int n, bool adds, class D>
__device__ __forceinline__ void byte_product(D* d, uint64_t a, uint64_t b) {
  static_assert(n == 8 || n == 16 || n == 32 || n == 64 || n == 96 || n == 128 || n == 192 ||
                n == 256);
  if constexpr (n == 8) byte_product_n8<adds>(d, a, b);
  if constexpr (n == 16) byte_product_n16<adds>(d, a, b);
  if constexpr (n == 32) byte_product_n32<adds>(d, a, b);
  if constexpr (n == 64) byte_product_n64<adds>(d, a, b);
  if constexpr (n == 96) byte_product_n96<adds>(d, a, b);
  if constexpr (n == 128) byte_product_n128<adds>(d, a, b);
  if constexpr (n == 192) byte_product_n192<adds>(d, a, b);
  if constexpr (n == 256) byte_product_n256<adds>(d, a, b);
}

}  // namespace nanovllm
