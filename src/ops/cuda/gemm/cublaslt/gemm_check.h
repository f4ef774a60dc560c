// The definition of a product's bits, and what comparing with it on the device takes
// (gemm_tuning.cpp).
#pragma once

#include <cuda_runtime.h>

#include "core/tensor.h"

namespace nanovllm {

/// y = x w^T, added in the order of k (gemm_in_order.cu). `adds`: y is add() of y and of that.
void gemm_in_order(Tensor y, Tensor x, Tensor w, cudaStream_t stream, bool adds = false);
/// Fills x, bf16 and contiguous, with numbers from -1 to 1 that look random.
void make_operand(const Tensor& x, uint32_t seed, cudaStream_t stream);
/// Adds to *count, on the device, how many words of a and b differ: contiguous, of as many bytes.
void count_different(const Tensor& a, const Tensor& b, int* count, cudaStream_t stream);

}  // namespace nanovllm
