// The CPU kernels for any processor.
#define NANOVLLM_KERNELS kernels_base
#define NANOVLLM_KERNELS_NAME "base"
#include "ops/cpu/kernels/kernels.inl"
