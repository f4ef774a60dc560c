// What CudaBackend and the kernel of large products (gemm_large.cuh) both name.
#pragma once

namespace nanovllm {

/// The use of a product's sums: y is them, or silu_and_mul() of them, or they are heads,
/// normalised, rotated and stored.
enum class LargeEnd { store, gate, heads };

/// What an end takes besides the product.
template <LargeEnd end>
struct LargeInput {};

}  // namespace nanovllm
