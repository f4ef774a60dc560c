// The CPU kernels for AVX-512 with bf16 dot products and AMX tiles; compiled with the flags in
// isa.cmake.
#if defined(__x86_64__)
#define NANOVLLM_KERNELS kernels_amx
#define NANOVLLM_KERNELS_NAME "amx"
#include "ops/cpu/kernels/kernels.inl"
#endif
