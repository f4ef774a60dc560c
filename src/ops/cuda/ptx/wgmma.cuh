// Hopper's matrix instruction wgmma (sm_90a): a warpgroup, four warps of which warp w has the rows
// 16w .. 16w + 15, multiplies 64 rows of A, here in registers, with a tile of B in shared memory,
// f32 accumulators, asynchronously. Lanes hold A [64, 16] and C [64, N] as mma.sync m16n8k16 has
// them (mma.cuh), and a chain of wgmma k16 steps gives the bits of that instruction's chain.
#pragma once

#include <cstdint>

#include "ops/cuda/ptx/tma.cuh"

namespace nanovllm {

// -- B in shared memory --

// Tiles of bf16 with rows of 64 elements (128 bytes), rows 8i .. 8i + 7 in 1024 bytes on a boundary
// of 1024, 16-byte units swizzled as a tensor map with CU_TENSOR_MAP_SWIZZLE_128B does it. Wider
// rows are several such tiles, one after another.
constexpr int kSwizzleColumns = 64;

// A descriptor's upper half is the same for all: 128-byte swizzle, 1024 bytes from eight rows to
// the next. These are lower halves.

/// B^T [N, 16]: the tile's rows are B's columns (keys of Q K^T). The next 16 elements of k are 32
/// bytes, that is 2, further on.
__device__ inline uint32_t describe_rows(const void* tile) {
  return 1u << 16 | shared_address(tile) >> 4;
}
/// B [16, N]: the tile's rows are B's rows (values of P V), `rows` in a tile of 64 columns. The
/// next 16 rows are 2048 bytes, that is 128, further on.
__device__ inline uint32_t describe_columns(const void* tile, int rows) {
  return static_cast<uint32_t>(rows * 128 / 16) << 16 | shared_address(tile) >> 4;
}

// -- Order --

/// Before the first wgmma, and after ordinary writes to the registers of one.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `pending` committed groups are under way.
template <int pending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
/// The compiler does not know that wgmma works on registers after the instruction: it must move no
/// access to them across this.
template <int N>
__device__ void pin(float (&c)[N][4]) {
#pragma unroll
  for (int j = 0; j < N; ++j)
    asm volatile("" : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])::"memory");
}
template <int N>
__device__ void pin(uint32_t (&a)[N][4]) {
#pragma unroll
  for (int j = 0; j < N; ++j)
    asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3])::"memory");
}

template <int n>
__device__ __forceinline__ void pin(float (&d)[n]) {
#pragma unroll
  for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}
template <int n>
__device__ __forceinline__ void pin(int (&d)[n]) {
#pragma unroll
  for (int& x : d) asm volatile("" : "+r"(x)::"memory");
}
template <int N>
__device__ __forceinline__ void pin(int (&c)[N][4]) {
#pragma unroll
  for (int j = 0; j < N; ++j) pin(c[j]);
}

// -- c (+)= A B; c is replaced if not `accumulate` --

#define NANOVLLM_C(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define NANOVLLM_C4(c, j) \
  NANOVLLM_C(c, j), NANOVLLM_C(c, j + 1), NANOVLLM_C(c, j + 2), NANOVLLM_C(c, j + 3)

/// N = 64. kRows: B is a describe_columns(), else a describe_rows().
template <bool kRows>
__device__ void wgmma_k16(float (&c)[8][4], const uint32_t (&a)[4], uint32_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 b;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "mov.b64 b, {%36, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, b, p, 1, 1, %38;\n"
      "}\n"
      : NANOVLLM_C4(c, 0), NANOVLLM_C4(c, 4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int{accumulate}), "n"(int{kRows}));
}
/// N = 128.
template <bool kRows>
__device__ void wgmma_k16(float (&c)[16][4], const uint32_t (&a)[4], uint32_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b64 b;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "mov.b64 b, {%68, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, b, p, 1, 1, %70;\n"
      "}\n"
      : NANOVLLM_C4(c, 0), NANOVLLM_C4(c, 4), NANOVLLM_C4(c, 8), NANOVLLM_C4(c, 12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int{accumulate}), "n"(int{kRows}));
}

/// c += A B with N = 8, both in shared memory, of A's transpose: its columns are rows there.
__device__ __forceinline__ void wgmma_columns_k16(float (&c)[1][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3}, %4, %5, 1, 1, 1, 1, 0;"
      : NANOVLLM_C(c, 0)
      : "l"(a), "l"(b));
}

#undef NANOVLLM_C4
#undef NANOVLLM_C

// -- Registers: a warpgroup takes or leaves some, the block's sum staying what it was at launch --

template <int registers>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace nanovllm
