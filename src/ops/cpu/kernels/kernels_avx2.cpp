// The CPU kernels for AVX2; compiled with the flags in isa.cmake.
#if defined(__x86_64__)
#define NANOVLLM_KERNELS kernels_avx2
#define NANOVLLM_KERNELS_NAME "avx2"
#include "ops/cpu/kernels/kernels.inl"
#endif
