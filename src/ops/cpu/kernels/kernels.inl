// The body of kernels_<isa>.cpp: all inner loops, compiled for one instruction set.
//
// Only headers without inline functions that the loops could call may be included: an out-of-line
// copy compiled for AVX-512 might be the one that the linker keeps for the whole program.
#include <cstddef>
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "ops/cpu/kernels/kernels.h"
#include "ops/noise.h"

namespace nanovllm::cpu {
#include "ops/cpu/kernels/simd.inl"
//
#include "ops/cpu/kernels/rowwise.inl"
//
#if defined(__AMX_BF16__)
#include "ops/cpu/kernels/tiles.inl"
#else
namespace {
template <class T>
constexpr bool kHasTiles = false;
constexpr auto tile_gemm = nullptr, pack_tile = nullptr;
}  // namespace
#endif
//
#include "ops/cpu/kernels/attention.inl"
#if defined(__AMX_BF16__)
#include "ops/cpu/kernels/attention_pack.inl"
//
#include "ops/cpu/kernels/attention_tiles.inl"
#endif
#include "ops/cpu/kernels/gemm.inl"
//
#include "ops/cpu/kernels/quantised.inl"
//
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include "ops/cpu/kernels/quantised_pairs.inl"
#else
namespace {
template <class>
constexpr QuantisedKernels kPairs{};
struct Int4Tables;
template <class Group>
struct BytePairs;
}  // namespace
#endif
//
#include "ops/cpu/kernels/quantised_rows.inl"
//
#include "ops/cpu/kernels/integer_rows.inl"
//
#if defined(__AMX_INT8__)
#include "ops/cpu/kernels/integer_tiles.inl"
#else
namespace {
template <bool IS_INT4>
bool integer_tiles(const GemmTask<bf16>&, const QuantisedPanels&) {
  return false;
}
}  // namespace
#endif
#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
#include "ops/cpu/kernels/integer_sums.inl"
#else
namespace {
int64_t multiply_by_sums(const GemmTask<bf16>&, const QuantisedPanels&) { return 0; }
constexpr auto arrange_rows = nullptr;
}  // namespace
#endif
//
#include "ops/cpu/kernels/sampling.inl"

namespace {
template <class T>
constexpr FloatKernels<T> float_kernels() {
  return {add<T>,       rms_norm<T>,         rope<T>,       silu_and_mul<T>,
          attention<T>, kAttentionRowsOf<T>, store_e4m3<T>, gemm<T>};
}
constexpr Kernels kKernels{NANOVLLM_KERNELS_NAME,
                           float_kernels<float>(),
                           float_kernels<bf16>(),
                           quantised_kernels<Int4Group>(),
                           quantised_kernels<Int8Group>(),
                           quantised_kernels<E4m3Group>(),
                           int4_rows_kernels(arrange_rows),
                           int8_rows_kernels(),
                           e4m3_rows_kernels(),
                           kPairs<Int4Tables>,
                           kPairs<BytePairs<Int8Group>>,
                           kPairs<BytePairs<E4m3Group>>,
                           row_stats,
                           sum_exp,
                           gumbel_argmax,
                           tile_gemm,
                           pack_tile};
}  // namespace

const Kernels& NANOVLLM_KERNELS() { return kKernels; }

}  // namespace nanovllm::cpu
