// The CPU kernels for AVX-512 with bf16 dot products; compiled with the flags in isa.cmake.
#if defined(__x86_64__)
#define NANOVLLM_KERNELS kernels_avx512_bf16
#define NANOVLLM_KERNELS_NAME "avx512_bf16"
#include "ops/cpu/kernels/kernels.inl"
#endif
