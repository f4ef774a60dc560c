// Hopper's means for skinny products, beside tma.cuh and wgmma.cuh: copies of what is read
// once, and wgmma with both operands in shared memory, for tiles of few columns.
#pragma once

#include "ops/cuda/ptx/wgmma.cuh"
#include "ops/cuda/ptx/wgmma_registers.cuh"

namespace nanovllm {

/// Names a tile of rows of 64 bf16 (wgmma.cuh) for either operand, by its address in shared memory.
/// The next 16 elements of k are 2 further on.
__device__ inline uint64_t tile_at(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16 | address >> 4;
}
__device__ inline uint64_t tile_of(const void* tile) { return tile_at(shared_address(tile)); }

// An instruction for n columns of B, whose `count` registers of D are places 0 .. count - 1; A and
// B are the two behind them.
#define NANOVLLM_PRODUCT(n, count, a_place, b_place, ...)                                       \
  __device__ inline void product_n##n(float* d, uint64_t a, uint64_t b) {                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" NANOVLLM_D##count \
                 "}, " a_place ", " b_place ", 1, 1, 1, 0, 0;"                                  \
                 : __VA_ARGS__                                                                  \
                 : "l"(a), "l"(b));                                                             \
  }
NANOVLLM_PRODUCT(8, 4, "%4", "%5", NANOVLLM_4("+f", d, 0))
NANOVLLM_PRODUCT(16, 8, "%8", "%9", NANOVLLM_8("+f", d, 0))
NANOVLLM_PRODUCT(24, 12, "%12", "%13", NANOVLLM_8("+f", d, 0), NANOVLLM_4("+f", d, 8))
NANOVLLM_PRODUCT(32, 16, "%16", "%17", NANOVLLM_16("+f", d, 0))
NANOVLLM_PRODUCT(48, 24, "%24", "%25", NANOVLLM_16("+f", d, 0), NANOVLLM_8("+f", d, 16))
NANOVLLM_PRODUCT(64, 32, "%32", "%33", NANOVLLM_32("+f", d, 0))
NANOVLLM_PRODUCT(80, 40, "%40", "%41", NANOVLLM_32("+f", d, 0), NANOVLLM_8("+f", d, 32))
NANOVLLM_PRODUCT(96, 48, "%48", "%49", NANOVLLM_32("+f", d, 0), NANOVLLM_16("+f", d, 32))
NANOVLLM_PRODUCT(112, 56, "%56", "%57", NANOVLLM_32("+f", d, 0), NANOVLLM_16("+f", d, 32),
                 NANOVLLM_8("+f", d, 48))
NANOVLLM_PRODUCT(128, 64, "%64", "%65", NANOVLLM_32("+f", d, 0), NANOVLLM_32("+f", d, 32))
NANOVLLM_PRODUCT(144, 72, "%72", "%73", NANOVLLM_32("+f", d, 0), NANOVLLM_32("+f", d, 32),
                 NANOVLLM_8("+f", d, 64))
NANOVLLM_PRODUCT(160, 80, "%80", "%81", NANOVLLM_32("+f", d, 0), NANOVLLM_32("+f", d, 32),
                 NANOVLLM_16("+f", d, 64))
NANOVLLM_PRODUCT(176, 88, "%88", "%89", NANOVLLM_32("+f", d, 0), NANOVLLM_32("+f", d, 32),
                 NANOVLLM_16("+f", d, 64), NANOVLLM_8("+f", d, 80))
NANOVLLM_PRODUCT(192, 96, "%96", "%97", NANOVLLM_32("+f", d, 0), NANOVLLM_32("+f", d, 32),
                 NANOVLLM_32("+f", d, 64))
NANOVLLM_PRODUCT(208, 104, "%104", "%105", NANOVLLM_32("+f", d, 0), NANOVLLM_32("+f", d, 32),
                 NANOVLLM_32("+f", d, 64), NANOVLLM_8("+f", d, 96))
NANOVLLM_PRODUCT(224, 112, "%112", "%113", NANOVLLM_32("+f", d, 0), NANOVLLM_32("+f", d, 32),
                 NANOVLLM_32("+f", d, 64), NANOVLLM_16("+f", d, 96))
NANOVLLM_PRODUCT(240, 120, "%120", "%121", NANOVLLM_32("+f", d, 0), NANOVLLM_32("+f", d, 32),
                 NANOVLLM_32("+f", d, 64), NANOVLLM_16("+f", d, 96), NANOVLLM_8("+f", d, 112))
NANOVLLM_PRODUCT(256, 128, "%128", "%129", NANOVLLM_32("+f", d, 0), NANOVLLM_32("+f", d, 32),
                 NANOVLLM_32("+f", d, 64), NANOVLLM_32("+f", d, 96))
#undef NANOVLLM_PRODUCT

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
