// The questions that choose.cpp asks of each kernel, which choose_plain.cpp, choose_quantised.cpp
// and choose_w8a8.cpp answer.
#pragma once

#include <string>

#include "ops/cuda/gemm/choose.h"

namespace nanovllm {

/// Null: the kernel serves, and its plan is made.
using Why = const char*;
inline constexpr Why kServes = nullptr;

/// The SMs that a product's blocks may have.
inline int sms_of(const GemmGpu& gpu) { return gpu.divides_sms() ? gpu.own_sms : gpu.num_sms; }

/// A product that sends its results ends later than one that does not with fewer rows: two H200s.
inline constexpr int64_t kFewestSentRows = 97;

constexpr int64_t kGroupRows = 64;          // of the tensor cores' first operand
constexpr int64_t kMostRowsOfBlocks = 256;  // where a block has one tile, or few

/// Bytes of a weight from which on it is memory that a product of few rows waits for.
constexpr int64_t kLargeWeight = int64_t{16} << 20;

using Try = Why(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Try try_wide, try_wide_to_send, try_large, try_mid, try_mid_to_send, try_skinny;  // plain weights
Try try_packed, try_mma, try_fp8, try_fp8_to_send, try_int8, try_int8_to_send, try_w8a8;

/// The tiles, for people.
std::string describe(const Fp8Plan& plan, bool integers);
std::string describe(const W8a8Plan& plan);

}  // namespace nanovllm
