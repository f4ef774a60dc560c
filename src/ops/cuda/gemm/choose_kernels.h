// What choose.cpp asks each kernel of choose_plain.cpp, choose_quantised.cpp and choose_w8a8.cpp.
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

Why try_wide(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_large(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_mid(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_skinny(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_wide_to_send(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_mid_to_send(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_packed(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_mma(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_fp8(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_int8(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_fp8_to_send(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_int8_to_send(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_w8a8(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);

/// The tiles, for people.
std::string describe(const Fp8Plan& plan, bool integers);
std::string describe(const W8a8Plan& plan);

}  // namespace nanovllm
