// What the skinny products take of Hopper beside tma.cuh and wgmma.cuh: copies of what is read
// once, and wgmma with both operands in shared memory, for tiles of few columns.
#pragma once

#include "ops/cuda/wgmma.cuh"

namespace nanovllm {

/// Names a tile of rows of 64 bf16 (wgmma.cuh) for either operand. The next 16 elements of k are 2
/// further on.
__device__ inline uint64_t tile_of(const void* tile) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16 | shared_address(tile) >> 4;
}

#define NANOVLLM_4(d, i) "+f"((d)[i]), "+f"((d)[i + 1]), "+f"((d)[i + 2]), "+f"((d)[i + 3])
#define NANOVLLM_8(d, i) NANOVLLM_4(d, i), NANOVLLM_4(d, i + 4)

__device__ inline void product_n8(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, "
      "0, 0;"
      : NANOVLLM_4(d, 0)
      : "l"(a), "l"(b));
}
__device__ inline void product_n16(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "%8, %9, 1, 1, 1, 0, 0;"
      : NANOVLLM_8(d, 0)
      : "l"(a), "l"(b));
}
__device__ inline void product_n24(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11}, %12, %13, 1, 1, 1, 0, 0;"
      : NANOVLLM_8(d, 0), NANOVLLM_4(d, 8)
      : "l"(a), "l"(b));
}
__device__ inline void product_n32(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
      : NANOVLLM_8(d, 0), NANOVLLM_8(d, 8)
      : "l"(a), "l"(b));
}
__device__ inline void product_n48(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, "
      "%25, 1, 1, 1, 0, 0;"
      : NANOVLLM_8(d, 0), NANOVLLM_8(d, 8), NANOVLLM_8(d, 16)
      : "l"(a), "l"(b));
}
__device__ inline void product_n64(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
      "%25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, 0;"
      : NANOVLLM_8(d, 0), NANOVLLM_8(d, 8), NANOVLLM_8(d, 16), NANOVLLM_8(d, 24)
      : "l"(a), "l"(b));
}
__device__ inline void product_n96(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
      "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
      "%27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, "
      "%45, %46, %47}, %48, %49, 1, 1, 1, 0, 0;"
      : NANOVLLM_8(d, 0), NANOVLLM_8(d, 8), NANOVLLM_8(d, 16), NANOVLLM_8(d, 24), NANOVLLM_8(d, 32),
        NANOVLLM_8(d, 40)
      : "l"(a), "l"(b));
}
__device__ inline void product_n128(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
      "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
      "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63}, %64, %65, 1, 1, 1, 0, 0;"
      : NANOVLLM_8(d, 0), NANOVLLM_8(d, 8), NANOVLLM_8(d, 16), NANOVLLM_8(d, 24), NANOVLLM_8(d, 32),
        NANOVLLM_8(d, 40), NANOVLLM_8(d, 48), NANOVLLM_8(d, 56)
      : "l"(a), "l"(b));
}
__device__ inline void product_n144(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
      "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
      "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71}, %72, %73, 1, 1, 1, 0, 0;"
      : NANOVLLM_8(d, 0), NANOVLLM_8(d, 8), NANOVLLM_8(d, 16), NANOVLLM_8(d, 24), NANOVLLM_8(d, 32),
        NANOVLLM_8(d, 40), NANOVLLM_8(d, 48), NANOVLLM_8(d, 56), NANOVLLM_8(d, 64)
      : "l"(a), "l"(b));
}
__device__ inline void product_n192(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
      "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
      "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, %96, "
      "%97, 1, 1, 1, 0, 0;"
      : NANOVLLM_8(d, 0), NANOVLLM_8(d, 8), NANOVLLM_8(d, 16), NANOVLLM_8(d, 24), NANOVLLM_8(d, 32),
        NANOVLLM_8(d, 40), NANOVLLM_8(d, 48), NANOVLLM_8(d, 56), NANOVLLM_8(d, 64),
        NANOVLLM_8(d, 72), NANOVLLM_8(d, 80), NANOVLLM_8(d, 88)
      : "l"(a), "l"(b));
}
#undef NANOVLLM_8
#undef NANOVLLM_4

/// Of D, a lane (g = lane / 4, t = lane % 4) of warp w holds rows 16 w + g and + 8, columns 8 j + 2
/// t and + 1, as d[4 j .. 4 j + 3], row by row.
template <int n>
__device__ __forceinline__ void product(float* d, uint64_t a, uint64_t b) {
  static_assert(n == 8 || n == 16 || n == 24 || n == 32 || n == 48 || n == 64 || n == 96 ||
                n == 128 || n == 144 || n == 192);
  if constexpr (n == 8) product_n8(d, a, b);
  if constexpr (n == 16) product_n16(d, a, b);
  if constexpr (n == 24) product_n24(d, a, b);
  if constexpr (n == 32) product_n32(d, a, b);
  if constexpr (n == 48) product_n48(d, a, b);
  if constexpr (n == 64) product_n64(d, a, b);
  if constexpr (n == 96) product_n96(d, a, b);
  if constexpr (n == 128) product_n128(d, a, b);
  if constexpr (n == 144) product_n144(d, a, b);
  if constexpr (n == 192) product_n192(d, a, b);
}

}  // namespace nanovllm
