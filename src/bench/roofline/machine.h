// This machine's rates, with which benchmark figures are compared.
#pragma once

#include <string>

#include "bench/roofline/roofline.h"

namespace nanovllm::cli {

/// Bytes per second that `threads` threads read together from memory, the best of several passes
/// over a buffer much larger than the caches (1 GiB, less where memory is short).
double measure_read_bandwidth(int threads);

/// FLOP/s of oneDNN's matrix product with packed weights, 512 rows and weights of a model's size,
/// the best of several. `dtype` is "bf16" or "f32".
double measure_gemm_rate(int threads, const std::string& dtype);

/// Measured earlier for GPUs of this name; zeros for one that is not known.
Rates known_gpu_rates(const std::string& device);

/// The most memory this process had resident, in bytes, since the reset; 0 if unknown.
int64_t peak_memory();
void reset_peak_memory();

}  // namespace nanovllm::cli
