// Hopper's means for skinny products, beside tma.cuh and wgmma.cuh: copies of what is read
// once, and wgmma with both operands in shared memory, for tiles of few columns.
#pragma once

#include "ops/cuda/ptx/wgmma.cuh"

namespace nanovllm {

/// Names a tile of rows of 64 bf16 (wgmma.cuh) for either operand, by its address in shared memory.
/// The next 16 elements of k are 2 further on.
__device__ inline uint64_t tile_at(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16 | address >> 4;
}
__device__ inline uint64_t tile_of(const void* tile) { return tile_at(shared_address(tile)); }

// The registers of D: their places in the instruction, and themselves.
#define NANOVLLM_4(d, i) "+f"((d)[i]), "+f"((d)[i + 1]), "+f"((d)[i + 2]), "+f"((d)[i + 3])
#define NANOVLLM_8(d, i) NANOVLLM_4(d, i), NANOVLLM_4(d, i + 4)
#define NANOVLLM_16(d, i) NANOVLLM_8(d, i), NANOVLLM_8(d, i + 8)
#define NANOVLLM_32(d, i) NANOVLLM_16(d, i), NANOVLLM_16(d, i + 16)
#define NANOVLLM_D4 "%0, %1, %2, %3"
#define NANOVLLM_D8 NANOVLLM_D4 ", %4, %5, %6, %7"
#define NANOVLLM_D12 NANOVLLM_D8 ", %8, %9, %10, %11"
#define NANOVLLM_D16 NANOVLLM_D12 ", %12, %13, %14, %15"
#define NANOVLLM_D24 NANOVLLM_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NANOVLLM_D32 NANOVLLM_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NANOVLLM_D40 NANOVLLM_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NANOVLLM_D48 NANOVLLM_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NANOVLLM_D56 NANOVLLM_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NANOVLLM_D64 NANOVLLM_D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NANOVLLM_D72 NANOVLLM_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NANOVLLM_D80 NANOVLLM_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NANOVLLM_D88 NANOVLLM_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NANOVLLM_D96 NANOVLLM_D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NANOVLLM_D104 NANOVLLM_D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NANOVLLM_D112 NANOVLLM_D104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NANOVLLM_D120 NANOVLLM_D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NANOVLLM_D128 NANOVLLM_D120 ", %120, %121, %122, %123, %124, %125, %126, %127"
// An instruction for n columns of B, whose `count` registers of D are places 0 .. count - 1; A and
// B are the two behind them.
#define NANOVLLM_PRODUCT(n, count, a_place, b_place, ...)                                       \
  __device__ inline void product_n##n(float* d, uint64_t a, uint64_t b) {                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" NANOVLLM_D##count \
                 "}, " a_place ", " b_place ", 1, 1, 1, 0, 0;"                                  \
                 : __VA_ARGS__                                                                  \
                 : "l"(a), "l"(b));                                                             \
  }
NANOVLLM_PRODUCT(8, 4, "%4", "%5", NANOVLLM_4(d, 0))
NANOVLLM_PRODUCT(16, 8, "%8", "%9", NANOVLLM_8(d, 0))
NANOVLLM_PRODUCT(24, 12, "%12", "%13", NANOVLLM_8(d, 0), NANOVLLM_4(d, 8))
NANOVLLM_PRODUCT(32, 16, "%16", "%17", NANOVLLM_16(d, 0))
NANOVLLM_PRODUCT(48, 24, "%24", "%25", NANOVLLM_16(d, 0), NANOVLLM_8(d, 16))
NANOVLLM_PRODUCT(64, 32, "%32", "%33", NANOVLLM_32(d, 0))
NANOVLLM_PRODUCT(80, 40, "%40", "%41", NANOVLLM_32(d, 0), NANOVLLM_8(d, 32))
NANOVLLM_PRODUCT(96, 48, "%48", "%49", NANOVLLM_32(d, 0), NANOVLLM_16(d, 32))
NANOVLLM_PRODUCT(112, 56, "%56", "%57", NANOVLLM_32(d, 0), NANOVLLM_16(d, 32), NANOVLLM_8(d, 48))
NANOVLLM_PRODUCT(128, 64, "%64", "%65", NANOVLLM_32(d, 0), NANOVLLM_32(d, 32))
NANOVLLM_PRODUCT(144, 72, "%72", "%73", NANOVLLM_32(d, 0), NANOVLLM_32(d, 32), NANOVLLM_8(d, 64))
NANOVLLM_PRODUCT(160, 80, "%80", "%81", NANOVLLM_32(d, 0), NANOVLLM_32(d, 32), NANOVLLM_16(d, 64))
NANOVLLM_PRODUCT(176, 88, "%88", "%89", NANOVLLM_32(d, 0), NANOVLLM_32(d, 32), NANOVLLM_16(d, 64),
                 NANOVLLM_8(d, 80))
NANOVLLM_PRODUCT(192, 96, "%96", "%97", NANOVLLM_32(d, 0), NANOVLLM_32(d, 32), NANOVLLM_32(d, 64))
NANOVLLM_PRODUCT(208, 104, "%104", "%105", NANOVLLM_32(d, 0), NANOVLLM_32(d, 32),
                 NANOVLLM_32(d, 64), NANOVLLM_8(d, 96))
NANOVLLM_PRODUCT(224, 112, "%112", "%113", NANOVLLM_32(d, 0), NANOVLLM_32(d, 32),
                 NANOVLLM_32(d, 64), NANOVLLM_16(d, 96))
NANOVLLM_PRODUCT(240, 120, "%120", "%121", NANOVLLM_32(d, 0), NANOVLLM_32(d, 32),
                 NANOVLLM_32(d, 64), NANOVLLM_16(d, 96), NANOVLLM_8(d, 112))
NANOVLLM_PRODUCT(256, 128, "%128", "%129", NANOVLLM_32(d, 0), NANOVLLM_32(d, 32),
                 NANOVLLM_32(d, 64), NANOVLLM_32(d, 96))
#undef NANOVLLM_PRODUCT
#undef NANOVLLM_D128
#undef NANOVLLM_D120
#undef NANOVLLM_D112
#undef NANOVLLM_D104
#undef NANOVLLM_D96
#undef NANOVLLM_D88
#undef NANOVLLM_D80
#undef NANOVLLM_D72
#undef NANOVLLM_D64
#undef NANOVLLM_D56
#undef NANOVLLM_D48
#undef NANOVLLM_D40
#undef NANOVLLM_D32
#undef NANOVLLM_D24
#undef NANOVLLM_D16
#undef NANOVLLM_D12
#undef NANOVLLM_D8
#undef NANOVLLM_D4
#undef NANOVLLM_32
#undef NANOVLLM_16
#undef NANOVLLM_8
#undef NANOVLLM_4

/// Of D, a lane (g = lane / 4, t = lane % 4) of warp w holds rows 16 w + g and + 8, columns 8 j + 2
/// t and + 1, as d[4 j .. 4 j + 3], row by row.
template <int n>
__device__ __forceinline__ void product(float* d, uint64_t a, uint64_t b) {
  static_assert(n == 8 || n == 24 || (n % 16 == 0 && n <= 256));
  if constexpr (n == 8) product_n8(d, a, b);
  if constexpr (n == 16) product_n16(d, a, b);
  if constexpr (n == 24) product_n24(d, a, b);
  if constexpr (n == 32) product_n32(d, a, b);
  if constexpr (n == 48) product_n48(d, a, b);
  if constexpr (n == 64) product_n64(d, a, b);
  if constexpr (n == 80) product_n80(d, a, b);
  if constexpr (n == 96) product_n96(d, a, b);
  if constexpr (n == 112) product_n112(d, a, b);
  if constexpr (n == 128) product_n128(d, a, b);
  if constexpr (n == 144) product_n144(d, a, b);
  if constexpr (n == 160) product_n160(d, a, b);
  if constexpr (n == 176) product_n176(d, a, b);
  if constexpr (n == 192) product_n192(d, a, b);
  if constexpr (n == 208) product_n208(d, a, b);
  if constexpr (n == 224) product_n224(d, a, b);
  if constexpr (n == 240) product_n240(d, a, b);
  if constexpr (n == 256) product_n256(d, a, b);
}

}  // namespace nanovllm
