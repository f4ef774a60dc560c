// The CPU kernels for AVX-512; compiled with the flags in isa.cmake.
#if defined(__x86_64__)
#define NANOVLLM_KERNELS kernels_avx512
#define NANOVLLM_KERNELS_NAME "avx512"
#include "ops/cpu/kernels/kernels.inl"
#endif
