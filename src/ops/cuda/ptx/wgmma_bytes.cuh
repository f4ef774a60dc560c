// wgmma of 8-bit numbers (sm_90a): 64 rows of A by n columns of B, k in steps of 32 bytes; E4M3
// with f32 sums, integers with 32 bits. Both operands lie in shared memory as tile_of()
// (gemm_wgmma.cuh) names them, rows of 128 numbers; the next 32 of k are 2 further on.
#pragma once

#include "ops/cuda/ptx/gemm_wgmma.cuh"

namespace nanovllm {

// The registers of D: their places in the instruction, and themselves, of kind r.
#define NANOVLLM_4(r, d, i) r((d)[i]), r((d)[i + 1]), r((d)[i + 2]), r((d)[i + 3])
#define NANOVLLM_8(r, d, i) NANOVLLM_4(r, d, i), NANOVLLM_4(r, d, i + 4)
#define NANOVLLM_16(r, d, i) NANOVLLM_8(r, d, i), NANOVLLM_8(r, d, i + 8)
#define NANOVLLM_32(r, d, i) NANOVLLM_16(r, d, i), NANOVLLM_16(r, d, i + 16)
#define NANOVLLM_64(r, d, i) NANOVLLM_32(r, d, i), NANOVLLM_32(r, d, i + 32)
#define NANOVLLM_D4 "%0, %1, %2, %3"
#define NANOVLLM_D8 NANOVLLM_D4 ", %4, %5, %6, %7"
#define NANOVLLM_D16 NANOVLLM_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NANOVLLM_D32 \
  NANOVLLM_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NANOVLLM_D64                                                       \
  NANOVLLM_D32                                                             \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45" \
  ", %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59" \
  ", %60, %61, %62, %63"
#define NANOVLLM_D96                                                       \
  NANOVLLM_D64                                                             \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77" \
  ", %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91" \
  ", %92, %93, %94, %95"
#define NANOVLLM_D128                                                        \
  NANOVLLM_D96                                                               \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107"     \
  ", %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"
// An instruction for n columns, whose `count` registers of D are places 0 .. count - 1; A, B and
// whether D is added to are the three behind them. `types`, `ends`: of the instruction.
#define NANOVLLM_PRODUCT(name, D, types, ends, n, count, a_place, b_place, adds_place, ...) \
  template <bool adds>                                                                      \
  __device__ __forceinline__ void name##_n##n(D* d, uint64_t a, uint64_t b) {               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " adds_place                             \
                 ", 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32." types " {" NANOVLLM_D##count \
                 "}, " a_place ", " b_place ", p" ends ";\n}"                               \
                 : __VA_ARGS__                                                              \
                 : "l"(a), "l"(b), "n"(int{adds}));                                         \
  }
#define NANOVLLM_E4M3(...) \
  NANOVLLM_PRODUCT(e4m3_product, float, "f32.e4m3.e4m3", ", 1, 1", __VA_ARGS__)
NANOVLLM_E4M3(8, 4, "%4", "%5", "%6", NANOVLLM_4("+f", d, 0))
NANOVLLM_E4M3(16, 8, "%8", "%9", "%10", NANOVLLM_8("+f", d, 0))
NANOVLLM_E4M3(32, 16, "%16", "%17", "%18", NANOVLLM_16("+f", d, 0))
NANOVLLM_E4M3(64, 32, "%32", "%33", "%34", NANOVLLM_32("+f", d, 0))
NANOVLLM_E4M3(128, 64, "%64", "%65", "%66", NANOVLLM_64("+f", d, 0))
NANOVLLM_E4M3(192, 96, "%96", "%97", "%98", NANOVLLM_64("+f", d, 0), NANOVLLM_32("+f", d, 64))
#undef NANOVLLM_E4M3
#define NANOVLLM_INT8(...) NANOVLLM_PRODUCT(int8_product, int, "s32.s8.s8", "", __VA_ARGS__)
NANOVLLM_INT8(8, 4, "%4", "%5", "%6", NANOVLLM_4("+r", d, 0))
NANOVLLM_INT8(16, 8, "%8", "%9", "%10", NANOVLLM_8("+r", d, 0))
NANOVLLM_INT8(32, 16, "%16", "%17", "%18", NANOVLLM_16("+r", d, 0))
NANOVLLM_INT8(64, 32, "%32", "%33", "%34", NANOVLLM_32("+r", d, 0))
NANOVLLM_INT8(128, 64, "%64", "%65", "%66", NANOVLLM_64("+r", d, 0))
NANOVLLM_INT8(256, 128, "%128", "%129", "%130", NANOVLLM_64("+r", d, 0), NANOVLLM_64("+r", d, 64))
#undef NANOVLLM_INT8
#undef NANOVLLM_PRODUCT
#undef NANOVLLM_D128
#undef NANOVLLM_D96
#undef NANOVLLM_D64
#undef NANOVLLM_D32
#undef NANOVLLM_D16
#undef NANOVLLM_D8
#undef NANOVLLM_D4
#undef NANOVLLM_64
#undef NANOVLLM_32
#undef NANOVLLM_16
#undef NANOVLLM_8
#undef NANOVLLM_4

/// pin() of such sums.
template <int n>
__device__ __forceinline__ void pin(int (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

/// d (+)= A B; the layout of d is that of product(). d is replaced if not `adds`.
template <int n, bool adds>
__device__ __forceinline__ void e4m3_product(float* d, uint64_t a, uint64_t b) {
  static_assert(n == 8 || n == 16 || n == 32 || n == 64 || n == 128 || n == 192);
  if constexpr (n == 8) e4m3_product_n8<adds>(d, a, b);
  if constexpr (n == 16) e4m3_product_n16<adds>(d, a, b);
  if constexpr (n == 32) e4m3_product_n32<adds>(d, a, b);
  if constexpr (n == 64) e4m3_product_n64<adds>(d, a, b);
  if constexpr (n == 128) e4m3_product_n128<adds>(d, a, b);
  if constexpr (n == 192) e4m3_product_n192<adds>(d, a, b);
}
/// The same of integers.
template <int n, bool adds>
__device__ __forceinline__ void int8_product(int* d, uint64_t a, uint64_t b) {
  static_assert(n == 8 || n == 16 || n == 32 || n == 64 || n == 128 || n == 256);
  if constexpr (n == 8) int8_product_n8<adds>(d, a, b);
  if constexpr (n == 16) int8_product_n16<adds>(d, a, b);
  if constexpr (n == 32) int8_product_n32<adds>(d, a, b);
  if constexpr (n == 64) int8_product_n64<adds>(d, a, b);
  if constexpr (n == 128) int8_product_n128<adds>(d, a, b);
  if constexpr (n == 256) int8_product_n256<adds>(d, a, b);
}

}  // namespace nanovllm
